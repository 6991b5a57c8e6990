"""Options that say what belongs to what and how much, against dense targets in float64."""

import copy
import itertools
import math
from typing import Any, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import ContrastiveLoss, SigmoidContrastiveLoss
from lightning_mp.contrastive.pair_options import RULES, PairArguments
from tests.contrastive.test_exchange import EXCHANGES, make_loss
from tests.contrastive.test_ids import few_ids
from tests.processes import run_ranks
from tests.reference.contrastive import relative_error
from tests.reference.contrastive_targets import dense_targets

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


Sizes = list[tuple[int, int]]


class Case:
    """One batch with the arguments of a loss, of its call, and what they stand for.

    Args:
        name: Of the options.
        sizes: Images and texts of each rank; the first of a rank's texts are its images' own.
        seed: Of all numbers.
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
        self._weigh(weights)

    def multi_positive(self) -> None:
        ids = torch.randint(-self.b // 3, self.b // 3, (self.n,), generator=self.generator) * 2**40
        self.setup["duplicates"], self.call["ids"] = "multi_positive", ids
        self.match = ids[self.own, None] == ids
        self._weigh(torch.ones(self.b))

    def weighted_multi_positive(self) -> None:
        self.multi_positive()
        self.weights()

    def weighted_mask(self) -> None:
        self.weights()
        self.call["ids"] = few_ids(self.n, 3)
        self.dense["left_out"] = self.call["ids"][self.own, None] == self.call["ids"]

    def smoothing(self) -> None:
        self.setup["label_smoothing"] = self.dense["smoothing"] = 0.1

    def smoothed_mask(self) -> None:
        self.smoothing()
        self.weighted_mask()

    def smoothed_multi_positive(self) -> None:
        self.smoothing()
        self.multi_positive()

    def captions(self) -> None:
        """Each image has none to three of its rank's texts, each text at most one image."""
        self._list(shared=False)

    def weighted_captions(self) -> None:
        self.captions()
        weights = torch.rand(self.b, generator=self.generator)
        self.call["weights"] = self.dense["row_weights"] = weights
        self._mean_weights(weights)

    def shared_texts(self) -> None:
        """Texts belong to several images, images to several texts."""
        self.weighted_captions()
        self._list(shared=True)
        self._mean_weights(self.call["weights"])

    def smoothed_captions(self) -> None:
        self.smoothing()
        self.captions()

    def swapped_texts(self) -> None:
        """Each image has another one's text, by a list of one dimension, and ids stand beside."""
        self.smoothed_mask()
        self.captions()
        order = [torch.randperm(b, generator=self.generator) for b, _ in self.sizes]
        self.call["positives"] = torch.cat(order)
        own = self.own[torch.cat([at + x for at, x in zip(self._firsts(0), order, strict=True)])]
        self.match = torch.zeros_like(self.match)
        self.match[torch.arange(self.b), own] = True
        self.dense["left_out"] = self.call["ids"][own, None] == self.call["ids"]
        self._weigh(self.call["weights"], own)

    def negatives(self) -> None:
        negatives = torch.randn(self.b, 3, 12, generator=self.generator)
        negatives += 3 * self.features[0][:, None]  # hard ones
        self.features.append(F.normalize(negatives, dim=2))

    def smoothed_negatives(self) -> None:
        self.smoothing()
        self.negatives()

    def negatives_of_captions(self) -> None:
        self.weighted_captions()
        self.negatives()

    def _firsts(self, side: int) -> list[int]:
        return [0, *itertools.accumulate(size[side] for size in self.sizes)][:-1]

    def _list(self, shared: bool) -> None:
        self.match, named = torch.zeros_like(self.match), []
        for (b, n), image, text in zip(self.sizes, self._firsts(0), self._firsts(1), strict=True):
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

    def _weigh(self, weights: Tensor, own: Tensor | None = None) -> None:
        """Let texts beyond the images' own look for no image."""
        own = self.own if own is None else own
        self.dense["row_weights"] = weights
        self.dense["column_weights"] = weights.new_zeros(self.n).index_copy(0, own, weights)

    def of_rank(self, rank: int) -> "Case":
        """The part of a rank."""
        part = copy.copy(self)
        part.features = [self.part(x, rank) for x in self.features]
        part.call = {key: self.part(value, rank) for key, value in self.call.items()}
        return part

    def part(self, value: Tensor, rank: int) -> Tensor:
        """A rank's own rows of what stands for all images or for all texts."""
        side = (self.b, self.n).index(len(value))
        return value.split([size[side] for size in self.sizes])[rank]

    def expected(self, dtype: torch.dtype, scale: float, directions: str) -> list[Tensor]:
        """The loss and its gradients in float64 of features rounded to a dtype."""
        leaves = [x.to(dtype).double().requires_grad_() for x in self.features]
        leaves.append(torch.tensor(scale, dtype=torch.float64, requires_grad=True))
        image, text, *negatives, scale_ = leaves
        dense = {**self.dense, "negatives": negatives[0]} if negatives else self.dense
        loss = dense_targets(image, text, scale_, self.match, directions=directions, **dense)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]


