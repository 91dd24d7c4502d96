"""The main job of `make demo`: Lightning and Keras models, with and without the suite.

Trains on scikit-learn's digits in about a minute, prints what was decided, and saves pictures to
`demo_output/`: of learning rates by level, of where training stopped and what was forecast, and of
the memory of a training step.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

# Torch is loaded for Lightning anyway; the Keras example itself runs on every backend.
os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Frameworks deprecate each other's internals; none of it is about this demo.
warnings.filterwarnings("ignore")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from examples import (  # noqa: E402
    early_stopping_keras,
    early_stopping_lightning,
    gradient_checkpointing_keras,
    gradient_checkpointing_lightning,
    layerwise_lr_decay_keras,
    layerwise_lr_decay_lightning,
    three_d_parallel,
)
from strategies.early_stopping import plot  # noqa: E402
from strategies.report import print_decisions  # noqa: E402


def draw_rates(
    rows: dict[str, tuple[dict[str, list[float]], dict[int, float]]], path: Path
) -> None:
    """One row for each framework: rates by level, and validation loss by epoch."""
    figure, axes = plt.subplots(len(rows), 2, figsize=(10, 3.4 * len(rows)), layout="constrained")
    for (left, right), (name, (curves, levels)) in zip(axes, rows.items(), strict=True):
        left.bar(list(levels), list(levels.values()), color="tab:orange")
        left.axhline(1.0, color="tab:blue", ls="--", label="equal rates")
        left.legend(loc="upper left")
        left.set(
            title=f"{name}: learning rate by level",
            xlabel="level (0 = stem, last = head)",
            ylabel="factor on the optimizer's rate",
        )
        for (label, losses), color in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
            right.plot(range(1, len(losses) + 1), losses, label=label, color=color)
        right.set(title=f"{name}: fine-tuning", xlabel="epoch", ylabel="validation loss")
        right.xaxis.set_major_locator(MaxNLocator(integer=True))
        right.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_stops(rows: dict[str, list[float]], path: Path) -> None:
    """Each whole curve, where the callback stops it, and what it forecast there."""
    figure, axes = plt.subplots(1, len(rows), figsize=(10, 3.4), layout="constrained")
    for ax, (name, losses) in zip(axes, rows.items(), strict=True):
        plot(losses, "min", len(losses), preset="safe", ax=ax)
        ax.set(title=name, xlabel="epoch", ylabel="validation loss", ylim=(0, losses[0] / 4))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def learning_rates(path: Path) -> None:
    """Fine-tune with and without layer-wise decay."""
    print("Lightning: a vision transformer, pretrained on digits 0-6, fine-tuned on 0-9 ...")
    fits, in_lightning = layerwise_lr_decay_lightning.run()
    for label, module in fits.items():
        print(f"  {label:32s} test accuracy {module.accuracy:.3f}, loss {module.losses[-1]:.3f}")

    print("Keras: a residual network, the same task ...")
    histories, in_keras = layerwise_lr_decay_keras.run()
    for label, history in histories.items():
        accuracy, loss = (history.history[key][-1] for key in ("val_accuracy", "val_loss"))
        print(f"  {label:32s} test accuracy {accuracy:.3f}, loss {loss:.3f}")

    curves = {label: module.losses for label, module in fits.items()}
    keras_curves = {label: h.history["val_loss"] for label, h in histories.items()}
    levels = {"Lightning": in_lightning.levels_, "Keras": in_keras.levels_}
    both = {"Lightning": curves, "Keras": keras_curves}
    draw_rates({name: (both[name], levels[name]) for name in both}, path)
    print("Each has the base rate that suits it best, chosen on other samples. This is one seed;")
    print("benchmarks/results/layerwise_lr_decay.md has twenty.")
    decided({"Lightning": in_lightning, "Keras": in_keras})


def stopping(path: Path) -> None:
    """Train to the end, and as far as it is worth it."""
    print("\nEarly stopping: a network on digits in Lightning, another in Keras ...")
    fits, in_lightning = early_stopping_lightning.run()
    histories, in_keras = early_stopping_keras.run()
    curves = {
        "Lightning": [module.losses for module in fits.values()],
        "Keras": [history.history["val_loss"] for history in histories.values()],
    }
    for name, (whole, stopped) in curves.items():
        print(
            f"  {name:10s} best validation loss {min(stopped):.4f} in {len(stopped)} epochs, "
            f"{min(whole):.4f} in all {len(whole)}"
        )
    draw_stops({name: whole for name, (whole, _) in curves.items()}, path)
    decided({"Lightning": in_lightning, "Keras": in_keras})


def memory(path: Path) -> None:
    """Train with half of the activations."""
    print("\nGradient checkpointing: a vision transformer with half of its activations ...")
    same, half = gradient_checkpointing_lightning.run()
    print(half.report_.explain(3))
    print(f"  its weights are those of the plain run, bit for bit: {same}")
    print("Keras: a residual network with half of its activations ...")
    difference, in_keras = gradient_checkpointing_keras.run()
    print(in_keras.report_.explain(3))
    print(f"  its weights differ from those of the plain run by {difference:.1e}")
    figure, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
    half.report_.plot(ax)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def decided(callbacks: dict[str, Any]) -> None:
    """Print what was decided."""
    for framework, callback in callbacks.items():
        print(f"\nDecided in {framework}:")
        print_decisions(callback.decisions_)


def main() -> int:
    start = time.perf_counter()
    folder = Path("demo_output")
    folder.mkdir(exist_ok=True)
    learning_rates(folder / "layerwise_lr_decay.png")
    stopping(folder / "early_stopping.png")
    memory(folder / "gradient_checkpointing.png")
    print("\n3D parallelism: a small transformer on two processes ...")
    three_d_parallel.run()
    print(f"Saved pictures to {folder} ({time.perf_counter() - start:.0f} s in all).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
