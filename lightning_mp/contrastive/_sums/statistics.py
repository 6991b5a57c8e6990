"""The values of `LossStatistics`, from what the sweeps of a loss have seen.

Shapes:
    b: this rank's images. q: those of them that have a text of their own. D: feature width.
    m: columns that are visiting. W: ranks.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_mp.contrastive._sums.sweep import Block, Plan
from lightning_mp.contrastive._tiles.tile_backend import Maxima

__all__ = ["LargestNegatives", "loss_statistics", "softmax_probabilities"]


class LargestNegatives:
    """The largest negatives of this rank's rows and columns, as a visitor after that of the loss.

    Args:
        plan: What all ranks have agreed on.
    """

    def __init__(self, plan: Plan) -> None:
        image_bD = plan.request.image
        self._rows_b = image_bD.new_full((len(image_bD),), -torch.inf, dtype=plan.state)
        self._columns = plan.exchange.home("max")

    def fresh(self, columns: Tensor) -> Maxima:
        """Return what a tile backend is to raise in the next block, of as many columns."""
        self._block = Maxima(self._rows_b, self._rows_b.new_full(columns.shape[:1], -torch.inf))
        return self._block

    def block(self, block: Block) -> None:
        """Send what was found about the columns home."""
        self._columns.add(self._block.columns_m)

    def home(self) -> Maxima:
        """Return the maxima of this rank's rows and columns."""
        return Maxima(self._rows_b, self._columns.result())


def softmax_probabilities(pos_q: Tensor, negative_lses: Iterable[Tensor]) -> Tensor:
    """Return the probabilities of positives among negatives of given log-sum-exps, (2, q)."""
    # The log-sum-exps have no positive in them: this is its share of both.
    return torch.stack([(pos_q - neg[: len(pos_q)]).sigmoid() for neg in negative_lses])


def loss_statistics(plan: Plan, pos_q: Tensor, probability_2q: Tensor, maxima: Maxima) -> Tensor:
    """Return the values of `LossStatistics`, (5,), by one collective.

    Of images and texts the first q belong together. `pos_q` are their logits and `maxima` the
    largest of the negatives, both without the bias. A NaN in `probability_2q` is no hit.
    """
    request, exchange, state, dtype = plan.request, plan.exchange, plan.state, plan.dtype
    image_bD, text_nD, bias, weights = request.image, request.text, request.bias, request.weights
    q, scale = len(pos_q), request.scale.to(state).reshape(())
    shift = pos_q.new_zeros(()) if bias is None else bias.to(state).reshape(())
    weight_q = torch.ones_like(pos_q) if weights is None else weights[:q].to(state)
    norms_q = [torch.linalg.vector_norm(x, dim=1, dtype=dtype) for x in (image_bD[:q], text_nD[:q])]
    # A hit must be one in exact arithmetic, whatever tiles have rounded.
    relative, absolute = plan.tiles.rounding(image_bD.shape[1], image_bD.dtype)
    size_q = scale.abs() * norms_q[0] * norms_q[1] + shift.abs()
    rivals_2q = torch.stack([maxima.rows_b[:q], maxima.columns_m[:q]])
    # Twice, for the positive and its rival may both be off.
    hits_2q = (pos_q - 2 * (relative * size_q + absolute) > rivals_2q) & ~probability_2q.isnan()
    sums_5 = torch.cat(
        [hits_2q.to(state) @ weight_q, probability_2q @ weight_q, weight_q.sum()[None]]
    )
    # Every pair is in some rank's rows. A sum over places of which each rank fills one is a gather.
    largest_W = pos_q.new_zeros(exchange.world_size)
    largest_W[exchange.rank] = torch.cat([maxima.rows_b, pos_q]).amax() + shift
    found = exchange.all_reduce(torch.cat([sums_5, largest_W]))
    return torch.cat([found[:4] / found[4], found[5:].amax(0, keepdim=True)]).to(dtype)