CASES = ["weights", "multi_positive", "weighted_multi_positive", "weighted_mask"]
CASES += ["smoothing", "smoothed_mask", "smoothed_multi_positive"]
OF_IMAGES = ["negatives", "smoothed_negatives", "negatives_of_captions"]
CASES += OF_IMAGES
CASES += ["captions", "weighted_captions", "shared_texts", "smoothed_captions", "swapped_texts"]


def found(case: Case, loss_fn: ContrastiveLoss, dtype: torch.dtype, scale: float) -> list[Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in case.features]
    leaves.append(torch.tensor(scale, requires_grad=True))
    # A loss scale, so that fp16's gradients are rounded like others.
    gain = float(len(leaves[0]))
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
    for value, right in zip(d_features, expected[1:-1], strict=True):
        assert relative_error(value, right) < rounding + eps, what
    # Of each image <I, dI> / scale, in which much cancels: an error of dI counts with |I| |dI|.
    size = expected[1].norm(dim=1).sum() / 20
    assert (d_scale - expected[-1]).abs() < rounding * (size + expected[-1].abs()) + 1e-7, what


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("workspace_bytes", [1, 2**25])
def test_loss_equals_dense_targets(name: str, dtype: torch.dtype, workspace_bytes: int) -> None:
    case = Case(name, [(133, 171)], 0)
    loss_fn = ContrastiveLoss(**case.setup)
    loss_fn.workspace_bytes = workspace_bytes
    check(found(case, loss_fn, dtype, 20.0), case.expected(dtype, 20.0, "both"), dtype)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("directions", ["image_to_text", "text_to_image"])
def test_one_direction_equals_dense_targets(name: str, directions: str) -> None:
    if name in OF_IMAGES and directions == "text_to_image":
        return  # refused
    case = Case(name, [(35, 41)], 1)
    loss_fn = ContrastiveLoss(directions=directions, **case.setup)  # type: ignore[arg-type]
    dtype = torch.float64
    check(found(case, loss_fn, dtype, 20.0), case.expected(dtype, 20.0, directions), dtype)


SIZES: list[Sizes] = [[(8, 8), (5, 17)], [(3, 9), (7, 7), (1, 20), (6, 8)]]


def _steps(rank: int, sizes: Sizes) -> dict[tuple[str, str], list[Tensor]]:
    results = {}
    for name, exchange in itertools.product(CASES, EXCHANGES):
        case = Case(name, sizes, 2).of_rank(rank)
        loss_fn = make_loss(exchange, **case.setup)
        results[name, exchange] = found(case, loss_fn, torch.float32, 20.0)
    return results


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", SIZES)
def test_loss_of_ranks_equals_dense_targets(sizes: Sizes) -> None:
    by_rank = run_ranks(_steps, len(sizes), sizes)
    for name in CASES:
        case = Case(name, sizes, 2)
        loss, *d_features, d_scale = case.expected(torch.float32, 20.0, "both")
        for rank, exchange in itertools.product(range(len(sizes)), EXCHANGES):
            # The mean over ranks of gradients that only one of them has.
            own = [len(sizes) * case.part(x, rank) for x in d_features]
            right = [loss, *own, d_scale]
            check(by_rank[rank][name, exchange], right, torch.float32, (name, exchange, rank))


