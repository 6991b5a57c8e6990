"""`LossStatistics`: what the sweep of a contrastive loss has seen on its way."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["LossStatistics"]


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
