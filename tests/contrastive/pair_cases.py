"""Batches with pair options, and the dense targets that the options stand for."""

import copy
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import ContrastiveLoss
from tests.contrastive.test_ids import few_ids
from tests.reference.contrastive import relative_error
from tests.reference.contrastive_targets import dense_targets

Sizes = list[tuple[int, int]]


class PairCase:
    """One global batch, the arguments of a loss and of its call, and the equivalent dense targets.

    Args:
        name: Name of the options: a method of this class that sets them.
        sizes: Images and texts of each rank. The first texts of a rank belong to its images.
        seed: Seed of all random numbers.
    """

    def __init__(self, name: str, sizes: Sizes, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.sizes = sizes
        self.b, self.n = (sum(size[side] for size in sizes) for side in (0, 1))
        ends = [0, *itertools.accumulate(n for _, n in sizes)]
        self.own = torch.cat(
            [torch.arange(b) + at for (b, _), at in zip(sizes, ends, strict=False)]
        )
        image, text = (torch.randn(x, 12, generator=self.generator) for x in (self.b, self.n))
        text[self.own] += image
        self.features = [F.normalize(x, dim=1) for x in (image, text)]
        self.setup: dict[str, Any] = {}
        self.call: dict[str, Any] = {}
        self.match = torch.zeros(self.b, self.n, dtype=torch.bool)
        self.match[torch.arange(self.b), self.own] = True
        self.dense: dict[str, Any] = {}
        getattr(self, name)()

    def weights(self) -> None:
        weights = torch.rand(self.b, generator=self.generator, dtype=torch.float64)
        weights[::3] = 0
        self.call["weights"] = weights
        self._weight_own_texts(weights)

    def multi_positive(self) -> None:
        ids = torch.randint(-self.b // 3, self.b // 3, (self.n,), generator=self.generator) * 2**40
        ids[-1] = 2**62  # larger than any id of an image, if there are more texts
        self.setup["duplicates"], self.call["ids"] = "multi_positive", ids
        self.match = ids[self.own, None] == ids
        self._weight_own_texts(torch.ones(self.b))

    def weighted_multi_positive(self) -> None:
        self.multi_positive()
        self.weights()

    def weighted_mask(self) -> None:
        self.weights()
        self.call["ids"] = few_ids(self.n, 3)
        self.dense["masked"] = self.call["ids"][self.own, None] == self.call["ids"]

    def smoothing(self) -> None:
        self.setup["label_smoothing"] = self.dense["smoothing"] = 0.1

    def smoothed_mask(self) -> None:
        self.smoothing()
        self.weighted_mask()

    def smoothed_multi_positive(self) -> None:
        self.smoothing()
        self.multi_positive()

    def captions(self) -> None:
        """Each image has zero to three texts of its rank, each text at most one image."""
        self._list_positives(shared=False)

    def weighted_captions(self) -> None:
        self.captions()
        weights = torch.rand(self.b, generator=self.generator)
        self.call["weights"] = self.dense["row_weights"] = weights
        self._mean_weights(weights)

    def shared_texts(self) -> None:
        """Texts belong to several images, images to several texts."""
        self.weighted_captions()
        self._list_positives(shared=True)
        self._mean_weights(self.call["weights"])

    def smoothed_captions(self) -> None:
        self.smoothing()
        self.captions()

    def swapped_texts(self) -> None:
        """`positives` of one dimension give each image the text of another image; with ids."""
        self.smoothed_mask()
        self.captions()
        order = [torch.randperm(b, generator=self.generator) for b, _ in self.sizes]
        self.call["positives"] = torch.cat(order)
        own = self.own[
            torch.cat([at + x for at, x in zip(self._first_rows(0), order, strict=True)])
        ]
        self.match = torch.zeros_like(self.match)
        self.match[torch.arange(self.b), own] = True
        self.dense["masked"] = self.call["ids"][own, None] == self.call["ids"]
        self._weight_own_texts(self.call["weights"], own)

    def negatives(self) -> None:
        negatives = torch.randn(self.b, 3, 12, generator=self.generator)
        negatives += 3 * self.features[0][:, None]  # hard negatives
        self.features.append(F.normalize(negatives, dim=2))

    def smoothed_negatives(self) -> None:
        self.smoothing()
        self.negatives()

    def negatives_of_captions(self) -> None:
        self.weighted_captions()
        self.negatives()

    def absolute(self) -> None:
        self.setup |= {"false_negatives": "absolute", "margin": 0.45}

    def relative(self) -> None:
        self.setup |= {"false_negatives": "relative", "margin": 0.6}

    def weighted_absolute(self) -> None:
        self.absolute()
        self.weighted_mask()

    def relative_with_guide(self) -> None:
        """The guide has features of another width."""
        self.relative()
        image, text = (torch.randn(x, 5, generator=self.generator) for x in (self.b, self.n))
        text[self.own] += 2 * image
        self.call["guide_image"], self.call["guide_text"] = image, text

    def negatives_of_absolute(self) -> None:
        self.absolute()
        self.negatives()

    def absolute_of_swapped(self) -> None:
        self.relative_with_guide()
        self.setup["margin"] = 0.2
        firsts = self._first_rows(0)
        order = [torch.randperm(b, generator=self.generator) for b, _ in self.sizes]
        self.call["positives"] = torch.cat(order)
        self.own = self.own[torch.cat([at + x for at, x in zip(firsts, order, strict=True)])]
        self.match = torch.zeros_like(self.match)
        self.match[torch.arange(self.b), self.own] = True

    def _false_negative_masks(
        self, image: Tensor, text: Tensor, negatives: Tensor | None
    ) -> dict[str, Any]:
        """Return the masks of `false_negatives` as `CachedGISTEmbedLoss` defines them."""
        if "guide_image" in self.call:
            image, text = (self.call[name].double() for name in ("guide_image", "guide_text"))
        similarities = image @ text.T
        positive_b = similarities[torch.arange(self.b), self.own]
        margin = self.setup["margin"]
        is_absolute = self.setup["false_negatives"] == "absolute"
        threshold_b = positive_b - margin if is_absolute else positive_b - positive_b.abs() * margin
        threshold_n = torch.full((self.n,), torch.inf, dtype=torch.float64)
        threshold_n[self.own] = threshold_b
        # No similarity is so close to its threshold that fp32 could decide otherwise: the rounding
        # error of 12 products of at most 1 is below 12 * 2^-24.
        for limit in (threshold_b[:, None], threshold_n):
            assert (similarities - limit).abs().masked_fill(self.match, 1.0).min() > 8e-7
        masked = self.dense.get("masked", torch.zeros_like(self.match))
        found = {
            "masked": masked | (similarities > threshold_b[:, None]),
            "column_masked": masked | (similarities > threshold_n),
        }
        assert all(0.02 < x[~self.match].double().mean() < 0.98 for x in found.values())
        if negatives is not None:
            found["negatives_masked"] = (
                torch.einsum("id,ikd->ik", image, negatives) > threshold_b[:, None]
            )
        return found

    def _first_rows(self, side: int) -> list[int]:
        return [0, *itertools.accumulate(size[side] for size in self.sizes)][:-1]

    def _list_positives(self, shared: bool) -> None:
        self.match, named = torch.zeros_like(self.match), []
        for (b, n), image, text in zip(
            self.sizes, self._first_rows(0), self._first_rows(1), strict=True
        ):
            of_text = torch.randint(0, b, (n, 1 + shared), generator=self.generator)
            match = torch.zeros(b, n, dtype=torch.bool)
            match[of_text, torch.arange(n)[:, None]] = True
            match &= match.cumsum(1) <= 3
            self.match[image : image + b, text : text + n] = match
            chosen = (match * torch.arange(1, n + 1) - 1).sort(1, descending=True).values
            named.append(F.pad(chosen, (0, 3), value=-1)[:, :3])
        self.call["positives"] = torch.cat(named)

    def _mean_weights(self, weights: Tensor) -> None:
        match = self.match.double()
        self.dense["column_weights"] = (match.T @ weights.double()) / match.sum(0).clamp_min(1)

    def _weight_own_texts(self, weights: Tensor, own: Tensor | None = None) -> None:
        """Set the weights of the cross entropies; extra texts have a weight of 0."""
        own = self.own if own is None else own
        self.dense["row_weights"] = weights
        self.dense["column_weights"] = weights.new_zeros(self.n).index_copy(0, own, weights)

    def of_rank(self, rank: int) -> "PairCase":
        """Return the rank batch of a rank."""
        case = copy.copy(self)
        case.features = [self.rows_of_rank(x, rank) for x in self.features]
        case.call = {key: self.rows_of_rank(value, rank) for key, value in self.call.items()}
        return case

    def rows_of_rank(self, value: Tensor, rank: int) -> Tensor:
        """Return the rows of a rank from a tensor of all images or of all texts."""
        side = (self.b, self.n).index(len(value))
        return value.split([size[side] for size in self.sizes])[rank]

    def expected(self, dtype: torch.dtype, scale: float, directions: str) -> list[Tensor]:
        """Return the loss and its gradients in float64, for features rounded to a dtype."""
        leaves = [x.to(dtype).double().requires_grad_() for x in self.features]
        leaves.append(torch.tensor(scale, dtype=torch.float64, requires_grad=True))
        image, text, *negatives, scale_ = leaves
        dense = {**self.dense, "negatives": negatives[0]} if negatives else self.dense
        if "false_negatives" in self.setup:
            with torch.no_grad():
                dense = dense | self._false_negative_masks(
                    image, text, negatives[0] if negatives else None
                )
        loss = dense_targets(image, text, scale_, self.match, directions=directions, **dense)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]


CASES = ["weights", "multi_positive", "weighted_multi_positive", "weighted_mask"]
CASES += ["smoothing", "smoothed_mask", "smoothed_multi_positive"]
GUIDED = ["relative_with_guide", "absolute_of_swapped"]
CASES += ["absolute", "relative", "weighted_absolute", *GUIDED]
OF_IMAGES = ["negatives_of_absolute", "negatives", "smoothed_negatives", "negatives_of_captions"]
CASES += OF_IMAGES
CASES += ["captions", "weighted_captions", "shared_texts", "smoothed_captions", "swapped_texts"]


def loss_and_gradients(
    case: PairCase, loss_fn: ContrastiveLoss, dtype: torch.dtype, scale: float
) -> list[Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in case.features]
    leaves.append(torch.tensor(scale, requires_grad=True))
    # A loss scale, equal on all ranks, so that fp16 gradients do not underflow.
    gain = 128.0
    image, text, *negatives, scale_ = leaves
    call = {**case.call, "negatives": negatives[0]} if negatives else case.call
    loss = loss_fn(image, text, scale_, **call)
    gradients = torch.autograd.grad(loss * gain, leaves)
    return [loss.detach(), *(x.double() / gain for x in gradients)]


def check(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype, what: Any = "") -> None:
    # A logit near 20 is rounded to fp32 by up to 1e-6, and a loss or softmax value by as much.
    rounding = 1e-12 if dtype == torch.float64 else 4e-6
    eps = torch.finfo(dtype).eps
    loss, *d_features, d_scale = found
    assert relative_error(loss, expected[0]) < rounding, what
    # At a positive, p - 1 cancels: p has the error of its logit near 20, 20 units of float64, and
    # each of the b rows has 20 / b times this error, however small the gradient is.
    canceled = 20 * 20 * torch.finfo(torch.float64).eps / len(expected[1]) ** 0.5
    for value, right in zip(d_features, expected[1:-1], strict=True):
        assert (value - right).norm() < (rounding + eps) * right.norm() + canceled, what
    # The scale's gradient sums <I, dI> / scale, whose terms cancel: the bound is a sum of |I| |dI|.
    size = expected[1].norm(dim=1).sum() / 20
    assert (d_scale - expected[-1]).abs() < rounding * (size + expected[-1].abs()) + 1e-7, what
