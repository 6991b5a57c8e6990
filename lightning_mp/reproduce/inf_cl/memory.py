"""Tables 1 and 2 and Figure 1: memory of the loss and largest batch, by method.

Legend: ``b`` batch of a rank, ``B`` global batch, ``D`` feature width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from lightning_mp.plan import formulas, paper
from lightning_mp.plan.allocation import peak_allocated
from lightning_mp.plan.estimate import workspace_on
from lightning_mp.plan.formulas import DENSE, INF_CL, LOCAL, OURS
from lightning_mp.plan.table import COLORS
from lightning_mp.reproduce.inf_cl.losses import METHODS
from lightning_mp.reproduce.output import COMPUTED, MEASURED, PRINTED, Output
from lightning_mp.reproduce.ranks import on_ranks

__all__ = ["figure1", "table1", "table2"]

K = 1024
MIB = 2**20
RANKS = 4
WORKSPACE = MIB
COLOR = dict(zip((DENSE, LOCAL, INF_CL, OURS), COLORS[1:], strict=True))


def _peak(method: str, rows: int, width: int) -> int:
    """Return what loss and backward allocate on this rank."""
    random = torch.Generator().manual_seed(dist.get_rank())
    image_bD, text_bD = (
        torch.randn(rows, width, generator=random).div_(width**0.5).requires_grad_()
        for _ in range(2)
    )
    scale = torch.tensor(14.0, requires_grad=True)
    loss_fn = METHODS[method]()
    loss_fn(image_bD[:64], text_bD[:64], scale).backward()  # threads and buffers of a first call
    image_bD.grad = text_bD.grad = None
    return peak_allocated(lambda: loss_fn(image_bD, text_bD, scale).backward())


def _peaks(rank: int, cases: list[tuple[str, int]], width: int) -> list[int]:
    return [_peak(method, batch // RANKS, width) for method, batch in cases]


def _largest(rank: int, budget: int, width: int) -> dict[str, int]:
    """Search for the largest batch of each method; all ranks take the same steps."""

    def peak(method: str, batch: int) -> float:
        most = torch.tensor(_peak(method, batch // RANKS, width))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most)

    return {
        method: formulas.largest_batch(lambda batch, m=method: peak(m, batch), budget, 64 * RANKS)  # type: ignore[misc]
        for method in METHODS
    }


def _measured(out: Output) -> list[dict[str, object]]:
    """Measure the loss at small sizes, once for the table and the figure."""
    if "loss bytes" not in out.measured:
        width = 64 if out.fast else 256
        batches = (512, 1024) if out.fast else (1024, 2048, 4096, 8192)
        # CLIP's loss of 8,192 pairs is 1.1 GiB on each of four ranks.
        cases = [
            (method, batch)
            for method in METHODS
            for batch in batches
            if formulas.loss_bytes(method, batch, RANKS, width, WORKSPACE) < 600 * MIB
        ]
        peaks = zip(*on_ranks(_peaks, RANKS, cases, width), strict=True)
        out.measured["loss bytes"] = [
            _row(MEASURED, method, RANKS, batch, width, max(peak))
            for (method, batch), peak in zip(cases, peaks, strict=True)
        ]
    rows: list[dict[str, object]] = out.measured["loss bytes"]
    return rows


def _row(
    kind: str, method: str, ranks: int, batch: int, width: int, bytes_: float
) -> dict[str, object]:
    workspace = WORKSPACE if ranks == RANKS else workspace_on("cuda")
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


def _of_the_paper() -> Iterator[dict[str, object]]:
    for machine, methods in paper.figures()["table1_loss_peak_GB_ViT-L/14_AdamW_accum128"].items():
        ranks = int(machine.partition("x")[0])
        for method, cells in methods.items():
            if method.endswith("offload"):
                continue  # the loss is the same
            for size, (loss, _) in cells.items():
                batch, name = int(size[:-1]) * K, paper.NAMES.get(method, method)
                yield _row(PRINTED, name, ranks, batch, paper.L14_WIDTH, loss * formulas.GIB)


def table1(out: Output) -> None:
    """Memory of the loss by method: measured here, printed in the paper, ours computed beside."""
    rows = [*_measured(out), *_of_the_paper()]
    for ranks in (8, 32):
        for size in (32, 64, 128, 256, 1024):
            bytes_ = paper.loss_gib(OURS, size * K, ranks, paper.L14_WIDTH) * formulas.GIB
            rows.append(_row(COMPUTED, OURS, ranks, size * K, paper.L14_WIDTH, bytes_))
    out.table("table1", rows, "Table 1: memory of the loss and its backward on a rank")


def table2(out: Output) -> None:
    """Largest batch by method: searched under a small budget, and computed under 80 GB."""
    out.table("table2", _largest_rows(out), "Table 2: largest batch that fits")


def _largest_rows(out: Output) -> list[dict[str, object]]:
    if "largest" not in out.measured:
        width, budget = (64, MIB * 3 // 2) if out.fast else (64, 3 * MIB)
        found = on_ranks(_largest, RANKS, budget, width)[0]
        out.measured["largest"] = list(_budgeted(found, width, budget)) + list(_with_80_gb())
    rows: list[dict[str, object]] = out.measured["largest"]
    return rows


def _budgeted(found: dict[str, int], width: int, budget: int) -> Iterator[dict[str, object]]:
    for method, batch in found.items():
        predicted = formulas.largest_batch(
            lambda size, m=method: formulas.loss_bytes(m, size, RANKS, width, WORKSPACE),  # type: ignore[misc]
            budget,
            64 * RANKS,
        )
        for kind, size in ((MEASURED, batch), (COMPUTED, predicted)):
            yield _largest_row(kind, method, f"loss alone, D = {width}", RANKS, size, budget)


def _with_80_gb() -> Iterator[dict[str, object]]:
    budget = int(paper.USABLE_GIB * formulas.GIB)
    for model, machines in paper.figures()["table2_max_batch_k_lossGB"].items():
        name, _, offloaded = model.partition("+")
        for ranks_text, methods in machines.items():
            ranks = int(ranks_text)
            for method in (*methods, OURS):
                predicted = formulas.largest_batch(
                    lambda batch, m=method, w=ranks, o=offloaded, n=name: paper.peak_gib(  # type: ignore[misc]
                        m, batch, w, offload=bool(o), model=n
                    ),
                    paper.USABLE_GIB,
                    4 * K,
                )
                name_here = paper.NAMES.get(method, method)
                if method in methods:
                    batch = methods[method][0] * K
                    yield _largest_row(PRINTED, name_here, model, ranks, batch, budget)
                yield _largest_row(COMPUTED, name_here, model, ranks, predicted, budget)


def _largest_row(
    kind: str, method: str, model: str, ranks: int, batch: int, budget: int
) -> dict[str, object]:
    return {
        "kind": kind,
        "model": model,
        "ranks": ranks,
        "method": method,
        "largest_batch": batch,
        "budget_MiB": budget / MIB,
    }


def figure1(out: Output) -> None:
    """Memory against batch and largest batches: measured solid, computed dashed."""
    measured, largest = _measured(out), _largest_rows(out)
    title = "Figure 1: memory of the loss (solid: measured; dashed: computed; crosses: printed)"
    with out.picture("figure1", 3, title) as (here, there, bars):
        width = int(str(measured[0]["width"]))
        for method in METHODS:
            points = [row for row in measured if row["method"] == method]
            x, y = ([row[key] for row in points] for key in ("batch", "loss_MiB"))
            here.plot(x, y, "o-", color=COLOR[method], label=method)
            sizes = [2**power for power in range(8, 21)]
            y = [formulas.loss_bytes(method, size, RANKS, width, WORKSPACE) / MIB for size in sizes]
            here.plot(sizes, y, "--", color=COLOR[method], linewidth=1)
        here.set(title=f"here, {RANKS} gloo ranks, D = {width}", ylabel="MiB a rank")
        rows = [row for row in _of_the_paper() if row["ranks"] == 8]
        for method, color in COLOR.items():
            sizes = [2**power for power in range(14, 25)]
            y = [paper.loss_gib(method, size, 8, paper.L14_WIDTH) * 1024 for size in sizes]
            there.plot(sizes, y, "--", color=color, label=method, linewidth=1.5)
            cells = [row for row in rows if row["method"] == method]
            x, y = ([row[key] for row in cells] for key in ("batch", "loss_MiB"))
            there.plot(x, y, "x", color=color, markersize=8)
        there.axhline(paper.USABLE_GIB * 1024, color="black", linewidth=1)
        there.set(title="the paper's 8 A800, D = 768; line: 79 GiB", ylabel="MiB a GPU")
        for axes in (here, there):
            axes.set_xscale("log", base=2)
            axes.set(yscale="log", xlabel="global batch")
            axes.legend(frameon=False)
        _draw_bars(bars, largest)


def _draw_bars(axes: object, rows: list[dict[str, object]]) -> None:
    shown = [row for row in rows if row["model"] == "ViT-L/14" and row["ranks"] == 32]
    labels = list(dict.fromkeys(str(row["method"]) for row in shown))
    for offset, kind, hatch in ((-0.2, PRINTED, ""), (0.2, COMPUTED, "//")):
        values = {str(r["method"]): r["largest_batch"] for r in shown if r["kind"] == kind}
        for label, value in values.items():
            place = labels.index(label)
            axes.bar(  # type: ignore[attr-defined]
                place + offset,
                value,
                0.38,
                color=COLOR[label] if not hatch else "white",
                edgecolor=COLOR[label],
                hatch=hatch,
                linestyle="-" if not hatch else "--",
                label=kind if place == 0 else None,
            )
            axes.annotate(  # type: ignore[attr-defined]
                f"{int(str(value)) // K:,}k",
                (place + offset, value),
                ha="center",
                va="bottom",
                fontsize=8,  # type: ignore[arg-type]
            )
    axes.set(title="largest batch, ViT-L/14 on 32 A800", yscale="log")  # type: ignore[attr-defined]
    axes.set_xticks(range(len(labels)), labels)  # type: ignore[attr-defined]
    axes.legend(frameon=False)  # type: ignore[attr-defined]
