"""Tables 1 and 2 and Figure 1: memory of the loss and largest batch by method.

Legend: ``b`` batch of a rank, ``B`` global batch, ``D`` feature width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from lightning_mp.plan import formulas
from lightning_mp.plan.estimate import workspace_on
from lightning_mp.plan.formulas import DENSE, GIB, INF_CL, LOCAL, OURS
from papers.allocation import peak_allocated
from papers.inf_cl import printed as paper
from papers.inf_cl.losses import MANY_TILES, METHODS
from papers.inf_cl.printed import L14_WIDTH, K
from papers.output import COMPUTED, MEASURED, PRINTED, Output, Row
from papers.ranks import on_ranks

__all__ = ["figure1", "table1", "table2"]

MIB = 2**20
RANKS = 4
# Distinct for readers who do not see red and green as different; ours is the darkest.
COLOR = {DENSE: "#d55e00", LOCAL: "#e69f00", INF_CL: "#56b4e9", OURS: "#00429d"}


def _loss_peak(method: str, rows: int, width: int) -> int:
    """Return the peak memory of loss and backward on this rank."""
    random = torch.Generator().manual_seed(dist.get_rank())
    image_bD, text_bD = (
        # Length of about 1, as normalized features have.
        torch.randn(rows, width, generator=random).div_(width**0.5).requires_grad_()
        for _ in range(2)
    )
    scale = torch.tensor(14.0, requires_grad=True)
    loss_fn = METHODS[method]()
    loss_fn(image_bD[:64], text_bD[:64], scale).backward()  # allocates the buffers of a first call
    # Backward would add to existing gradients, whose memory would not be counted.
    image_bD.grad = text_bD.grad = None
    return peak_allocated(lambda: loss_fn(image_bD, text_bD, scale).backward())


def _peaks(rank: int, cases: list[tuple[str, int]], width: int) -> list[int]:
    return [_loss_peak(method, batch // RANKS, width) for method, batch in cases]


def _largest_batches(rank: int, budget: int, width: int) -> dict[str, int]:
    """Search for the largest batch of each method, with the same steps on all ranks."""

    def peak(method: str, batch: int) -> float:
        most = torch.tensor(_loss_peak(method, batch // RANKS, width))
        # All ranks search by the same number; otherwise their collectives would not match.
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most)

    return {
        method: formulas.largest_batch(functools.partial(peak, method), budget, 64 * RANKS)
        for method in METHODS
    }


@functools.cache  # the table and the figure use it
def _measured_rows(out: Output) -> list[Row]:
    """Measure the loss at small sizes."""
    width = 64 if out.fast else 256
    # CLIP's loss of 8,192 pairs is 1.1 GiB on each of four ranks.
    cases = [
        (method, batch)
        for method in METHODS
        for batch in ((512, 1024) if out.fast else (1024, 2048, 4096, 8192))
        if formulas.loss_bytes(method, batch, RANKS, width, MANY_TILES) < 600 * MIB
    ]
    peaks = zip(*on_ranks(_peaks, RANKS, cases, width), strict=True)
    return [
        # The rank with the highest peak decides whether the batch fits.
        _memory_row(MEASURED, method, RANKS, batch, width, max(peak))
        for (method, batch), peak in zip(cases, peaks, strict=True)
    ]


def _memory_row(kind: str, method: str, ranks: int, batch: int, width: int, bytes_: float) -> Row:
    # Rows of 4 ranks are measured here, with the smallest workspace; the paper's rows are of GPUs.
    workspace = MANY_TILES if ranks == RANKS else workspace_on("cuda")
    predicted = formulas.loss_bytes(method, batch, ranks, width, workspace)
    return {
        "kind": kind,
        "method": method,
        "ranks": ranks,
        "batch": batch,
        "width": width,
        "loss_MiB": bytes_ / MIB,
        "formula_MiB": predicted / MIB,
        "formula_error": predicted / bytes_ - 1,
    }


def _paper_memory_rows() -> Iterator[Row]:
    for _, ranks, method, size, loss, _ in paper.table1_cells():
        if not method.endswith("offload"):  # with it, the loss is the same
            name, batch = paper.NAMES.get(method, method), paper.pairs(size)
            yield _memory_row(PRINTED, name, ranks, batch, L14_WIDTH, loss * GIB)


def table1(out: Output) -> None:
    """Compare the memory of the loss by method: measured, printed in the paper, and computed."""
    rows = [*_measured_rows(out), *_paper_memory_rows()]
    for ranks in (8, 32):
        for size in (32, 64, 128, 256, 1024):
            bytes_ = paper.loss_gib(OURS, size * K, ranks, L14_WIDTH) * GIB
            rows.append(_memory_row(COMPUTED, OURS, ranks, size * K, L14_WIDTH, bytes_))
    out.table("table1", rows, "Table 1: memory of the loss and its backward on a rank")


def table2(out: Output) -> None:
    """Search the largest batch by method under a small budget, and compute it under 80 GB."""
    out.table("table2", _largest_rows(out), "Table 2: largest batch that fits")


@functools.cache  # the table and the figure use it
def _largest_rows(out: Output) -> list[Row]:
    width, budget = 64, MIB * 3 // 2 if out.fast else 3 * MIB
    rows = []
    for method, batch in on_ranks(_largest_batches, RANKS, budget, width)[0].items():
        predicted = formulas.largest_batch(
            lambda size, m=method: formulas.loss_bytes(m, size, RANKS, width, MANY_TILES),  # type: ignore[misc]
            budget,
            64 * RANKS,
        )
        for kind, size in ((MEASURED, batch), (COMPUTED, predicted)):
            model = f"loss alone, D = {width}"
            rows.append(_largest_row(kind, model, RANKS, method, size, budget))
    return rows + list(_with_80_gb())


def _with_80_gb() -> Iterator[Row]:
    budget = int(paper.USABLE_GIB * GIB)
    for model, machines in paper.figures()["table2_max_batch_k_lossGB"].items():
        for ranks, methods in ((int(text), methods) for text, methods in machines.items()):
            for method in (*methods, OURS):
                place = model, ranks, paper.NAMES.get(method, method)
                if method in methods:
                    yield _largest_row(PRINTED, *place, methods[method][0] * K, budget)
                computed = paper.largest_batch_of(method, ranks, model)
                yield _largest_row(COMPUTED, *place, computed, budget)


def _largest_row(kind: str, model: str, ranks: int, method: str, batch: int, budget: int) -> Row:
    return {
        "kind": kind,
        "model": model,
        "ranks": ranks,
        "method": method,
        "largest_batch": batch,
        "budget_MiB": budget / MIB,
    }


def figure1(out: Output) -> None:
    """Draw memory by batch, and the largest batches: measured solid, computed dashed."""
    measured, largest = _measured_rows(out), _largest_rows(out)
    printed = [row for row in _paper_memory_rows() if row["ranks"] == 8]
    title = "Figure 1: memory of the loss (solid: measured; dashed: computed; crosses: printed)"
    with out.picture("figure1", 3, title) as (here, there, bars):
        width = measured[0]["width"]
        for method in METHODS:
            here.plot(*_points(measured, method), "o-", color=COLOR[method], label=method)
            sizes = [2**power for power in range(8, 21)]
            y = [
                formulas.loss_bytes(method, size, RANKS, width, MANY_TILES) / MIB for size in sizes
            ]
            here.plot(sizes, y, "--", color=COLOR[method], linewidth=1)
        here.set(title=f"here, {RANKS} gloo ranks, D = {width}", ylabel="MiB a rank")
        for method, color in COLOR.items():
            sizes = [2**power for power in range(14, 25)]
            y = [paper.loss_gib(method, size, 8, L14_WIDTH) * 1024 for size in sizes]
            there.plot(sizes, y, "--", color=color, label=method, linewidth=1.5)
            there.plot(*_points(printed, method), "x", color=color, markersize=8)
        there.axhline(paper.USABLE_GIB * 1024, color="black", linewidth=1)
        there.set(title="the paper's 8 A800, D = 768; line: 79 GiB", ylabel="MiB a GPU")
        for axes in (here, there):
            axes.set_xscale("log", base=2)
            axes.set(yscale="log", xlabel="global batch")
            axes.legend(frameon=False)
        _draw_bars(bars, largest)


def _points(rows: list[Row], method: str) -> tuple[list[int], list[float]]:
    own = [row for row in rows if row["method"] == method]
    return [row["batch"] for row in own], [row["loss_MiB"] for row in own]


def _draw_bars(axes: Any, rows: list[Row]) -> None:
    shown = [row for row in rows if row["model"] == "ViT-L/14" and row["ranks"] == 32]
    labels = list(dict.fromkeys(row["method"] for row in shown))
    for offset, kind, style in (
        (-0.2, PRINTED, {"hatch": "", "linestyle": "-"}),
        (0.2, COMPUTED, {"hatch": "//", "linestyle": "--", "color": "white"}),
    ):
        for row in (row for row in shown if row["kind"] == kind):
            place, value = labels.index(row["method"]), row["largest_batch"]
            colors = {"color": COLOR[row["method"]], "edgecolor": COLOR[row["method"]]}
            label = kind if place == 0 else None
            axes.bar(place + offset, value, 0.38, label=label, **colors | style)
            at = {"ha": "center", "va": "bottom", "fontsize": 8}
            axes.annotate(f"{value // K:,}k", (place + offset, value), **at)
    axes.set(title="largest batch, ViT-L/14 on 32 A800", yscale="log")
    axes.set_xticks(range(len(labels)), labels)
    axes.legend(frameon=False)
