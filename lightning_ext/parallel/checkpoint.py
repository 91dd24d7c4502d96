"""The state of the whole model on one rank, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_ext import _compat
from lightning_ext.parallel import transport
from lightning_ext.parallel.mesh import Mesh
from lightning_ext.parallel.split import cut, joined
from strategies.parallel.tensor import TensorRule


class _Warning:
    """Says that a state is not whole, unless it is asked for by us. Can be copied with a module."""

    quiet = False

    def __call__(self, *args: Any) -> None:
        if not self.quiet:
            _compat.rank_zero_warn(
                "state_dict() of a model that ThreeDParallelStrategy has divided holds only what "
                "this rank has; on all ranks call trainer.save_checkpoint(path), or "
                "trainer.strategy.lightning_module_state_dict(), whose result on rank 0 is whole"
            )


class Divided:
    """A module of which this rank holds a part.

    Args:
        root: The LightningModule.
        stages: That hold each parameter and buffer, by name.
        rules: Of the parameters that are cut, by name.
        mesh: The ranks.
    """

    def __init__(
        self,
        root: nn.Module,
        stages: Mapping[str, tuple[int, ...]],
        rules: Mapping[str, TensorRule],
        mesh: Mesh,
    ) -> None:
        self.root, self.stages, self.rules, self.mesh = root, stages, rules, mesh
        self._warning = _Warning()
        if mesh.layout.pipeline * mesh.layout.tensor > 1:
            for module in (root, *root.children()):
                module.register_state_dict_pre_hook(self._warning)

    def _state(self) -> dict[str, Any]:
        self._warning.quiet = True
        try:
            return self.root.state_dict()
        finally:
            self._warning.quiet = False

    def _join(self, value: Any, name: str) -> Any:
        return joined(value.detach(), self.rules.get(name)) if isinstance(value, Tensor) else value

    def whole_state(self) -> dict[str, Any]:
        """The state of the unsplit model on rank zero; elsewhere what is here, in whole tensors."""
        state, mesh = self._state(), self.mesh
        here = {
            name: self._join(value, name)
            for name, value in state.items()
            if not (isinstance(value, Tensor) and value.is_meta)
        }
        if mesh.layout.pipeline == 1 or mesh.data_rank or mesh.tensor_rank:
            return here
        merged = dict(here)
        for stage in range(1, mesh.layout.pipeline):
            rank = mesh.stage_rank(stage)
            names = [n for n in state if self.stages.get(n, (0,))[0] == stage]
            if mesh.stage == stage:
                transport.send(tuple(here[n] for n in names), mesh.stage_rank(0), mesh.pipeline)
            elif mesh.first:
                arrived = transport.receive(rank, mesh.pipeline, mesh.device)
                merged |= {n: t.detach() for n, t in zip(names, arrived, strict=True)}
        return {name: merged[name] for name in state if name in merged}

    def pieces(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Of the state of an unsplit model what this rank holds."""
        found = dict(state)
        for name, target in self._state().items():
            value = found.get(name)
            if not isinstance(value, Tensor) or not isinstance(target, Tensor):
                continue
            if target.is_meta and value.shape == target.shape:
                found[name] = target
            elif isinstance(target, DTensor) and value.shape == target.shape:
                rule = self.rules.get(name) if target.placements[0].is_shard() else None
                found[name] = cut(value.to(self.mesh.device), rule, self.mesh)
        return found

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.root.named_parameters()}

    def whole_optimizer(self, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer as that of the unsplit model would have it, on rank zero."""
        optimizer, mesh = getattr(optimizer, "optimizer", optimizer), self.mesh
        state, names = optimizer.state_dict(), self._names()
        order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        state["state"] = {
            index: {key: self._join(value, order[index]) for key, value in entries.items()}
            for index, entries in state["state"].items()
        }
        for stage in range(1, mesh.layout.pipeline):
            own = state["state"] if mesh.stage == stage else None
            theirs = transport.share(own, mesh.stage_rank(stage), mesh.pipeline)
            state["state"] = {**theirs, **state["state"]}
        state["state"] = dict(sorted(state["state"].items()))
        return dict(state)

    def optimizer_pieces(self, optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
        """Of the state of an optimizer of the unsplit model what this rank holds."""
        names = self._names()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kept: dict[int, dict[str, Any]] = {}
        for index, entries in state["state"].items():
            p = parameters[index]
            if not p.is_meta:
                rule = self.rules.get(names[id(p)])
                kept[index] = {key: self._piece(value, p, rule) for key, value in entries.items()}
        return {**state, "state": kept}

    def _piece(self, value: Any, p: nn.Parameter, rule: TensorRule | None) -> Any:
        """Of what an optimizer keeps for a parameter what belongs to this rank."""
        if not isinstance(p, DTensor) or not isinstance(value, Tensor) or not value.ndim:
            return value
        split = p.placements[0].is_shard() and value.shape == p.shape
        return cut(value.to(self.mesh.device), rule if split else None, self.mesh)
