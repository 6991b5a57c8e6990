"""Figure 4: cost of a step against the batch, in counted FLOPs and in seconds.

Ours is there twice. Where no tile is kept, the loss takes exactly `8 b^2 D` FLOPs: four products.
What tiles fit its workspace are kept from the first sweep for the second, which saves up to one.

Legend: ``b`` batch, ``D`` feature width.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp import ContrastiveLoss, GradientCache
from lightning_mp.plan.formulas import DENSE, OURS, epoch_hours
from papers.inf_cl import printed as paper
from papers.inf_cl.losses import DenseLoss, NothingKept
from papers.output import COMPUTED, MEASURED, PRINTED, Output, Row

__all__ = ["counted", "figure4"]

WIDTH = 64
INPUTS = 192
HIDDEN = 512
MICRO_BATCH = 256
PAIRS = paper.figures()["claims"]["LAION400M_used"]


class _Kind(NamedTuple):
    """What is counted and timed."""

    make: Callable[[], nn.Module]
    cached: bool  # whether towers see micro-batches, which costs a forward more
    units: int | None  # of `b^2 D` FLOPs in the loss; `None` where they depend on the workspace
    color: str

    def flops(self, batch: int) -> int | None:
        """Compute the FLOPs of a step by hand: the loss's, and a constant a pair."""
        if self.units is None:
            return None
        # No gradient is taken of the inputs.
        first = (2 + self.cached) * INPUTS * HIDDEN
        second = (3 + self.cached) * HIDDEN * WIDTH
        return self.units * batch**2 * WIDTH + 2 * 2 * (first + second) * batch


KINDS = {
    DENSE: _Kind(DenseLoss, False, 6, "#d55e00"),
    f"{OURS}, no tile kept": _Kind(NothingKept, True, 8, "#56b4e9"),
    OURS: _Kind(ContrastiveLoss, True, None, "#00429d"),
}


class _Model(nn.Module):
    """Two small towers, plain or under a gradient cache."""

    def __init__(self, loss: nn.Module, cached: bool) -> None:
        super().__init__()
        self.visual, self.text = (
            nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(2)
        )
        self.loss = loss
        self.cache = GradientCache(micro_batch_size=MICRO_BATCH) if cached else None

    def step(self, image: Tensor, text: Tensor) -> None:
        """Take the gradients of a batch."""
        if self.cache is None:
            self._loss(image, text).backward()
            return
        with self.cache.serving(self, ("visual", "text"), (image, text)):
            loss = self._loss(image, text)
        loss.backward()

    def _loss(self, image: Tensor, text: Tensor) -> Tensor:
        sides = (F.normalize(t(x), dim=-1) for t, x in ((self.visual, image), (self.text, text)))
        # About CLIP's scale at the start, 1 / 0.07.
        loss: Tensor = self.loss(*sides, torch.tensor(14.0))
        return loss


def counted(run: Callable[[], object]) -> int:
    """Return the FLOPs of matrix products, by torch's counter."""
    with FlopCounterMode(display=False) as flops:
        run()
    return int(flops.get_total_flops())


def _loss_alone(loss: nn.Module, batch: int) -> Callable[[], object]:
    # Rows of a length of about 1: 8 is the square root of the width.
    sides = [torch.randn(batch, WIDTH).div_(8).requires_grad_() for _ in range(2)]
    return lambda: loss(*sides, torch.tensor(14.0)).backward()


def figure4(out: Output) -> None:
    """FLOPs and seconds of a step by batch; the paper's iterations and epochs beside."""
    batches = (256, 512) if out.fast else (256, 512, 1024, 2048, 4096, 8192)
    repeats = 1 if out.fast else 3
    rows: list[Row] = []
    for batch in out.progress(batches, "Figure 4"):
        for name, kind in KINDS.items():
            # The same towers and inputs for all methods.
            torch.manual_seed(0)
            # A model of its own for each: steps add to gradients that are there.
            model = _Model(kind.make(), kind.cached)
            step = partial(model.step, *torch.randn(2, batch, INPUTS))
            whole, loss = counted(step), counted(_loss_alone(kind.make(), batch))
            _, *seconds = timeit.repeat(step, number=1, repeat=repeats + 1)  # one warms up
            rows.append(_row(name, batch, whole, loss, statistics.median(seconds)))
    rows += _of_the_paper()
    out.table("figure4", rows, f"Figure 4: cost of a step, D = {WIDTH}; FLOPs are counted")
    _draw(out, rows)


