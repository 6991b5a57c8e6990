"""The paper's baselines, written from their formulas: CLIP's dense and OpenCLIP's local loss.

Legend: ``b`` batch of a rank, ``B`` global batch, ``D`` feature width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mp import ContrastiveLoss
from lightning_mp.plan.formulas import DENSE, LOCAL, OURS

__all__ = [
    "LEVELS",
    "MANY_TILES",
    "METHODS",
    "DenseLoss",
    "LocalLoss",
    "NothingStored",
    "RanksInOne",
]


class _GatherFeatures(torch.autograd.Function):
    """Gathers the features of all ranks; backward sums their gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, features_bD: Tensor) -> Tensor:
        parts = [torch.empty_like(features_bD) for _ in range(dist.get_world_size())]
        # Collectives need contiguous tensors.
        dist.all_gather(parts, features_bD.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient_BD: Tensor) -> Tensor:  # type: ignore[override]
        gradient_BD = gradient_BD.contiguous()
        # The losses of the other ranks have gradients for these features as well.
        dist.all_reduce(gradient_BD)
        return gradient_BD.chunk(dist.get_world_size())[dist.get_rank()]


def _on_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _gathered(features_bD: Tensor) -> Tensor:
    if _on_ranks():
        gathered: Tensor = _GatherFeatures.apply(features_bD)
        return gathered
    return features_bD


def _equal_batches(image_bD: Tensor, text_bD: Tensor) -> tuple[Tensor, Tensor]:
    """Drop a rank's extra pair, because these losses need the same batch size on all ranks."""
    rows = torch.tensor(len(image_bD))
    if _on_ranks():
        dist.all_reduce(rows, dist.ReduceOp.MIN)
    return image_bD[: int(rows)], text_bD[: int(rows)]


class DenseLoss(nn.Module):
    """CLIP's loss: every rank computes all of the B x B logits."""

    def forward(self, image_bD: Tensor, text_bD: Tensor, scale: Tensor) -> Tensor:
        """Return the loss of the global batch."""
        image_bD, text_bD = _equal_batches(image_bD, text_bD)
        return self.of(_gathered(image_bD), _gathered(text_bD), scale)

    @staticmethod
    def of(image_BD: Tensor, text_BD: Tensor, scale: Tensor) -> Tensor:
        """Return the loss of the gathered features, in their own dtype."""
        # Scaling the logits instead would take another B x B matrix.
        logits_BB = scale * image_BD @ text_BD.T
        target_B = torch.arange(len(logits_BB))
        return (F.cross_entropy(logits_BB, target_B) + F.cross_entropy(logits_BB.T, target_B)) / 2


class LocalLoss(nn.Module):
    """OpenCLIP's `local_loss`: a rank computes the logits of its own pairs, both ways."""

    def forward(self, image_bD: Tensor, text_bD: Tensor, scale: Tensor) -> Tensor:
        """Return the mean over this rank's pairs; the mean over ranks is the loss."""
        image_bD, text_bD = _equal_batches(image_bD, text_bD)
        rank = dist.get_rank() if _on_ranks() else 0
        # Features are gathered in the order of ranks.
        target_b = torch.arange(len(image_bD)) + rank * len(image_bD)
        by_image_bB = scale * image_bD @ _gathered(text_bD).T
        by_text_bB = scale * text_bD @ _gathered(image_bD).T
        return (F.cross_entropy(by_image_bB, target_b) + F.cross_entropy(by_text_bB, target_b)) / 2


class RanksInOne(nn.Module):
    """OpenCLIP's local loss of `ranks` ranks, computed one after the other in one process."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def forward(self, image_BD: Tensor, text_BD: Tensor, scale: Tensor) -> Tensor:
        """Return the loss of the global batch."""
        target_B = torch.arange(len(image_BD))
        total = image_BD.new_zeros(())
        for rows_b in target_B.chunk(self.ranks):
            for side_BD, other_BD in ((image_BD, text_BD), (text_BD, image_BD)):
                logits_bB = scale * side_BD[rows_b] @ other_BD.T
                # A sum, because a mean of means would weight a smaller last shard more.
                total = total + F.cross_entropy(logits_bB, rows_b, reduction="sum")
        return total / (2 * len(image_BD))


class NothingStored(nn.Module):
    """`ContrastiveLoss` that stores no tiles, as for 16-bit features on a GPU.

    The second sweep computes all logits again, whatever the workspace.
    """

    def forward(self, image_bD: Tensor, text_bD: Tensor, scale: Tensor) -> Tensor:
        """Return the loss of one process."""
        loss, _ = ContrastiveLoss()._compute(image_bD, text_bD, scale, None, stores_tiles=False)
        return loss


ONE_TILE = 2**30  # a workspace in bytes that holds any tile here
MANY_TILES = 2**20  # the smallest workspace

METHODS: dict[str, Callable[[], nn.Module]] = {
    DENSE: DenseLoss,
    LOCAL: LocalLoss,
    OURS: lambda: ContrastiveLoss(workspace_bytes=MANY_TILES),
}
"""Losses under their names in `plan`, with a workspace that does not dominate at these sizes."""

LEVELS: dict[str, Callable[[], nn.Module]] = {
    DENSE: DenseLoss,
    LOCAL: LocalLoss,
    "cross-rank": lambda: ContrastiveLoss(workspace_bytes=ONE_TILE),
    "cross-rank and tiles": lambda: ContrastiveLoss(workspace_bytes=MANY_TILES),
}
"""The rows of the paper's Table 4."""
