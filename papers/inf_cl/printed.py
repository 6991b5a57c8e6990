"""The formulas of `plan` beside every figure of Inf-CL's paper (arXiv 2410.17243v1).

Eight numbers are fitted, each to the cells that `FITTED` names; everything else is predicted. The
coefficients of the peak are least squares over the peaks of Inf-CL's rows. The weights beside a
dense loss are counted, not fitted: 16 bytes a parameter.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from lightning_mp.plan import formulas
from lightning_mp.plan.estimate import workspace_on
from lightning_mp.plan.formulas import GIB
from lightning_mp.plan.table import aligned
from papers.output import Output

__all__ = [
    "Cell",
    "all_cells",
    "figures",
    "figures_and_formulas",
    "largest_batch_of",
    "loss_gib",
    "pairs",
    "paper_lines",
    "peak_gib",
    "table1_cells",
]

K = 1024
# An fp32 image and int64 tokens, as in the paper's code.
PAIR_BYTES = 3 * 224 * 224 * 4 + 77 * 8
# ViT-L/14 in micro-batches of 128, weights and optimizer states included.
BACKBONE_GIB = 41.98
CACHED_FEATURES = 4.6  # copies of both features in fp32 under gradient caching
L14_WIDTH, B16_WIDTH = 768, 512
# Counted by `plan --model` under fp16 autocast: parameters, and bytes that both towers save a pair.
L14_PARAMETERS, L14_SAVED = 427_616_513, 284_228_976
B16_PARAMETERS, B16_SAVED = 149_620_737, 93_415_652
CROSS_GPU_MATRICES = 4.0  # Table 4's cross-GPU cell less the one below it, at 64k on 4 GPUs
NAMES = {"CLIP": formulas.DENSE, "OpenCLIP": formulas.LOCAL, "Inf-CL+offload": formulas.INF_CL}
USABLE_GIB = 79.35  # usable memory of an A800 with 80 GiB
SECONDS_PER_PAIR = 25.0 / (32 * K)  # on 8 GPUs, from Inf-CL at 32k

FITTED = {
    "4.096 b^2 + 3.04 bD (CLIP)": "Table 1, CLIP, loss at 32k and 64k on 8 GPUs",
    "4.095 b^2/n + (2 + 2.8/n) bD (OpenCLIP)": "Table 1, OpenCLIP, loss at 64k and 128k on 8 GPUs",
    "15.4 (b/n)D (Inf-CL)": "Table 1, Inf-CL, loss at 128k on 8 GPUs",
    "17.41 (b/n)D (Inf-CL, 128k pairs a rank or more)": "Table 1, offload, 1024k on 8 GPUs",
    "backbone 41.98 GiB, 4.6 copies of both features": "Table 1, peaks of all 14 Inf-CL rows",
    "0.763 ms a pair on 8 GPUs": "Figure 4, Inf-CL, iteration at 32k",
}
"""Coefficients and the cells to which they are fitted."""

SLIPS = (
    '"1.44 GB a GPU for over 10M" is Table 1\'s cell at 1024k; Table 2 has 19.59 at 12288k.',
    "The text divides 220.3 s by 49.4 s and calls it 4; Figure 4 has 200.3 s, and that is 4.05.",
    "Eq. 4 starts from l0 = 0; that adds exp(0) to every sum: l comes out as log(1 + exp(l)).",
    "Memory is said to be O(b/n^2); its cells are O(b/n): 0.72 on 8 and 0.18 on 32 GPUs at 128k.",
    "281x at 1024k on 128 GPUs does not follow from its cells, whose fits give 380x (92x for 78x).",
    "Table 2 has 64.13 GB for OpenCLIP both at 352k and at 368k on 32 GPUs.",
    "Table 1's 0.35 GB at 256k on 32 GPUs is 8k pairs a rank, as 64k on 8 GPUs, which has 0.36.",
    "Table 4's 0.81 GB is 25.9 copies of the features, where Tables 1 and 2 have 15.4.",
    "Table 4's data, 1.96 GB, are 128 kB a pair; Table 1's offload saves 592 kB, an fp32 image.",
)
"""Statements that contradict the paper's own figures."""


