"""`LossStatistics`: what the sweep of a contrastive loss has seen on its way.

Shapes:
    b: this rank's images. n: its texts. m: columns that are visiting. D: feature width. W: ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive.exchange import Exchange, Home
from lightning_mp.contrastive.tile_backend import Maxima, TileBackend
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = ["LossStatistics", "MaximaSweep", "measure"]


class LossStatistics(NamedTuple):
    r"""What `loss_fn(..., statistics=True)` returns beside the loss, over all ranks' pairs.

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
    look for none.

    Args:
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
    """The largest negatives of this rank's rows and columns, block by block of a sweep.

    Args:
        image_bD: The rows.
        exchange: Brings the columns, and takes their maxima home.
    """

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


def measure(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    pos_b: Tensor,
    probability_2b: Tensor,
    maxima: Maxima,
    exchange: Exchange,
    tiles: TileBackend,
    pairs: int,
) -> Tensor:
    """Return the values of `LossStatistics`, (5,), by one collective.

    Args:
        image_bD: Images.
        text_nD: Texts, of which the first b belong to them.
        scale: The logit scale, one value.
        bias: The logit bias, or `None`.
        pos_b: Logits of the positives, without the bias.
        probability_2b: Probabilities of the positives in both directions; what is NaN is no hit.
        maxima: Largest logits of the negatives, without the bias.
        exchange: The ranks.
        tiles: What multiplied the negatives.
        pairs: On all ranks.
    """
    b, state = len(pos_b), pos_b.dtype
    scale = scale.to(state).reshape(())
    shift = pos_b.new_zeros(()) if bias is None else bias.to(state).reshape(())
    dtype = accumulation_dtype(image_bD.dtype)
    norms_b = [torch.linalg.vector_norm(x[:b], dim=1, dtype=dtype) for x in (image_bD, text_nD)]
    relative, absolute = tiles.rounding(image_bD.shape[1], image_bD.dtype)
    size_b = scale.abs() * norms_b[0] * norms_b[1] + shift.abs()
    rivals_2b = torch.stack([maxima.rows_b, maxima.columns_m[:b]])
    hits_2b = (pos_b - 2 * (relative * size_b + absolute) > rivals_2b) & ~probability_2b.isnan()
    sums_4 = torch.cat([hits_2b.sum(1).to(state), probability_2b.sum(1)]) / pairs
    # Every pair is in some rank's rows. A sum over places of which each rank fills one is a gather.
    largest_W = pos_b.new_zeros(exchange.world_size)
    largest_W[exchange.rank] = torch.maximum(maxima.rows_b, pos_b).amax() + shift
    found = exchange.all_reduce(torch.cat([sums_4, largest_W]))
    return torch.cat([found[:4], found[4:].amax(0, keepdim=True)]).to(dtype)
