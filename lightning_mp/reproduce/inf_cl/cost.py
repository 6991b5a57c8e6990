"""Figure 4: cost of a step against the batch, in counted FLOPs and in seconds.

Legend: ``b`` batch, ``D`` feature width.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp import ContrastiveLoss, GradientCache
from lightning_mp.plan import paper
from lightning_mp.plan.formulas import epoch_hours
from lightning_mp.reproduce.inf_cl.losses import DenseLoss
from lightning_mp.reproduce.output import COMPUTED, MEASURED, PRINTED, Output

__all__ = ["counted", "figure4"]

WIDTH = 64
INPUTS = 192
HIDDEN = 512
MICRO_BATCH = 256
PAIRS = paper.figures()["claims"]["LAION400M_used"]


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
        loss: Tensor = self.loss(*sides, torch.tensor(14.0))
        return loss


def counted(run: Callable[[], object]) -> int:
    """Return the FLOPs of matrix products, by torch's counter."""
    with FlopCounterMode(display=False) as flops:
        run()
    return int(flops.get_total_flops())


def _seconds(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _loss_alone(loss: nn.Module, batch: int) -> Callable[[], object]:
    sides = [torch.randn(batch, WIDTH).div_(8).requires_grad_() for _ in range(2)]
    return lambda: loss(*sides, torch.tensor(14.0)).backward()


def figure4(out: Output) -> None:
    """FLOPs and seconds of a step by batch; the paper's iterations and epochs beside."""
    batches = (256, 512) if out.fast else (256, 512, 1024, 2048, 4096, 8192)
    repeats = 1 if out.fast else 3
    kinds: dict[str, tuple[Callable[[], nn.Module], bool]] = {
        "dense (CLIP)": (DenseLoss, False),
        "lightning-mp": (ContrastiveLoss, True),
    }
    rows: list[dict[str, object]] = []
    for batch in out.progress(batches, "Figure 4"):
        for name, (make, cached) in kinds.items():
            torch.manual_seed(0)
            model = _Model(make(), cached)
            image, text = torch.randn(2, batch, INPUTS)

            def step() -> None:
                model.step(image, text)  # noqa: B023

            whole, loss = counted(step), counted(_loss_alone(make(), batch))
            seconds = _seconds(step, repeats)
            rows.append(_row(name, batch, whole, loss, seconds))
    rows += _of_the_paper(rows[0])
    out.table("figure4", rows, f"Figure 4: cost of a step, D = {WIDTH}; FLOPs are counted")
    _draw(out, rows, list(kinds))


def _row(name: str, batch: int, whole: int, loss: int, seconds: float) -> dict[str, object]:
    return {
        "kind": MEASURED,
        "method": name,
        "batch": batch,
        "loss_flops": loss,
        "loss_flops_over_b2D": loss / (batch**2 * WIDTH),
        "other_flops_a_pair": (whole - loss) / batch,
        "step_s": seconds,
        "ms_a_pair": 1e3 * seconds / batch,
        "epoch_h": None,
        "formula_s": None,
    }


def _of_the_paper(like: dict[str, object]) -> list[dict[str, object]]:
    rows = []
    figure = paper.figures()["fig4_ViT-L/14_8xA800"]
    for method, cells in figure["iter_s"].items():
        for size, seconds in cells.items():
            batch = int(size[:-1]) * 1024
            formula = paper.SECONDS_PER_PAIR * batch
            for kind, step in ((PRINTED, seconds), (COMPUTED, formula)):
                hours = epoch_hours(PAIRS, batch, step)
                row = dict.fromkeys(like) | {"kind": kind, "method": f"{method}, 8 A800"}
                row |= {"batch": batch, "step_s": step, "ms_a_pair": 1e3 * step / batch}
                row["epoch_h"] = figure["epoch_h"][method][size] if kind == PRINTED else hours
                row["formula_s"] = formula
                rows.append(row)
    return rows


def _draw(out: Output, rows: list[dict[str, object]], names: list[str]) -> None:
    title = "Figure 4: cost of a step (solid: measured here; dashed: computed; right: printed)"
    with out.picture("figure4", 3, title) as (flops, seconds, printed):
        # Ours does with the dense loss's products where its workspace keeps all tiles, and with one
        # more where it keeps none.
        most = (6, "$6 b^2 D$"), (8, "$8 b^2 D$, no tile kept")
        for name, color, (units, label) in zip(names, ("#d55e00", "#00429d"), most, strict=True):
            points = [row for row in rows if row["method"] == name]
            x = [int(str(row["batch"])) for row in points]
            flops.plot(x, [row["loss_flops"] for row in points], "o-", color=color, label=name)
            per_pair = [float(str(row["ms_a_pair"])) for row in points]
            seconds.plot(x, per_pair, "o-", color=color, label=name)
            flops.plot(x, [units * b**2 * WIDTH for b in x], "--", color=color, label=label)
        for method, color, marker in (
            ("CLIP", "#d55e00", "o"),
            ("OpenCLIP", "#e69f00", "s"),
            ("Inf-CL", "#56b4e9", "x"),
        ):
            points = [row for row in rows if row["method"] == f"{method}, 8 A800"]
            for kind, style in ((PRINTED, marker), (COMPUTED, "--")):
                cells = [row for row in points if row["kind"] == kind]
                printed.plot(
                    [row["batch"] for row in cells],
                    [row["step_s"] for row in cells],
                    style,
                    fillstyle="none",
                    markersize=8,
                    color=color,
                    label=method if kind == PRINTED else None,
                )
        flops.set(title="FLOPs of the loss (counted)", yscale="log", ylabel="FLOPs")
        seconds.set(title="a step here", yscale="log", ylabel="ms a pair")
        printed.set(title="the paper's 8 A800; line: 0.763 ms a pair", yscale="log", ylabel="s")
        for axes in (flops, seconds, printed):
            axes.set_xscale("log", base=2)
            axes.set(xlabel="batch")
            axes.legend(frameon=False)
