"""`LossStatistics`: what the sweep of a contrastive loss has seen on its way.

Shapes:
    b: this rank's images. q: those of them that have a text of their own. D: feature width.
    m: columns that are visiting. W: ranks.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive._exchange.exchange import Exchange, Home
from lightning_mp.contrastive._tiles.tile_backend import Maxima, TileBackend
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = ["LossStatistics", "MaximaSweep", "measure", "softmax_probabilities"]


class LossStatistics(NamedTuple):
    r"""What `loss_fn(..., statistics=True)` returns with the loss, over all ranks' pairs.

    To measure accuracy in training one would multiply all pairs once more; the loss has multiplied
    them already. Each is a 0-d tensor without a gradient, the same on every rank, and nothing waits
    for the device: `self.log_dict(statistics._asdict())`.

    **Ties count against the model**, as in `ContrastiveRecall`: a hit is a positive that is larger
    than every negative by more than :math:`2 \tau`, which rounding cannot make,

    .. math::
        \tau_i = (2 + \sqrt D / 2)\,\epsilon\,
            (|\mathrm{scale}|\,\|\mathrm{image}_i\|\,\|\mathrm{text}_i\| + |\mathrm{bias}|).

    So a collapsed model, whose features are all equal, has an accuracy of 0. A NaN is no hit. Pairs
    that the loss leaves out (equal `ids`) are no rivals; texts without an image are rivals, and
    not counted. With `weights` all means are weighted. With several positives of one row or
    column, with `negatives` of a row or with `false_negatives`, the loss refuses them.

    Attributes:
        image_to_text_top1: Share of the images whose text has the largest logit of all texts.
        text_to_image_top1: Share of the texts (of those with an image) whose image has it.
        image_to_text_probability: Mean probability of the positive in its row's softmax. Of
            `SigmoidContrastiveLoss` it is the mean sigmoid of the positives, for both directions.
        text_to_image_probability: In its column's.
        largest_logit: Of all pairs that count, with scale and bias: CLIP's reach 100 when it is
            trained out, and fp16 ends at 65504.

    Shapes:
        All are scalars in fp32, float64 for float64 features.
    """

    image_to_text_top1: Tensor
    text_to_image_top1: Tensor
    image_to_text_probability: Tensor
    text_to_image_probability: Tensor
    largest_logit: Tensor


class MaximaSweep:
    """The largest negatives of this rank's rows and columns, block by block of a sweep."""

    def __init__(self, image_bD: Tensor, exchange: Exchange) -> None:
        self._rows_b = torch.full(
            image_bD.shape[:1], -torch.inf, dtype=state_dtype(image_bD.device),
            device=image_bD.device,
        )  # fmt: skip
        self._columns: Home = exchange.home("max")

    def block(self, text_mD: Tensor) -> Maxima:
        """Return what a tile backend is to raise in the next block."""
        return Maxima(self._rows_b, self._rows_b.new_full(text_mD.shape[:1], -torch.inf))

    def add(self, block: Maxima) -> None:
        """Send what was found about the columns home."""
        self._columns.add(block.columns_m)

    def result(self) -> Maxima:
        """Return the maxima of this rank's rows and columns."""
        return Maxima(self._rows_b, self._columns.result())


def softmax_probabilities(pos_q: Tensor, negative_lses: Iterable[Tensor]) -> Tensor:
    """Return the probabilities of positives among negatives of given log-sum-exps, (2, q)."""
    # The log-sum-exps have no positive in them: this is its share of both.
    return torch.stack([(pos_q - neg[: len(pos_q)]).sigmoid() for neg in negative_lses])


def measure(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    pos_q: Tensor,
    probability_2q: Tensor,
    maxima: Maxima,
    exchange: Exchange,
    tiles: TileBackend,
    weight_q: Tensor | None = None,
) -> Tensor:
    """Return the values of `LossStatistics`, (5,), by one collective.

    Of `image_bD` and `text_nD` the first q belong together. `pos_q` are their logits and `maxima`
    the largest of the negatives, both without the bias. A NaN in `probability_2q` is no hit.
    """
    q, state, dtype = len(pos_q), pos_q.dtype, accumulation_dtype(image_bD.dtype)
    scale = scale.to(state).reshape(())
    shift = pos_q.new_zeros(()) if bias is None else bias.to(state).reshape(())
    weight_q = torch.ones_like(pos_q) if weight_q is None else weight_q.to(state)
    norms_q = [torch.linalg.vector_norm(x, dim=1, dtype=dtype) for x in (image_bD[:q], text_nD[:q])]
    # A hit must be one in exact arithmetic, whatever tiles have rounded.
    relative, absolute = tiles.rounding(image_bD.shape[1], image_bD.dtype)
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
