"""The main job of `make demo`: one Lightning and one Keras model, with and without the suite.

Trains on scikit-learn's digits in under a minute, prints what was decided, and saves a picture of
the learning rate of each level and of the loss curves to `demo_output/`.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

# Torch is loaded for Lightning anyway; the Keras example itself runs on every backend.
os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Frameworks deprecate each other's internals; none of it is about this demo.
warnings.filterwarnings("ignore")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from examples import layerwise_lr_decay_keras, layerwise_lr_decay_lightning  # noqa: E402
from strategies.report import print_decisions  # noqa: E402

PICTURE = "layerwise_lr_decay.png"


def draw(rows: dict[str, tuple[dict[str, list[float]], dict[int, float]]], path: Path) -> None:
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


def main() -> int:
    start = time.perf_counter()
    folder = Path("demo_output")
    folder.mkdir(exist_ok=True)

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
    draw(
        {
            "Lightning": (curves, in_lightning.levels_),
            "Keras": (keras_curves, in_keras.levels_),
        },
        folder / PICTURE,
    )
    print("Each has the base rate that suits it best, chosen on other samples. This is one seed;")
    print("benchmarks/results/layerwise_lr_decay.md has twenty.")
    for framework, callback in (("Lightning", in_lightning), ("Keras", in_keras)):
        print(f"\nDecided in {framework}:")
        print_decisions(callback.decisions_)
    print(f"Saved {folder / PICTURE} ({time.perf_counter() - start:.0f} s in all).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
