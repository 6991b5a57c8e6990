"""`LossStatistics`: accuracy, probability and largest logit, measured in the sweep of a loss."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["LossStatistics"]


class LossStatistics(NamedTuple):
    r"""Statistics over the pairs of all ranks, returned by `loss_fn(..., statistics=True)`.

    The loss computes all logits, so its statistics need no second product over all pairs. Each is
    a 0-d tensor without gradient, equal on every rank, and nothing waits for the device:
    `self.log_dict(statistics._asdict())`.

    **Ties count against the model**, as in `ContrastiveRecall`: a positive is a hit if it exceeds
    every negative by more than :math:`2 \tau`, a bound on the rounding errors,

    .. math::
        \tau_i = (2 + \sqrt D / 2)\,\epsilon\,
            (|\mathrm{scale}|\,\|\mathrm{image}_i\|\,\|\mathrm{text}_i\| + |\mathrm{bias}|).

    A collapsed model, whose features are all equal, thus has an accuracy of 0. A NaN is not a hit.
    Pairs that the loss masks (equal `ids`) are not compared. Texts without an image are compared as
    negatives and have no accuracy of their own. `weights` weight all means. The loss raises an
    error for several positives per row or column, for `negatives` and for `false_negatives`.

    Attributes:
        image_to_text_top1: Share of images whose text has the largest logit of all texts.
        text_to_image_top1: Share of texts with an image whose image has the largest logit.
        image_to_text_probability: Mean softmax probability of the positive among the texts; in
            `SigmoidContrastiveLoss` the mean sigmoid of the positives, for both directions.
        text_to_image_probability: Mean softmax probability of the positive among the images.
        largest_logit: Largest logit of all compared pairs, with scale and bias. It reaches 100 in a
            trained CLIP; fp16 ends at 65504.

    Shapes:
        Scalars in fp32; in float64 for float64 features.
    """

    image_to_text_top1: Tensor
    text_to_image_top1: Tensor
    image_to_text_probability: Tensor
    text_to_image_probability: Tensor
    largest_logit: Tensor
