"""`ZeroShotAccuracy`: accuracy of zero-shot classification with text prompts.

Shapes: `n` images of a batch, `p` prompts, `C` classes, `D` feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics.utilities.data import dim_zero_cat

from lightning_mp._arguments import Check, explains_arguments
from lightning_mp.metrics._checks import TOP_K, check_ids, check_rows, check_value
from lightning_mp.metrics._stored_rows import StoredRows, with_keys, without_repeats
from lightning_mp.metrics._tiled_ranks import full_precision, unit_rows
from lightning_mp.numerics.floats import sum_rounding

__all__ = ["ZeroShotAccuracy"]


@explains_arguments(
    checks={
        "num_classes": Check("[1, inf)", fix="Pass the number of classes."),
        "top_k": TOP_K,
        "workspace_bytes": "[1, inf)",
    }
)
class ZeroShotAccuracy(StoredRows):
    r"""Top-k accuracy of zero-shot classification with text prompts, without a trained head.

    CLIP models are compared by this metric, as in Table 3 of the Inf-CL paper (74.9% on ImageNet,
    ViT-L/14 at a batch of 64k). The weight of a class is the mean of its prompts' text features.

    .. math::
        w_c = \frac{m_c}{\|m_c\|}, \quad m_c = \frac{1}{P_c} \sum_p \frac{t_{cp}}{\|t_{cp}\|},
        \qquad s_{ic} = \left\langle \frac{x_i}{\|x_i\|}, w_c \right\rangle

    Image i of class y is correct for k if fewer than k other classes have
    :math:`\lnot (s_{ic} < s_{iy})`: ties and non-finite features count against the model. `reset()`
    also removes prompts. docs/metrics/zero-shot.md explains keys, which remove repeated images.

    Args:
        num_classes: Number of classes, C.
        top_k: Values of k.
        value: Name of a single value for `compute()` to return, such as `"top1"`, for
            `self.log(name, metric)` and `MetricTracker`.
        workspace_bytes: Memory budget for scores, in bytes; it changes no result.
        **kwargs: Passed to `torchmetrics.Metric`.

    Shapes:
        update_prompts: text_features (p, D) and class_ids (p,) from 0 to C - 1, on every rank,
        before the images of an epoch. update: image_features (n, D), target (n,), keys (n,) or
        `None`. Returns a dict of float32 scalars: `top{k}` for each k, and the number of `images`.

    Raises:
        ValueError: On invalid arguments, and in `compute()` on targets out of range.
        RuntimeError: On images before every class has a prompt, and in `compute()` without images.

    References: CLIP, section 3.1.4, arXiv:2103.00020; Inf-CL, arXiv:2410.17243.

    Example:
        >>> accuracy = ZeroShotAccuracy(num_classes=3, top_k=(1, 2))
        >>> accuracy.update_prompts(torch.eye(3), torch.arange(3))
        >>> accuracy.update(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.6, 0.8]]), torch.tensor([1, 1]))
        >>> {name: float(value) for name, value in accuracy.compute().items()}
        {'top1': 0.5, 'top2': 1.0, 'images': 2.0}
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    plot_lower_bound = 0.0

    ranks: list[Tensor]
    keys: list[Tensor]
    prompts: Tensor  # a checksum of the weights of classes

    def __init__(
        self,
        *,
        num_classes: int,
        top_k: Sequence[int] = (1, 5),
        value: str | None = None,
        workspace_bytes: int = 64 * 2**20,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_value(self, value, [*(f"top{k}" for k in top_k), "images"])
        self.num_classes = num_classes
        self.top_k = tuple(top_k)
        self.value = value
        self.workspace_bytes = workspace_bytes
        # Not states, because every rank has all prompts and needs no sync.
        self._sums_CD: Tensor | None = None
        self._counts_C: Tensor | None = None
        self._classes_CD: Tensor | None = None
        self._checksum = torch.tensor(0.0)  # of the weights of classes
        self._keeps_prompts = False
        # First, because collections of torchmetrics 1.4 compare the first state only.
        # In fp32 whatever the default dtype, because the states of all ranks need one dtype.
        none = torch.tensor(-torch.inf, dtype=torch.float32)
        self.add_state("prompts", default=none, dist_reduce_fx="max")
        self.add_state("ranks", default=[], dist_reduce_fx="cat")
        self.add_state("keys", default=[], dist_reduce_fx="cat")

    @torch.no_grad()
    def update_prompts(self, text_features: Tensor, class_ids: Tensor) -> None:
        """Add prompts to their classes."""
        check_rows(type(self).__name__, "text_features", text_features)
        check_ids(type(self).__name__, "class_ids", class_ids, len(text_features))
        low, high = class_ids.aminmax() if len(class_ids) else (0, 0)
        if low < 0 or high >= self.num_classes:
            raise ValueError(
                f"Passed `class_ids` from {int(low)} to {int(high)}. They must be in "
                f"[0, {self.num_classes}), as `num_classes={self.num_classes}`."
            )
        unit_pD = unit_rows(text_features)[0]
        class_ids = class_ids.to(unit_pD.device, torch.int64)
        if self._sums_CD is None or self._counts_C is None:
            self._sums_CD = unit_pD.new_zeros(self.num_classes, unit_pD.shape[1])
            self._counts_C = unit_pD.new_zeros(self.num_classes)
        if self._sums_CD.shape[1] != unit_pD.shape[1]:
            raise ValueError(
                f"Passed `text_features` of width {unit_pD.shape[1]} after prompts of width "
                f"{self._sums_CD.shape[1]}. All prompts must have one width. Call `reset()` before "
                "the prompts of another model."
            )
        unit_pD = unit_pD.to(self._sums_CD)
        # Not in place, because an update under inference mode may precede one outside.
        self._sums_CD = self._sums_CD.index_add(0, class_ids, unit_pD)
        self._counts_C = self._counts_C.index_add(0, class_ids, torch.ones_like(unit_pD[:, 0]))
        self._classes_CD = None

    def update(self, image_features: Tensor, target: Tensor, keys: Tensor | None = None) -> None:
        """Add images with their classes."""
        self._check(image_features, target, keys)
        classes_CD = self._classes()
        target = target.to(image_features.device, torch.int64)
        rows = max(1, self.workspace_bytes // (4 * self.num_classes * classes_CD.itemsize))
        with full_precision(image_features.device):
            batches = zip(image_features.split(rows), target.split(rows), strict=True)
            parts = [_ranks(image_nD, classes_CD, target_n) for image_nD, target_n in batches]
        self.prompts = self._checksum
        if parts:
            self.ranks.append(torch.cat(parts))
            self.keys.append(with_keys(target, keys, target.device))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch and return the values of this batch alone."""
        # torchmetrics resets the state for the values of a batch, but the prompts must stay.
        self._keeps_prompts = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._keeps_prompts = False

    def _apply(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Move prompts with the states."""
        before, moved = self.device, super()._apply(*args, **kwargs)
        for name in ("_sums_CD", "_counts_C", "_classes_CD", "_checksum"):
            value = getattr(self, name)
            if self.device != before and value is not None:
                setattr(self, name, value.to(self.device))
        return moved

    def reset(self) -> None:
        """Remove images and prompts."""
        super().reset()
        if not self._keeps_prompts:
            self._sums_CD = self._counts_C = self._classes_CD = None

    def _compute(self) -> dict[str, Tensor]:
        ranks_N = dim_zero_cat(self.ranks) if len(self.ranks) else torch.empty(0)
        if not len(ranks_N):
            raise RuntimeError(
                "Called `ZeroShotAccuracy.compute()` with no images on any rank. Call "
                "`update(image_features, target)` first."
            )
        ranks_N, target_N = without_repeats(ranks_N, dim_zero_cat(self.keys))
        # Checked here, because a check in `update` would cost a host sync per batch.
        wrong_N = target_N[(target_N < 0) | (target_N >= self.num_classes)]
        if len(wrong_N):
            raise ValueError(
                f"Passed {len(wrong_N)} values of `target` outside of [0, {self.num_classes}), "
                f"such as {int(wrong_N[0])}. Pass the index of each image's class."
            )
        values = {
            f"top{k}": (ranks_N <= min(k, self.num_classes)).float().mean() for k in self.top_k
        }
        values["images"] = ranks_N.new_tensor(float(len(ranks_N)))
        return values

    def _check(self, image_features: Tensor, target: Tensor, keys: Tensor | None = None) -> None:
        name = type(self).__name__
        check_rows(name, "image_features", image_features)
        check_ids(name, "target", target, len(image_features))
        if keys is not None:
            check_ids(name, "keys", keys, len(image_features))
        width = self._classes().shape[1]
        if image_features.shape[1] != width:
            raise ValueError(
                f"Passed `image_features` of width {image_features.shape[1]} after prompts of "
                f"width {width}. `{name}` needs images and prompts of one width: project both."
            )

    def _classes(self) -> Tensor:
        if self._classes_CD is None:
            counts_C = torch.zeros(1) if self._counts_C is None else self._counts_C
            if self._sums_CD is None or (counts_C == 0).any():
                missing = int((counts_C == 0).nonzero()[0])
                raise RuntimeError(
                    f"Called `ZeroShotAccuracy.update()` with class {missing} without a prompt. "
                    "Call `update_prompts(text_features, class_ids)` for all "
                    f"{self.num_classes} classes on every rank, after each `reset()`."
                )
            # Normalized sums equal normalized means.
            self._classes_CD = unit_rows(self._sums_CD)[0]
            # A `MetricCollection` updates only one of several metrics with equal states. Different
            # prompts may give equal ranks in the first batch, so the checksum is a state.
            flat = self._classes_CD.float().flatten()
            factors = torch.arange(1, len(flat) + 1, dtype=flat.dtype, device=flat.device).sin_()
            # Not `@`, which autocast computes in half precision, unlike the state of other ranks.
            self._checksum = (flat * factors).sum()
        return self._classes_CD

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        # In torchmetrics a rank without data sends a 1-D fp32 tensor for each state.
        if not self.ranks:
            self.ranks = [torch.empty(0, dtype=torch.float32, device=self.device)]
            self.keys = [torch.empty(0, 2, dtype=torch.int64, device=self.device)]
        super()._sync_dist(*args, **kwargs)


def _ranks(image_nD: Tensor, classes_CD: Tensor, target_n: Tensor) -> Tensor:
    """Return 1 + the number of classes not clearly below the target, in fp32 like all states."""
    unit_nD, _ = unit_rows(image_nD)
    dtype = torch.promote_types(unit_nD.dtype, classes_CD.dtype)
    score_nC = unit_nD.to(dtype) @ classes_CD.to(dtype).T
    # `compute()` raises for targets out of range.
    place_n1 = target_n.clamp(0, len(classes_CD) - 1)[:, None]
    own_n1 = score_nC.gather(1, place_n1)
    ahead_nC = ~(score_nC < own_n1 - 2 * sum_rounding(unit_nD.shape[1], dtype))
    ahead_nC.scatter_(1, place_n1, False)
    rank_n = 1 + ahead_nC.sum(1)
    return torch.where(own_n1[:, 0].isfinite(), rank_n, len(classes_CD) + 1).float()
