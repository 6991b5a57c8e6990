"""A plan as a picture: memory of a rank against the batch, method by method."""

from __future__ import annotations

from pathlib import Path

from lightning_mp.plan.estimate import METHODS, Machine, memory
from lightning_mp.plan.formulas import GIB
from lightning_mp.plan.subject import Subject

__all__ = ["COLORS", "draw_plan"]

# Told apart by eyes that cannot tell red from green; ours is the darkest.
COLORS = ("#b3b3b3", "#d55e00", "#e69f00", "#56b4e9", "#00429d")


def draw_plan(path: Path, subject: Subject, machine: Machine, batch: int) -> None:
    """Write a log-log picture of memory against batch; all of it is computed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sizes = [machine.gpus * 2**power for power in range(4, 40)]
    sizes = [size for size in sizes if size <= 16 * batch]
    for method, color in zip(METHODS, COLORS, strict=True):
        peaks = [memory(method, size, subject, machine).peak / GIB for size in sizes]
        # Inf-CL's line lies under ours where both have the same backbone.
        width = 4.5 if method.name == "Inf-CL" else 1.8
        axes.plot(sizes, peaks, "--", color=color, label=method.name, linewidth=width)
    limit = machine.gpu_bytes / GIB
    axes.axhline(limit, color="black", linewidth=1)
    axes.annotate(f"{limit:g} GiB", (sizes[0], limit), xytext=(2, 3), textcoords="offset points")
    axes.axvline(batch, color="black", linewidth=1, linestyle=":")
    low = memory(METHODS[-1], sizes[0], subject, machine).peak / GIB
    axes.set(
        xscale="log",
        yscale="log",
        ylim=(low / 2, 30 * max(limit, low)),
        xlabel="global batch, pairs",
        ylabel="memory of a rank at its peak, GiB",
        title=f"{subject.name} on {machine.gpus} ranks, {subject.precision} (computed)",
    )
    axes.set_xscale("log", base=2)
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