def test_neutral_options_change_no_bit() -> None:
    case = Case("weights", [(133, 171)], 4)
    case.call = {}
    plain = found(case, ContrastiveLoss(), torch.float32, 20.0)
    case.call = dict.fromkeys(get_type_hints(PairArguments))
    neutral = ContrastiveLoss(duplicates="mask", label_smoothing=0.0)
    assert all(
        torch.equal(*pair)
        for pair in zip(plain, found(case, neutral, torch.float32, 20.0), strict=True)
    )


@pytest.mark.parametrize("scale", [30.0, 60.0])
def test_converged_pairs_keep_their_digits(scale: float) -> None:
    image = F.normalize(torch.randn(50, 256, dtype=torch.float64), dim=1)
    weights = torch.rand(50)
    leaves = [image.float().requires_grad_(), image.float().requires_grad_()]
    loss = ContrastiveLoss()(*leaves, scale, weights=weights)
    gradients = torch.autograd.grad(loss, leaves)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    logits = scale * doubles[0] @ doubles[1].T
    own = logits.diagonal()
    rest = logits.masked_fill(torch.eye(50, dtype=torch.bool), -torch.inf)
    terms = sum(F.softplus(rest.logsumexp(dim) - own, threshold=1e3) for dim in (0, 1))
    right = (weights * terms).sum() / (2 * weights.double().sum())
    assert relative_error(loss.detach(), right.detach()) < 1e-4
    for value, other in zip(gradients, torch.autograd.grad(right, doubles), strict=True):
        assert relative_error(value, other) < 1e-4


def test_weight_of_zero_takes_a_pair_out_of_the_terms() -> None:
    image, text = (torch.randn(9, 4, dtype=torch.float64) for _ in range(2))
    weights = torch.ones(9)
    weights[4] = 0
    rows, columns = ((image @ text.T) if way else (text @ image.T) for way in (True, False))
    target = torch.arange(9)
    kept = target != 4
    right = sum(F.cross_entropy(x[kept], target[kept]) for x in (rows, columns)) / 2
    assert relative_error(ContrastiveLoss()(image, text, 1.0, weights=weights), right) < 1e-12


def test_weights_of_zero_have_no_loss_and_negative_ones_no_number() -> None:
    image, text = (torch.randn(5, 4, requires_grad=True) for _ in range(2))
    loss = ContrastiveLoss()(image, text, 1.0, weights=torch.zeros(5))
    loss.backward()
    assert loss == 0
    assert torch.count_nonzero(image.grad) == torch.count_nonzero(text.grad) == 0
    weights = torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0])
    assert ContrastiveLoss()(image, text, 1.0, weights=weights).isnan()


def test_loss_is_the_ranking_loss_with_hard_negatives_of_each_anchor() -> None:
    """`MultipleNegativesRankingLoss` of anchors, positives and one negative an anchor, both ways.

    sentence-transformers lets an anchor see all negatives, (B, 2 B); with those of other anchors
    left out it sees its own, (B, B + 1).
    """
    anchor, positive, negative = (F.normalize(torch.randn(30, 8), dim=1).double() for _ in range(3))
    scale, target = 20.0, torch.arange(30)
    scores = scale * anchor @ torch.cat([positive, negative]).T
    back = F.cross_entropy(scores[:, :30].T, target)
    shared = (F.cross_entropy(scores, target) + back) / 2
    found = ContrastiveLoss()(anchor, torch.cat([positive, negative]), scale)
    assert relative_error(found, shared) < 1e-12
    own = torch.cat([scores[:, :30], scores[:, 30:].diagonal()[:, None]], 1)
    found = ContrastiveLoss()(anchor, positive, scale, negatives=negative[:, None])
    assert relative_error(found, (F.cross_entropy(own, target) + back) / 2) < 1e-12


