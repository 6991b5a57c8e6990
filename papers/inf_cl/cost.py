"""Figure 4: cost of a step by batch, in counted FLOPs and in seconds.

lightning-mp is measured twice. Where no tile is stored, the loss takes exactly `8 b^2 D` FLOPs,
four products. Otherwise the second sweep reads the tiles that fit the workspace instead of
computing them again, which saves up to one product.

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
from papers.inf_cl.losses import DenseLoss, NothingStored
from papers.output import COMPUTED, MEASURED, PRINTED, Output, Row, line_width

__all__ = ["counted", "figure4"]

WIDTH = 64
INPUTS = 192
HIDDEN = 512
MICRO_BATCH = 256
PAIRS = paper.figures()["claims"]["LAION400M_used"]


class _Method(NamedTuple):
    """A method that is counted and timed."""

    make: Callable[[], nn.Module]
    cached: bool  # whether a gradient cache runs the towers, which adds a forward
    units: int | None  # FLOPs of the loss over `b^2 D`; `None` if the workspace decides
    color: str

    def flops(self, batch: int) -> int | None:
        """Compute the FLOPs of a step: those of the loss, and a constant for each pair."""
        if self.units is None:
            return None
        # The inputs need no gradient.
        first = (2 + self.cached) * INPUTS * HIDDEN
        second = (3 + self.cached) * HIDDEN * WIDTH
        return self.units * batch**2 * WIDTH + 2 * 2 * (first + second) * batch


KINDS = {
    DENSE: _Method(DenseLoss, False, 6, "#d55e00"),
    f"{OURS}, no tile stored": _Method(NothingStored, True, 8, "#56b4e9"),
    OURS: _Method(ContrastiveLoss, True, None, "#00429d"),
}


class _Model(nn.Module):
    """Two small towers, with or without a gradient cache."""

    def __init__(self, loss: nn.Module, cached: bool) -> None:
        super().__init__()
        self.visual, self.text = (
            nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(2)
        )
        self.loss = loss
        self.cache = GradientCache(micro_batch_size=MICRO_BATCH) if cached else None

    def step(self, image: Tensor, text: Tensor) -> None:
        """Compute the gradients of a batch."""
        if self.cache is None:
            self._loss(image, text).backward()
            return
        with self.cache.serving(self, ("visual", "text"), (image, text)):
            loss = self._loss(image, text)
        loss.backward()

    def _loss(self, image: Tensor, text: Tensor) -> Tensor:
        sides = (F.normalize(t(x), dim=-1) for t, x in ((self.visual, image), (self.text, text)))
        # About CLIP's initial scale, 1 / 0.07.
        loss: Tensor = self.loss(*sides, torch.tensor(14.0))
        return loss


def counted(run: Callable[[], object]) -> int:
    """Return the FLOPs of the matrix products, by torch's counter."""
    with FlopCounterMode(display=False) as flops:
        run()
    return int(flops.get_total_flops())


def _loss_alone(loss: nn.Module, batch: int) -> Callable[[], object]:
    # Features have a length of about 1: 8 is the square root of the width.
    sides = [torch.randn(batch, WIDTH).div_(8).requires_grad_() for _ in range(2)]
    return lambda: loss(*sides, torch.tensor(14.0)).backward()


def figure4(out: Output) -> None:
    """Measure FLOPs and seconds of a step by batch, beside the paper's iterations and epochs."""
    batches = (256, 512) if out.fast else (256, 512, 1024, 2048, 4096, 8192)
    repeats = 1 if out.fast else 3
    rows: list[Row] = []
    for batch in out.progress(batches, "Figure 4"):
        for name, kind in KINDS.items():
            # The same towers and inputs for all methods.
            torch.manual_seed(0)
            # A new model for each, because steps add to existing gradients.
            model = _Model(kind.make(), kind.cached)
            step = partial(model.step, *torch.randn(2, batch, INPUTS))
            whole, loss = counted(step), counted(_loss_alone(kind.make(), batch))
            _, *seconds = timeit.repeat(step, number=1, repeat=repeats + 1)  # one warm-up
            rows.append(_cost_row(name, batch, whole, loss, statistics.median(seconds)))
    rows += _paper_cost_rows()
    out.table("figure4", rows, f"Figure 4: cost of a step, D = {WIDTH}; FLOPs are counted")
    _draw(out, rows)


def _cost_row(name: str, batch: int, whole: int, loss: int, seconds: float) -> Row:
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
        # Empty, because `Output.table` takes its columns from the first row.
        "epoch_h": None,
        "formula_s": None,
    }


def _paper_cost_rows() -> Iterator[Row]:
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
    title = "Figure 4: cost of a step (points: counted or measured; dashed lines: computed)"
    with out.picture("figure4", 4, title) as (flops, units, seconds, printed):
        for index, (name, kind) in enumerate(KINDS.items()):
            points = [row for row in rows if row["method"] == name]
            x = [row["batch"] for row in points]
            for axes, column in (
                (flops, "step_flops"),
                (units, "loss_flops_over_b2D"),
                (seconds, "ms_a_pair"),
            ):
                # No line where the computed line goes through the points.
                style = "o" if axes is flops and kind.units else "o-"
                options = {
                    "color": kind.color,
                    "label": name,
                    "linewidth": line_width(index, KINDS),
                }
                axes.plot(x, [row[column] for row in points], style, **options)
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
                # Hollow markers, because points of the three methods coincide.
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
