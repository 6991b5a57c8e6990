"""`MatryoshkaLoss`: the sum of a contrastive loss over several prefixes of the features."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mp._arguments import Check, explains_arguments, refuse_values
from lightning_mp.contrastive._call.request import GIVEN, PairArguments, Request
from lightning_mp.contrastive._sums.agreement import refuse_on_all_ranks
from lightning_mp.contrastive.loss import ContrastiveLoss
from lightning_mp.contrastive.statistics import LossStatistics
from lightning_mp.numerics.floats import accumulation_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MatryoshkaLoss"]


@explains_arguments(
    checks={
        "widths": Check("[1, inf)", least=1, fix="Pass a list, such as `[768, 256, 64]`."),
        "weights": "[0, inf)",
    },
    hints={
        "matryoshka_dims": "Its name here is `widths`.",
        "matryoshka_weights": "Its name here is `weights`.",
    },
)
class MatryoshkaLoss(nn.Module):
    r"""Weighted sum of a contrastive loss over prefixes of the features, exact over all ranks.

    If the first 64 of 768 columns are trained to work as features of their own, an index stores a
    twelfth of the values. Texts are exchanged once, at full width; one workspace serves all widths.

    .. math::
        L = \sum_k w_k \, L_{\mathrm{loss}}\left(
            \frac{\mathrm{image}_{:d_k}}{\|\mathrm{image}_{:d_k}\|},
            \frac{\mathrm{text}_{:d_k}}{\|\mathrm{text}_{:d_k}\|}\right)

    With three widths of weight 1, gradients are about three times as large. A sigmoid loss, and a
    loss with `weights`, `positives`, `negatives`, `false_negatives`, label smoothing or several
    positives, is called once for each width.

    Args:
        loss: The loss of each prefix; `None` is `ContrastiveLoss()`.
        widths: Widths of the prefixes. The full width counts only if it is listed.
        weights: Weight of each prefix; `None` is 1 each.
        normalize: Normalize prefixes to length 1, rounded to the dtype of the features.

    Shapes:
        image_features: (b, D). text_features: (n, D), D at least the largest width.
        Returns a scalar in fp32; in float64 for float64 features.

    Raises:
        ValueError: If constructor arguments are invalid; if features are invalid or narrower than
            a width, on all ranks at once.
        TypeError: If a call gets an unknown argument.

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
            reason = "`weights` must have one number for each width. Leave it out for 1 each."
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
        """Return the weighted sum of the losses of all prefixes.

        Args:
            image_features: (b, D).
            text_features: (n, D) with n >= b; row i belongs to image i.
            logit_scale: One value.
            logit_bias: One value, or `None`.
            output_dict: Return `{"contrastive_loss": loss}`, as open_clip's losses do.
            statistics: Return a tuple of the loss and the `LossStatistics` of the largest width.
            pairs: Further arguments of a call of `loss`, such as `ids`.
        """
        unknown = [name for name in pairs if name not in GIVEN]
        if unknown:
            raise TypeError(
                f"Passed `{unknown[0]}` to a call of `MatryoshkaLoss`. Besides features, scale and "
                f"bias, a call takes {', '.join(f'`{name}`' for name in GIVEN)}. Other options "
                "belong to the constructor of its `loss`."
            )
        inputs = (image_features, text_features, logit_scale, logit_bias)
        # Checked before prefixes are taken, so that errors show the shapes that were passed.
        request = Request.of(
            self.loss, *inputs, owner=type(self).__name__, statistics=statistics, **pairs
        )
        problem = self.loss._problem(request) or self._width_problem(image_features)
        if problem is not None:
            refuse_on_all_ranks(problem, request.owner, image_features, self.loss.process_group)
        # Subclasses, such as the sigmoid loss, compute something else, so not `isinstance`.
        is_softmax = type(self.loss) is ContrastiveLoss
        found: LossStatistics | None = None
        is_plain = request.is_plain and request.false_negatives == "keep"
        # The pass over all widths measures no statistics of a single width.
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
        """Return the arguments that `print(module)` shows."""
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
        """Return the sum of one call per prefix, and the statistics of the largest width."""
        parts: list[Tensor] = []
        found: LossStatistics | None = None
        call: Any = self.loss  # its overloads do not accept `**options`
        for width, weight in zip(self.widths, self.weights, strict=True):
            features = [self._cut(x, width) for x in (image_bD, text_nD)]
            options = dict(pairs)
            if options.get("negatives") is not None:
                options["negatives"] = self._cut(options["negatives"], width)
            if statistics and found is None and width == max(self.widths):
                loss, found = call(*features, scale, bias, statistics=True, **options)
            else:
                loss = call(*features, scale, bias, **options)
            parts.append(weight * loss)
        return functools.reduce(torch.add, parts), found

    def _width_problem(self, image_bD: Tensor) -> str | None:
        if max(self.widths) <= image_bD.shape[1]:
            return None
        return (
            f"Passed features of width {image_bD.shape[1]} to `MatryoshkaLoss(widths="
            f"{list(self.widths)})`. Features must be at least as wide as the largest width. Leave "
            "out larger widths."
        )

    def _cut(self, features: Tensor, width: int) -> Tensor:
        part = features[..., :width]
        if not self.normalize:
            return part
        # In fp16, the epsilon of `normalize` is 0, and a prefix of zeros would be NaN.
        return F.normalize(part.to(accumulation_dtype(part.dtype)), dim=-1).to(part.dtype)