def test_no_negatives_of_an_image_are_none() -> None:
    image, text = (torch.randn(9, 4, dtype=torch.float64) for _ in range(2))
    none = torch.zeros(9, 0, 4, requires_grad=True)
    loss = ContrastiveLoss()(image, text, 1.0, negatives=none)
    loss.backward()
    assert relative_error(loss.detach(), ContrastiveLoss()(image, text, 1.0)) < 1e-12
    assert none.grad is not None


def test_own_texts_of_an_image_are_no_negatives() -> None:
    image, owners = torch.eye(4), torch.tensor([0, 0, 0, 1, 2, 2, 3])
    named = torch.tensor([[0, 1, 2], [3, -1, -1], [4, 5, -1], [6, -1, -1]])
    loss_fn = ContrastiveLoss(directions="text_to_image")
    # With a text in the sweep like any other, its loss has the rounding of a logit of 100.
    assert loss_fn(image, image[owners], 100.0, positives=named) < torch.finfo(torch.float32).eps
    assert ContrastiveLoss()(image, image[owners], 100.0, positives=named).item() == pytest.approx(
        (math.log(3) + math.log(2)) / 8, rel=1e-5
    )


@pytest.mark.parametrize("scale", [30.0, 60.0])
def test_converged_pairs_that_positives_name_keep_their_digits(scale: float) -> None:
    text = F.normalize(torch.randn(50, 256), dim=1)
    order = torch.randperm(50)
    leaves = [text[order].requires_grad_(), text.clone().requires_grad_()]
    results = []
    for ordered, call in ((leaves[1], {"positives": order}), (leaves[1][order], {})):
        loss = ContrastiveLoss()(leaves[0], ordered, scale, **call)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    assert results[0][0] < 1e-6
    assert all(relative_error(*pair) < 1e-6 for pair in zip(*results, strict=True))


def test_image_without_a_text_is_a_negative_alone() -> None:
    image, text = (torch.randn(size, 4, dtype=torch.float64) for size in (5, 7))
    named = torch.tensor([2, -1, 0, -1, 6])
    rows, texts = torch.tensor([0, 2, 4]), torch.tensor([2, 0, 6])
    logits = image @ text.T
    right = F.cross_entropy(logits[rows], texts) + F.cross_entropy(logits.T[texts], rows)
    assert relative_error(ContrastiveLoss()(image, text, 1.0, positives=named), right / 2) < 1e-12
    assert ContrastiveLoss()(image, text, 1.0, positives=torch.full((5,), -1)) == 0


def test_perfect_embedding_of_several_texts_has_the_loss_of_their_number() -> None:
    features = torch.eye(6)[[0, 0, 1, 2, 3, 4]]
    ids = torch.tensor([7, 7, 1, 2, 3, 4])
    loss = ContrastiveLoss(duplicates="multi_positive")(features, features, 100.0, ids=ids)
    assert loss == pytest.approx(math.log(2) / 3, rel=1e-5)


