"""Table 4: no tiling, OpenCLIP's, tiling across ranks, and also within ranks, on gloo ranks.

Legend: ``b`` batch of a rank, ``B`` global batch, ``D`` feature width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from papers.allocation import peak_allocated
from papers.inf_cl import printed as paper
from papers.inf_cl.losses import LEVELS, DenseLoss
from papers.inf_cl.training import Recipe, render_glyphs, trained_scores
from papers.output import MEASURED, PRINTED, Output, Row
from papers.ranks import on_ranks

__all__ = ["table4"]

RANKS = (1, 2, 4)  # models are trained on the last number of ranks
SCALE = 14.3  # CLIP's initial logit scale, 1 / 0.07
PAPERS_ROW = ("Vanilla", "OpenCLIP", "cross-GPU", "cross+in-GPU")


def _features(batch: int, width: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    image_BD, text_BD = (
        F.normalize(torch.randn(batch, width, generator=random), dim=-1) for _ in range(2)
    )
    return image_BD, text_BD


def _errors(level: str, rank: int, ranks: int, batch: int, width: int) -> dict[str, float]:
    """Return relative errors of loss and gradients over all ranks, and a rank's peak memory."""
    exact = [side.double().requires_grad_() for side in _features(batch, width)]
    exact.append(torch.tensor(SCALE, dtype=torch.float64, requires_grad=True))
    loss_64 = DenseLoss.of(*exact)
    *d_sides_64_BD, d_scale_64 = torch.autograd.grad(loss_64, exact)
    rows = slice(rank * batch // ranks, (rank + 1) * batch // ranks)
    inputs = [side[rows].clone().requires_grad_() for side in _features(batch, width)]
    inputs.append(torch.tensor(SCALE, requires_grad=True))
    results: list[Tensor] = []

    def step() -> None:
        loss = LEVELS[level]()(*inputs)
        results.extend([loss.detach(), *torch.autograd.grad(loss, inputs)])

    allocated = torch.tensor(float(peak_allocated(step)))
    loss, *d_sides_bD, d_scale = results
    squares = [
        # Each gradient is W times the true one, because DDP takes the mean.
        torch.stack([(d_bD / ranks - whole_BD[rows]).pow(2).sum(), whole_BD[rows].pow(2).sum()])
        for d_bD, whole_BD in zip(d_sides_bD, d_sides_64_BD, strict=True)
    ]
    # DDP takes the mean of losses and gradients over ranks.
    for tensor in (loss, d_scale, *squares):
        dist.all_reduce(tensor)
    # The rank with the highest peak decides whether the batch fits.
    dist.all_reduce(allocated, dist.ReduceOp.MAX)
    return {
        "loss": loss.item() / ranks,
        "loss_error": abs(loss.item() / ranks / loss_64.item() - 1),
        "d_image_error": (squares[0][0] / squares[0][1]).sqrt().item(),
        "d_text_error": (squares[1][0] / squares[1][1]).sqrt().item(),
        "d_scale_error": abs(d_scale.item() / ranks / d_scale_64.item() - 1),
        "loss_MiB": allocated.item() / 2**20,
    }


def _on_a_rank(
    rank: int, ranks: int, batch: int, width: int, recipe: Recipe | None
) -> dict[str, Row]:
    """Return the figures of every level, in one start of the ranks, which takes seconds."""
    found: dict[str, Row] = {}
    for level, make in LEVELS.items():
        found[level], scores = _errors(level, rank, ranks, batch, width), {}
        if recipe is not None:
            # The peers' losses train without a gradient cache, as their authors use them.
            cached = level.startswith("cross-rank")
            scores = trained_scores(recipe, make(), cached=cached, ranks=ranks)
        found[level] |= {"recall@10": scores.get("t2i_r@10"), "top1": scores.get("top1")}
    return found


def table4(out: Output) -> None:
    """Compare loss, gradients, memory and accuracy of each level with one process in float64."""
    batch, width = (256, 32) if out.fast else (2048, 64)
    recipe = Recipe(batch=256 if out.fast else 512, samples=512 if out.fast else 32_768)
    render_glyphs()  # in one process rather than on four ranks at once
    rows: list[Row] = []
    for ranks in out.progress(RANKS, "Table 4, ranks"):
        trained = recipe if ranks == RANKS[-1] else None
        # After the reductions all ranks have the same figures.
        by_level = on_ranks(_on_a_rank, ranks, ranks, batch, width, trained)[0]
        for level, found in by_level.items():
            rows.append({"kind": MEASURED, "level": level, "ranks": ranks, **found})
    printed = paper.figures()["table4_[data,loss,backbone,peak,IN]_4xA800_64k_ViT-B/16_accum256"]
    for level, name in zip(LEVELS, PAPERS_ROW, strict=True):
        figures = {"loss_MiB": printed[name][1] * 1024, "top1": printed[name][4] / 100}
        rows.append({"kind": PRINTED, "level": level, "ranks": 4, **figures})
    title = f"Table 4: levels of tiling, {batch} pairs, D = {width}, errors against float64"
    out.table("table4", rows, title)
