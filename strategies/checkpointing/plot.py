"""A picture of the memory of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.checkpointing.report import MemoryReport


def plot_memory(report: MemoryReport, ax: Any = None) -> Any:
    """Draw memory over one step, plain and as planned.

    Args:
        report: What was measured and planned.
        ax: Axes of matplotlib to draw on. Default: None, new ones.

    Returns:
        The axes.
    """
    from strategies.checkpointing.report import timeline

    if ax is None:
        from matplotlib.figure import Figure

        ax = Figure(figsize=(8, 4), layout="constrained").add_subplot()
    for label, plan in (("plain", None), ("as planned", report.plan)):
        sizes = [size / 2**20 for _, size in timeline(report.blocks, plan)]
        # Both steps from beginning to end; the planned one has more to do in between.
        places = [i / (len(sizes) - 1) for i in range(len(sizes))]
        ax.step(places, sizes, where="post", label=label)
    ax.axhline(report.plan.budget / 2**20, color="grey", linestyle=":", label="budget")
    ax.set_xlabel("from the beginning of a step to its end")
    ax.set_ylabel("activations, MiB")
    ax.legend()
    return ax
