"""The engine behind `ThreeDParallelStrategy`: mesh, tensor plan, stages, steps, checkpoints."""

from lightning_ext.parallel.parts import PipelinePart

__all__ = ["PipelinePart"]