@dataclass(frozen=True)
class Cell:
    """One figure of the paper."""

    table: str  # the table or figure
    label: str  # row and column
    paper: float  # value printed in the paper
    predicted: float | None  # by the formulas; `None` if they do not cover it
    note: str = ""  # `"fitted"`, or an explanation

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return None if self.predicted is None else self.predicted / self.paper - 1


@functools.cache
def figures() -> dict[str, Any]:
    """Return the paper's figures, stored in this package."""
    text = resources.files(__package__).joinpath("inf_cl_paper.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def loss_gib(method: str, batch: int, ranks: int, width: int) -> float:
    """Return M_loss in GiB; `method` is a name of the paper's or lightning-mp's."""
    if method == "cross-GPU":  # a ring without tiles also has the logits of one shard
        logits = CROSS_GPU_MATRICES * formulas.FP32 * (batch / ranks) ** 2
        return loss_gib(formulas.INF_CL, batch, ranks, width) + logits / GIB
    name, workspace = NAMES.get(method, method), workspace_on("cuda")
    return formulas.loss_bytes(name, batch, ranks, width, workspace) / GIB


def counted_backbone_gib(parameters: int, saved_per_pair: int, micro_batch: int) -> float:
    """Return the memory of a backbone in GiB, without a fit: both towers of a micro-batch at once.

    Weights, gradients and AdamW's states take 16 bytes a parameter, DDP's buckets 4, half copies 2.
    """
    return (22 * parameters + micro_batch * saved_per_pair) / GIB


def peak_gib(
    method: str, batch: int, ranks: int, *, offload: bool, model: str = "ViT-L/14"
) -> float:
    """Return M_peak in GiB.

    Beside the loss, memory holds weights, gradients and AdamW's states, the features of all pairs
    under gradient caching, and the batch unless it stays on the host.
    """
    rank_batch = batch / ranks
    if model == "ViT-L/14":
        width, parameters, backbone = L14_WIDTH, L14_PARAMETERS, BACKBONE_GIB
    else:
        width, parameters = B16_WIDTH, B16_PARAMETERS
        backbone = counted_backbone_gib(B16_PARAMETERS, B16_SAVED, 128)
    static = 16 * parameters / GIB
    data = 0 if offload else rank_batch * PAIR_BYTES / GIB
    features = CACHED_FEATURES * 2 * formulas.FP32 * width * rank_batch / GIB
    loss = loss_gib(method, batch, ranks, width)
    return data + features + static + max(loss, backbone - static)


def largest_batch_of(method: str, ranks: int, subject: str) -> int:
    """Return the largest batch of a method; `subject` may end with "+offload", as in Table 2."""
    model, _, offload = subject.partition("+")
    return formulas.largest_batch(
        lambda batch: peak_gib(method, batch, ranks, offload=bool(offload), model=model),
        USABLE_GIB,
        4 * K,
    )


def pairs(label: str) -> int:
    """Return the number of pairs that a label such as "64k" stands for."""
    return int(label.rstrip("k")) * K


FITTED_LOSSES = {
    ("8xA800", "CLIP", "32k"),
    ("8xA800", "CLIP", "64k"),
    ("8xA800", "OpenCLIP", "64k"),
    ("8xA800", "OpenCLIP", "128k"),
    ("8xA800", "Inf-CL", "128k"),
    ("8xA800", "Inf-CL+offload", "1024k"),
}


def table1_cells() -> Iterator[tuple[str, int, str, str, float, float]]:
    """Yield the rows of Table 1: machine, ranks, method, batch, memory of the loss and peak."""
    for machine, methods in figures()["table1_loss_peak_GB_ViT-L/14_AdamW_accum128"].items():
        for method, cells in methods.items():
            for size, (loss, peak) in cells.items():
                yield machine, int(machine.partition("x")[0]), method, size, loss, peak


def _table1() -> Iterator[Cell]:
    for machine, ranks, method, size, loss, peak in table1_cells():
        batch, label = pairs(size), f"{machine} {method} {size}"
        note = "fitted" if (machine, method, size) in FITTED_LOSSES else ""
        predicted = loss_gib(method, batch, ranks, L14_WIDTH)
        yield Cell("Table 1, loss, GB", label, loss, predicted, note)
        predicted = peak_gib(method, batch, ranks, offload="offload" in method)
        note = "fitted" if method.startswith("Inf-CL") else ""
        yield Cell("Table 1, peak, GB", label, peak, predicted, note)


def _table2() -> Iterator[Cell]:
    for model, machines in figures()["table2_max_batch_k_lossGB"].items():
        for ranks_text, methods in machines.items():
            ranks = int(ranks_text)
            for method, (size, loss) in methods.items():
                label = f"{model} on {ranks}, {method}"
                width = B16_WIDTH if "B/16" in model else L14_WIDTH
                note = "a slip: as at 352k" if (size, method) == (368, "OpenCLIP") else ""
                predicted = loss_gib(method, size * K, ranks, width)
                yield Cell("Table 2, loss, GB", f"{label} {size}k", loss, predicted, note)
                yield _largest_cell(model, ranks, method, size, label)


def _largest_cell(model: str, ranks: int, method: str, size: int, label: str) -> Cell:
    note = "" if model.startswith("ViT-L/14") else "backbone counted, at 128 a micro-batch"
    if "+" in model and method == "Inf-CL":
        host = size * K / ranks * PAIR_BYTES / GIB
        note = f"limited by the host: {host:.0f} GiB of fp32 images a rank in the paper's row"
    predicted = largest_batch_of(method, ranks, model) / K
    return Cell("Table 2, largest batch, k", label, size, predicted, note)


def _table4() -> Iterator[Cell]:
    key = "table4_[data,loss,backbone,peak,IN]_4xA800_64k_ViT-B/16_accum256"
    batch, ranks = 64 * K, 4
    names = {"Vanilla": "CLIP", "cross+in-GPU": "Inf-CL"}
    for level, (data, loss, backbone, peak, accuracy) in figures()[key].items():
        images = batch / ranks * PAIR_BYTES / GIB
        yield Cell("Table 4, data, GB", level, data, images, "a slip: 128 kB a pair is no image")
        predicted = loss_gib(names.get(level, level), batch, ranks, B16_WIDTH)
        copies = "" if level in ("Vanilla", "OpenCLIP") else "a slip: 25.9 copies, not 15.4"
        yield Cell("Table 4, loss, GB", level, loss, predicted, copies)
        locked = "the locked tower is not described"
        yield Cell("Table 4, backbone, GB", level, backbone, None, locked)
        eq10 = data + max(loss, backbone)
        yield Cell("Table 4, peak, GB", level, peak, eq10, "Eq. 10 on the row's own cells")
        yield Cell("Table 4, top-1", level, accuracy, None, "trained, not computed")


def _figure4() -> Iterator[Cell]:
    figure = figures()["fig4_ViT-L/14_8xA800"]
    epoch = figures()["claims"]["LAION400M_used"]
    for method, cells in figure["iter_s"].items():
        for size, seconds in cells.items():
            label = f"{method} {size}"
            note = "fitted" if label == "Inf-CL 32k" else ""
            predicted = SECONDS_PER_PAIR * pairs(size)
            yield Cell("Figure 4, iteration, s", label, seconds, predicted, note)
            hours = formulas.epoch_hours(epoch, pairs(size), seconds)
            paper = figure["epoch_h"][method][size]
            yield Cell("Figure 4, epoch, h", label, paper, hours, "from its own seconds")


def _rest() -> Iterator[Cell]:
    counted = counted_backbone_gib(L14_PARAMETERS, L14_SAVED, 128)
    note = "counted, against the fit to the peaks"
    yield Cell("Backbone, GB", "ViT-L/14, micro-batch 128", BACKBONE_GIB, counted, note)
    scores = figures()["table3_acc_[INval,v2,ObjNet,OOD,COCO_I2T,COCO_T2I]"]
    for label, values in scores.items():
        for name, value in zip(("IN", "v2", "ObjNet", "OOD", "I2T", "T2I"), values, strict=True):
            yield Cell("Table 3, %", f"{label} {name}", value, None, "trained, not computed")
    for claim, batch, ranks in (
        ("fig1_left_256k_8gpu", 256 * K, 8),
        ("fig1_right_1024k_128gpu", 1024 * K, 128),
    ):
        paper = float(figures()["claims"][claim].rstrip("x"))
        ratio = loss_gib("OpenCLIP", batch, ranks, L14_WIDTH)
        ratio /= loss_gib("Inf-CL", batch, ranks, L14_WIDTH)
        yield Cell("Figure 1, times less", claim, paper, ratio, "a slip: see below")


def all_cells() -> list[Cell]:
    """Return every figure of the paper with its prediction, table by table."""
    cells = [*_table1(), *_table2(), *_rest(), *_table4(), *_figure4()]
    return sorted(cells, key=lambda cell: cell.table)  # a stable sort keeps the paper's order


def figures_and_formulas(out: Output) -> None:
    """Print every figure of the paper beside its prediction."""
    print("\n".join(paper_lines()))


def paper_lines() -> Iterator[str]:
    """Yield every cell of the paper beside its prediction, then the fits and the paper's errors."""
    cells = all_cells()
    for table in dict.fromkeys(cell.table for cell in cells):
        of_table = [cell for cell in cells if cell.table == table]
        yield f"{table} (computed)"
        yield from aligned(
            [("", "paper", "predicted", "error", ""), *map(_cell_row, of_table)], left=2
        )
        yield ""
    yield from aligned([("errors", "cells", "median", "mean", "worst"), *_summaries(cells)], left=1)
    yield ""
    yield "Fitted coefficients and their cells; all other cells are predicted:"
    yield from (f"  {name}: {where}" for name, where in FITTED.items())
    yield "Counted, not fitted: 16 bytes a parameter beside the loss, 602,728 bytes of data a pair."
    yield ""
    yield "Errors of the paper, kept as printed:"
    yield from (f"  {slip}" for slip in SLIPS)


def _cell_row(cell: Cell) -> tuple[str, ...]:
    predicted = "-" if cell.predicted is None else f"{cell.predicted:,.2f}"
    error = "-" if cell.error is None else f"{cell.error:+.1%}"
    return f"  {cell.label}", f"{cell.paper:,.2f}", predicted, error, f"  {cell.note}"


def _summaries(cells: Sequence[Cell]) -> Iterator[tuple[str, ...]]:
    for name, tables in (
        ("loss, Tables 1 and 2", ("Table 1, loss, GB", "Table 2, loss, GB")),
        ("  of them not fitted", ("Table 1, loss, GB", "Table 2, loss, GB")),
        ("peak, Table 1", ("Table 1, peak, GB",)),
        ("  of them not fitted", ("Table 1, peak, GB",)),
        ("iteration, Figure 4", ("Figure 4, iteration, s",)),
        ("epoch, Figure 4", ("Figure 4, epoch, h",)),
    ):
        only_predicted = name.startswith(" ")
        errors = [
            abs(cell.error)
            for cell in cells
            if cell.table in tables and cell.error is not None
            if not (only_predicted and cell.note == "fitted")
        ]
        middle, mean, worst = statistics.median(errors), statistics.fmean(errors), max(errors)
        yield name, str(len(errors)), f"{middle:.1%}", f"{mean:.1%}", f"{worst:.1%}"