@pytest.mark.parametrize(
    ("setup", "call", "said"),
    [
        ({}, {"weights": [1.0] * 4}, r"`weights` of type list.*torch.tensor\(weights\)"),
        ({}, {"weights": torch.ones(3)}, r"shape \[3\] with images of shape \[4, 2\]"),
        ({}, {"weights": torch.ones(4) > 0}, r"dtype torch.bool.*mask.float\(\)"),
        ({}, {"weights": torch.ones(4, requires_grad=True)}, r"`weights.detach\(\)`"),
        ({}, {"negatives": torch.ones(4, 2)}, r"shape \[4, 2\].*\[4, negatives of each image, 2\]"),
        ({}, {"negatives": torch.ones(4, 1, 2).int()}, r"dtype torch.int32.*the encoder's output"),
        ({}, {"negatives": [1.0]}, r"type list.*torch.stack\(negatives, 1\)"),
        (
            {"directions": "text_to_image"},
            {"negatives": torch.ones(4, 1, 2)},
            "texts that an image is not to find",
        ),
        ({}, {"positives": [0, 1, 2, 3]}, r"type list.*torch.tensor\(positives\)"),
        ({}, {"positives": torch.arange(5)}, r"shape \[5\] with images of shape \[4, 2\]"),
        ({}, {"positives": torch.arange(2, 6)}, "from 2 to 5 with 5 texts on this rank"),
        ({}, {"positives": torch.arange(4) - 2}, "from -2 to 1 with 5 texts.*-1 for none"),
        (
            {},
            {"positives": torch.tensor([0, 1, 1, 2]), "ids": torch.arange(5)},
            "it is not said which of equal ids are negatives",
        ),
        (
            {"duplicates": "multi_positive"},
            {"positives": torch.arange(4), "ids": torch.arange(5)},
            r"duplicates='multi_positive'\)`, where `ids` say.*Pass one of both",
        ),
        ({"duplicates": "multi_positive"}, {}, r"duplicates='multi_positive'\)` without `ids`"),
    ],
)
def test_what_cannot_be_used_is_refused(
    setup: dict[str, Any], call: dict[str, Any], said: str
) -> None:
    image, text = torch.randn(4, 2), torch.randn(5, 2)
    with pytest.raises(ValueError, match=said):
        ContrastiveLoss(**setup)(image, text, 1.0, **call)


def test_sigmoid_loss_refuses_what_belongs_to_a_softmax() -> None:
    image, text = torch.randn(4, 2), torch.randn(5, 2)
    call = {
        "weights": torch.ones(4),
        "positives": torch.arange(4),
        "negatives": torch.ones(4, 1, 2),
    }
    for name, value in call.items():
        with pytest.raises(ValueError, match=f"Passed `{name}` to `SigmoidContrastiveLoss`"):
            SigmoidContrastiveLoss()(image, text, 1.0, **{name: value})  # type: ignore[call-overload]
    for name in RULES[1:]:
        with pytest.raises(TypeError, match=f"no `{name}`. It belongs to a softmax"):
            SigmoidContrastiveLoss(**{name: 1})


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        ({"duplicates": "all"}, r"duplicates='all'.*'mask' or 'multi_positive'"),
        ({"label_smoothing": 1.5}, r"label_smoothing=1.5.*from 0 to 1"),
    ],
)
def test_unknown_rule_says_what_is_known(setup: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ContrastiveLoss(**setup)


def test_label_smoothing_is_that_of_torch() -> None:
    image, text = (torch.randn(9, 4, dtype=torch.float64) for _ in range(2))
    target, logits = torch.arange(9), 3 * image @ text.T
    right = sum(F.cross_entropy(x, target, label_smoothing=0.2) for x in (logits, logits.T)) / 2
    assert relative_error(ContrastiveLoss(label_smoothing=0.2)(image, text, 3.0), right) < 1e-12


def _messages(rank: int) -> list[str]:
    image, text = torch.randn(3, 4), torch.randn(3, 4)
    ids, said = torch.arange(3), []
    for setup, call in (
        ({}, {"weights": torch.ones(3)} if rank else {}),
        ({"duplicates": "multi_positive" if rank else "mask"}, {"ids": ids}),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            ContrastiveLoss(**setup)(image, text, 1.0, **call)
        said.append(str(error.value))
    return said


@pytest.mark.distributed
def test_options_that_differ_between_ranks_are_refused_on_all() -> None:
    for weights, duplicates in run_ranks(_messages, 2):
        assert "Passed `weights` on ranks [1] of 2 only" in weights
        assert (
            "whose directions or duplicates or label_smoothing differs between ranks" in duplicates
        )