def _row(name: str, batch: int, whole: int, loss: int, seconds: float) -> Row:
    return {
        "kind": MEASURED,
        "method": name,
        "batch": batch,
        "step_flops": whole,
        "loss_flops": loss,
        "loss_flops_over_b2D": loss / (batch**2 * WIDTH),
        "other_flops_a_pair": (whole - loss) / batch,
        "step_s": seconds,
        "ms_a_pair": 1e3 * seconds / batch,
        # Empty here: `Output.table` takes its columns from the first row.
        "epoch_h": None,
        "formula_s": None,
    }


def _of_the_paper() -> Iterator[Row]:
    figure = paper.figures()["fig4_ViT-L/14_8xA800"]
    for method, cells in figure["iter_s"].items():
        for size, seconds in cells.items():
            batch = paper.pairs(size)
            formula = paper.SECONDS_PER_PAIR * batch
            hours = epoch_hours(PAIRS, batch, formula)
            for kind, step, epoch in (
                (PRINTED, seconds, figure["epoch_h"][method][size]),
                (COMPUTED, formula, hours),
            ):
                row: Row = {"kind": kind, "method": f"{method}, 8 A800", "batch": batch}
                row |= {"step_s": step, "ms_a_pair": 1e3 * step / batch}
                yield row | {"epoch_h": epoch, "formula_s": formula}


def _draw(out: Output, rows: list[Row]) -> None:
    title = "Figure 4: cost of a step (points: counted or measured; dashed: computed; last: paper)"
    with out.picture("figure4", 4, title) as (flops, units, seconds, printed):
        for name, kind in KINDS.items():
            points = [row for row in rows if row["method"] == name]
            x = [row["batch"] for row in points]
            for axes, column in (
                (flops, "step_flops"),
                (units, "loss_flops_over_b2D"),
                (seconds, "ms_a_pair"),
            ):
                # Points alone where the computed line goes through them.
                style = "o" if axes is flops and kind.units else "o-"
                axes.plot(x, [row[column] for row in points], style, color=kind.color, label=name)
            if kind.units:
                label = f"${kind.units} b^2 D$ and a constant a pair"
                flops.plot(x, [*map(kind.flops, x)], "--", color=kind.color, label=label)
        for method, color, marker in (
            ("CLIP", "#d55e00", "o"),
            ("OpenCLIP", "#e69f00", "s"),
            ("Inf-CL", "#56b4e9", "x"),
        ):
            points = [row for row in rows if row["method"] == f"{method}, 8 A800"]
            for wanted, style, label in ((PRINTED, marker, method), (COMPUTED, "--", "")):
                cells = [(row["batch"], row["step_s"]) for row in points if row["kind"] == wanted]
                # Hollow, as points of the three methods lie on one another.
                options = {"fillstyle": "none", "markersize": 8, "color": color, "label": label}
                printed.plot(*zip(*cells, strict=True), style, **options)
        flops.set(title="FLOPs of a step here (counted)", yscale="log", ylabel="FLOPs")
        units.set(title="FLOPs of the loss (counted)", ylim=(5, 9), ylabel="FLOPs over $b^2 D$")
        seconds.set(title="time of a step here", yscale="log", ylabel="ms a pair")
        printed.set(title="the paper's 8 A800; line: 0.763 ms a pair", yscale="log", ylabel="s")
        for axes in (flops, units, seconds, printed):
            axes.set_xscale("log", base=2)
            axes.set(xlabel="batch")
            axes.legend(frameon=False)
