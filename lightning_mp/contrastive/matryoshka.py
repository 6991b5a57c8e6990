"""`MatryoshkaLoss`: a contrastive loss of several prefixes of the features at once.

Shapes:
    b: this rank's batch. n: its texts. D: feature width.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mp._arguments import Check, explains_arguments, refuse_values
from lightning_mp.contrastive._call.request import PairArguments, Request
from lightning_mp.contrastive._sums.agreement import refuse
from lightning_mp.contrastive.loss import ContrastiveLoss
from lightning_mp.contrastive.statistics import LossStatistics

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MatryoshkaLoss"]

_CALL = tuple(PairArguments.__annotations__)


@explains_arguments(
    checks={
        "widths": Check("[1, inf)", least=1, fix="Pass some, such as `[768, 256, 64]`."),
        "weights": "[0, inf)",
    },
    hints={
        "matryoshka_dims": "They are called `widths` here.",
        "matryoshka_weights": "They are called `weights` here.",
    },
)
class MatryoshkaLoss(nn.Module):
    r"""Weighted sum of a contrastive loss over prefixes of the features, exact over all ranks.

    Features whose first 64 numbers are trained to do alone can be cut to 64, a twelfth of an index
    of 768. Texts travel between ranks once at full width, and one workspace serves all widths.

    .. math::
        L = \sum_k w_k \, L_{\mathrm{loss}}\left(
            \frac{\mathrm{image}_{:d_k}}{\|\mathrm{image}_{:d_k}\|},
            \frac{\mathrm{text}_{:d_k}}{\|\mathrm{text}_{:d_k}\|}\right)

    With three widths of weight 1, gradients are about three times as large. A loss with `weights`,
    `positives`, `negatives`, `false_negatives`, label smoothing or several positives, and a sigmoid
    loss, are called once for each width.

    Args:
        loss: The loss of each prefix, or `SigmoidContrastiveLoss`; `None` is `ContrastiveLoss()`.
        widths: Prefixes, in numbers; the full width is one of them if it is named.
        weights: What each of them counts; `None` is 1 each.
        normalize: Bring prefixes to norm 1, rounded to the features' dtype.

    Shapes:
        image_features: (b, D). text_features: (n, D), D at least the largest width.
        Returns a scalar in fp32, float64 for float64.

    Raises:
        ValueError: For widths, weights or a `loss` that cannot be used; for features that cannot,
            or are narrower than a width, on all ranks at once.
        TypeError: For arguments that a call does not take.

    References: Matryoshka representation learning, arXiv:2205.13147; sentence-transformers'
    `MatryoshkaLoss`, https://sbert.net.

    Example::

        loss_fn = MatryoshkaLoss(widths=[768, 256, 64])
        loss = loss_fn(image_features, text_features, self.logit_scale.exp())
    """

    def __init__(
        self,
        *,
        widths: Sequence[int],
        weights: Sequence[float] | None = None,
        loss: ContrastiveLoss | None = None,
        normalize: bool = True,
    ) -> None:
        super().__init__()
        if weights is not None and len(weights) != len(widths):
            reason = "`weights` has one number for each width. Leave it out for 1 each."
            refuse_values(self, reason, widths=widths, weights=weights)
        self.loss = ContrastiveLoss() if loss is None else loss
        self.widths = tuple(widths)
        self.weights = tuple(1.0 for _ in widths) if weights is None else tuple(weights)
        self.normalize = normalize

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
        *,
        statistics: bool = False,
        **pairs: "Unpack[PairArguments]",
    ) -> Tensor | dict[str, Tensor] | tuple[Tensor | dict[str, Tensor], LossStatistics]:
        """Return the sum over all prefixes, as `{"contrastive_loss": loss}` if asked for.

        Args:
            image_features: (b, D).
            text_features: (n, D) with n >= b; row i belongs to image i.
            logit_scale: One value.
            logit_bias: One value, or `None`.
            output_dict: Return a dictionary, as open_clip's losses do.
            statistics: Return `LossStatistics` of the largest width with it.
            pairs: What else the call of the loss takes, such as `ids`.
        """
        unknown = [name for name in pairs if name not in _CALL]
        if unknown:
            raise TypeError(
                f"Passed `{unknown[0]}` to a call of `MatryoshkaLoss`. Beside features, scale and "
                f"bias it takes {', '.join(f'`{name}`' for name in _CALL)}. Leave `{unknown[0]}` "
                "out; rules belong to its `loss`."
            )
        inputs = (image_features, text_features, logit_scale, logit_bias)
        # Before anything is cut, so that errors name what was passed.
        request = Request.of(
            self.loss, *inputs, owner=type(self).__name__, statistics=statistics, **pairs
        )
        problem = self.loss._problem(request) or self._width_problem(image_features)
        if problem is not None:
            refuse(problem, request.owner, image_features, self.loss.process_group)
        # Not `isinstance`: subclasses, such as the sigmoid loss, compute something else.
        is_softmax = type(self.loss) is ContrastiveLoss
        found: LossStatistics | None = None
        is_plain = request.is_plain and request.false_negatives == "keep"
        # One pass over all widths keeps no maxima of one.
        if is_softmax and is_plain and not statistics:
            total, _ = self.loss._compute(
                *inputs, **pairs, widths=self.widths, width_weights=self.weights,
                normalize=self.normalize, owner=request.owner,
            )  # fmt: skip
        else:
            total, found = self._one_by_one(*inputs, pairs, statistics)
        result = {"contrastive_loss": total} if output_dict else total
        return result if found is None else (result, found)

    def extra_repr(self) -> str:
        """Return what `print(module)` shows between its brackets."""
        return f"widths={self.widths}, weights={self.weights}, normalize={self.normalize}"

    def _one_by_one(
        self,
        image_bD: Tensor,
        text_nD: Tensor,
        scale: Tensor | float,
        bias: Tensor | float | None,
        pairs: Any,
        statistics: bool,
    ) -> tuple[Tensor, LossStatistics | None]:
        """Return the sum of a call for each prefix, and statistics of the largest."""
        total: Tensor | None = None
        found: LossStatistics | None = None
        call: Any = self.loss  # whose overloads know no dictionaries
        for width, weight in zip(self.widths, self.weights, strict=True):
            features = [x[:, :width] for x in (image_bD, text_nD)]
            options = dict(pairs)
            if options.get("negatives") is not None:
                options["negatives"] = self._cut(options["negatives"], width)
            if self.normalize:
                features = [F.normalize(x, dim=1) for x in features]
            if statistics and found is None and width == max(self.widths):
                loss, found = call(*features, scale, bias, statistics=True, **options)
            else:
                loss = call(*features, scale, bias, **options)
            part: Tensor = weight * loss
            total = part if total is None else total + part
        if total is None:
            raise RuntimeError("`MatryoshkaLoss` has no widths, which its constructor refuses.")
        return total, found

    def _width_problem(self, image_bD: Tensor) -> str | None:
        if max(self.widths) <= image_bD.shape[1]:
            return None
        return (
            f"Passed features of width {image_bD.shape[1]} to `MatryoshkaLoss(widths="
            f"{list(self.widths)})`. They must be as wide as the largest at least. Leave out what "
            "is wider."
        )

    def _cut(self, negatives_bkD: Tensor, width: int) -> Tensor:
        part_bkd = negatives_bkD[..., :width]
        return F.normalize(part_bkd, dim=-1) if self.normalize else part_bkd
