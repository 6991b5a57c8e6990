"""Pair options equal dense targets in float64."""

import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import ContrastiveLoss
from tests.contrastive.pair_cases import (
    CASES,
    OF_IMAGES,
    PairCase,
    Sizes,
    check,
    loss_and_gradients,
)
from tests.contrastive.test_exchange import EXCHANGES, make_loss
from tests.contrastive.test_torch_tiles import PeakBytes
from tests.contrastive.visible import visible
from tests.processes import run_ranks
from tests.reference.contrastive import relative_error
from tests.reference.contrastive_targets import dense_targets


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("dtype", "workspace_bytes"),
    [
        (torch.float32, 1),  # float64 is that of the test below
        pytest.param(torch.bfloat16, 2**25, marks=pytest.mark.slow),
        pytest.param(torch.float16, 2**25, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_loss_equals_dense_targets(name: str, dtype: torch.dtype, workspace_bytes: int) -> None:
    case = PairCase(name, [(133, 171)], 0)
    loss_fn = ContrastiveLoss(**case.setup)
    loss_fn.workspace_bytes = workspace_bytes
    check(loss_and_gradients(case, loss_fn, dtype, 20.0), case.expected(dtype, 20.0, "both"), dtype)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("directions", ["image_to_text", "text_to_image"])
def test_one_direction_equals_dense_targets(name: str, directions: str) -> None:
    if name in OF_IMAGES and directions == "text_to_image":
        return  # refused
    case = PairCase(name, [(35, 41)], 1)
    loss_fn = ContrastiveLoss(directions=directions, **case.setup)  # type: ignore[arg-type]
    dtype = torch.float64
    check(
        loss_and_gradients(case, loss_fn, dtype, 20.0),
        case.expected(dtype, 20.0, directions),
        dtype,
    )


SIZES: list[Sizes] = [[(9, 14)], [(8, 8), (5, 17)], [(3, 9), (7, 7), (1, 20), (6, 8)]]


def _exchange(name: str, sizes: Sizes) -> str:
    """Return an exchange that varies with the case and the number of ranks."""
    return list(EXCHANGES)[(CASES.index(name) + len(sizes) // 2) % len(EXCHANGES)]


def _steps(rank: int, sizes: Sizes) -> dict[str, list[Tensor]]:
    results = {}
    for name in CASES:
        case = PairCase(name, sizes, 2).of_rank(rank)
        loss_fn = make_loss(_exchange(name, sizes), **case.setup)
        results[name] = loss_and_gradients(case, loss_fn, torch.float32, 20.0)
    return results


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", SIZES, ids=len)
def test_loss_across_ranks_equals_dense_targets(sizes: Sizes) -> None:
    by_rank = run_ranks(_steps, len(sizes), sizes)
    for name in CASES:
        case = PairCase(name, sizes, 2)
        loss, *d_features, d_scale = case.expected(torch.float32, 20.0, "both")
        for rank in range(len(sizes)):
            # The mean over ranks of gradients that only one of them has.
            own = [len(sizes) * case.rows_of_rank(x, rank) for x in d_features]
            what = (name, _exchange(name, sizes), rank)
            check(by_rank[rank][name], [loss, *own, d_scale], torch.float32, what)


@pytest.mark.filterwarnings("ignore:Passed .*negative scale")
def test_false_negatives_with_negative_scale_are_the_most_similar_pairs() -> None:
    case = PairCase("absolute", [(60, 70)], 0)
    dtype = torch.float64
    check(
        loss_and_gradients(case, ContrastiveLoss(**case.setup), dtype, -5.0),
        case.expected(dtype, -5.0, "both"),
        dtype,
    )


@pytest.mark.filterwarnings("ignore:Passed .*negative scale")
@pytest.mark.parametrize("scale", [5.0, -5.0])
def test_nan_is_not_a_false_negative(scale: float) -> None:
    image, text = torch.randn(8, 4), torch.randn(10, 4)
    text[9] = torch.nan
    loss_fn = ContrastiveLoss(false_negatives="absolute")
    assert loss_fn(image, text, scale).isnan()


def test_text_as_similar_as_the_positive_is_masked() -> None:
    image = torch.eye(6)[[0, 0, 1, 2, 3, 4]]  # the first two pairs are equal
    loss_fn = ContrastiveLoss(false_negatives="relative", margin=0.1)
    assert loss_fn(image, image, 100.0) < 1e-30
    assert ContrastiveLoss()(image, image, 100.0).item() == pytest.approx(math.log(2) / 3, rel=1e-5)


def test_relative_threshold_of_a_negative_similarity_is_below_it() -> None:
    image = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    # The positive has a similarity of -0.5 and the negative of -0.52, less than a tenth below.
    text = torch.tensor([[-0.5, 0.8], [-0.52, 0.9]])
    call = (image, text, 3.0)
    options: dict[str, Any] = {"false_negatives": "relative", "directions": "image_to_text"}
    masked = ContrastiveLoss(margin=0.1, **options)(*call)
    kept = ContrastiveLoss(margin=0.01, **options)(*call)
    # The negative of the second row, of 0.8 for 0.9, is kept with either margin.
    rows = 3.0 * image.double() @ text.double().T
    terms = [rows[0].logsumexp(0) - rows[0, 0], rows[1].logsumexp(0) - rows[1, 1]]
    assert kept.item() == pytest.approx(float(terms[0] + terms[1]) / 2, rel=1e-6)
    assert masked.item() == pytest.approx(float(terms[1]) / 2, rel=1e-6)


def copies_of_positives(dtype: torch.dtype) -> list[Tensor]:
    """Return features of 60 pairs with duplicated texts, and the mask of the copies."""
    generator = torch.Generator().manual_seed(3)
    image, text = (torch.randn(b, 48, generator=generator) for b in (60, 30))
    image, text = (F.normalize(x, dim=1).to(dtype) for x in (image, text.repeat(2, 1)))
    copies = torch.eye(30, dtype=torch.bool).repeat(2, 2) ^ torch.eye(60, dtype=torch.bool)
    return [image, text, copies]


def check_copies(
    loss_fn: ContrastiveLoss, dtype: torch.dtype, guide: torch.dtype | None = None
) -> None:
    """Check that without a margin, a copy of the positive remains a negative."""
    *features, copies = copies_of_positives(dtype)
    judges, call = features, {}
    if guide is not None:
        *judges, _ = copies_of_positives(guide)
        features = [F.normalize(torch.randn(60, 20), dim=1).to(dtype) for _ in range(2)]
        # Guides of any norm; a power of two changes no comparison.
        call = {"guide_image": 32 * judges[0], "guide_text": 32 * judges[1]}
    leaves = [*(x.requires_grad_() for x in features), torch.tensor(20.0, requires_grad=True)]
    loss = loss_fn(*leaves, **call)
    found = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    with torch.no_grad():
        similarities = judges[0].double() @ judges[1].double().T
        positive = similarities.diagonal()
        by_row, by_column = (similarities > positive[:, None]) & ~copies, similarities > positive
    match = torch.eye(60, dtype=torch.bool)
    right = dense_targets(*doubles, match, masked=by_row, column_masked=by_column)
    check(found, [right.detach(), *torch.autograd.grad(right, doubles)], dtype)


@pytest.mark.parametrize("guide", [None, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_copy_of_the_positive_without_margin_remains_a_negative(
    dtype: torch.dtype, guide: torch.dtype | None
) -> None:
    check_copies(ContrastiveLoss(false_negatives="absolute", workspace_bytes=2**20), dtype, guide)


@pytest.mark.slow
def test_thresholds_need_no_memory_beyond_the_workspace() -> None:
    b, width = 2048, 64
    image, text, guide = (F.normalize(torch.randn(b, width), dim=1) for _ in range(3))
    image.requires_grad_()
    text.requires_grad_()
    loss_fn = ContrastiveLoss(workspace_bytes=2**20, false_negatives="absolute", margin=0.1)
    with visible(), PeakBytes() as made:
        loss_fn(image, text, 20.0, guide_image=guide, guide_text=guide).backward()
    # Gradients before and after the cotangent is applied, a float64 copy of a chunk, and vectors.
    assert made.peak < 2**20 + 8 * b * width * 4 + 40 * b * 8 < b * b * 4


def test_default_options_are_bitwise_neutral() -> None:
    case = PairCase("weights", [(133, 171)], 4)
    case.call = {}
    plain = loss_and_gradients(case, ContrastiveLoss(), torch.float32, 20.0)
    names = inspect.getfullargspec(ContrastiveLoss.forward).kwonlyargs
    case.call = dict.fromkeys(set(names) - {"statistics"})
    neutral = ContrastiveLoss(duplicates="mask", label_smoothing=0.0, false_negatives="keep")
    assert all(
        torch.equal(*pair)
        for pair in zip(plain, loss_and_gradients(case, neutral, torch.float32, 20.0), strict=True)
    )


@pytest.mark.parametrize("scale", [30.0, 60.0])
def test_converged_pairs_keep_relative_precision(scale: float) -> None:
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


def test_pair_with_weight_zero_has_no_term() -> None:
    image, text = (torch.randn(9, 4, dtype=torch.float64) for _ in range(2))
    weights = torch.ones(9)
    weights[4] = 0
    rows, columns = ((image @ text.T) if way else (text @ image.T) for way in (True, False))
    target = torch.arange(9)
    kept = target != 4
    right = sum(F.cross_entropy(x[kept], target[kept]) for x in (rows, columns)) / 2
    assert relative_error(ContrastiveLoss()(image, text, 1.0, weights=weights), right) < 1e-12


def test_all_zero_weights_give_zero_and_negative_weights_nan() -> None:
    image, text = (torch.randn(5, 4, requires_grad=True) for _ in range(2))
    loss = ContrastiveLoss()(image, text, 1.0, weights=torch.zeros(5))
    loss.backward()
    assert loss == 0
    assert torch.count_nonzero(image.grad) == torch.count_nonzero(text.grad) == 0
    weights = torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0])
    assert ContrastiveLoss()(image, text, 1.0, weights=weights).isnan()


def test_label_smoothing_equals_torch() -> None:
    image, text = (torch.randn(9, 4, dtype=torch.float64) for _ in range(2))
    target, logits = torch.arange(9), 3 * image @ text.T
    right = sum(F.cross_entropy(x, target, label_smoothing=0.2) for x in (logits, logits.T)) / 2
    assert relative_error(ContrastiveLoss(label_smoothing=0.2)(image, text, 3.0), right) < 1e-12


@pytest.mark.parametrize("directions", ["both", "text_to_image"])
def test_text_whose_id_masks_all_images_has_an_empty_target(directions: str) -> None:
    """Label smoothing has no image to spread over; gradients must not be NaN."""
    image, text = (torch.randn(x, 4, dtype=torch.float64, requires_grad=True) for x in (3, 5))
    options: Any = {"directions": directions, "label_smoothing": 0.2}
    loss = ContrastiveLoss(**options)(image, text, 1.0, ids=torch.tensor([7, 7, 7, 5, 7]))
    logits = image @ text.T
    rows = torch.stack([logits.diagonal(), logits[:, 3]], 1)  # a text has only its own image
    right = F.cross_entropy(rows, torch.zeros(3, dtype=torch.long), label_smoothing=0.2) / 2
    right = right if directions == "both" else 0 * right
    torch.testing.assert_close(loss, right)
    found, expected = (torch.autograd.grad(x, (image, text)) for x in (loss, right))
    torch.testing.assert_close(found, expected)


def test_loss_with_negatives_equals_the_ranking_loss_with_hard_negatives() -> None:
    """`MultipleNegativesRankingLoss` of anchors, positives and one negative for each anchor.

    In sentence-transformers, all negatives are negatives of every anchor, with (B, 2 B) logits. If
    each anchor has only its own negative, the logits are (B, B + 1).
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


def test_empty_negatives_change_nothing() -> None:
    image, text = (torch.randn(9, 4, dtype=torch.float64) for _ in range(2))
    none = torch.zeros(9, 0, 4, requires_grad=True)
    loss = ContrastiveLoss()(image, text, 1.0, negatives=none)
    loss.backward()
    assert relative_error(loss.detach(), ContrastiveLoss()(image, text, 1.0)) < 1e-12
    assert none.grad is not None


def test_positives_of_an_image_are_not_its_negatives() -> None:
    image, owners = torch.eye(4), torch.tensor([0, 0, 0, 1, 2, 2, 3])
    named = torch.tensor([[0, 1, 2], [3, -1, -1], [4, 5, -1], [6, -1, -1]])
    loss_fn = ContrastiveLoss(directions="text_to_image")
    # With a text in the sweep like any other, its loss has the rounding of a logit of 100.
    assert loss_fn(image, image[owners], 100.0, positives=named) < torch.finfo(torch.float32).eps
    assert ContrastiveLoss()(image, image[owners], 100.0, positives=named).item() == pytest.approx(
        (math.log(3) + math.log(2)) / 8, rel=1e-5
    )


@pytest.mark.parametrize("scale", [30.0, 60.0])
def test_converged_positives_keep_relative_precision(scale: float) -> None:
    text = F.normalize(torch.randn(50, 256), dim=1)
    order = torch.randperm(50)
    leaves = [text[order].requires_grad_(), text.clone().requires_grad_()]
    results = []
    for ordered, call in ((leaves[1], {"positives": order}), (leaves[1][order], {})):
        loss = ContrastiveLoss()(leaves[0], ordered, scale, **call)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    assert results[0][0] < 1e-6
    assert all(relative_error(*pair) < 1e-6 for pair in zip(*results, strict=True))


def test_image_without_positive_is_a_negative_only() -> None:
    image, text = (torch.randn(size, 4, dtype=torch.float64) for size in (5, 7))
    named = torch.tensor([2, -1, 0, -1, 6])
    rows, texts = torch.tensor([0, 2, 4]), torch.tensor([2, 0, 6])
    logits = image @ text.T
    right = F.cross_entropy(logits[rows], texts) + F.cross_entropy(logits.T[texts], rows)
    assert relative_error(ContrastiveLoss()(image, text, 1.0, positives=named), right / 2) < 1e-12
    assert ContrastiveLoss()(image, text, 1.0, positives=torch.full((5,), -1)) == 0


def test_perfect_features_with_k_positives_have_loss_log_k() -> None:
    features = torch.eye(6)[[0, 0, 1, 2, 3, 4]]
    ids = torch.tensor([7, 7, 1, 2, 3, 4])
    loss = ContrastiveLoss(duplicates="multi_positive")(features, features, 100.0, ids=ids)
    assert loss == pytest.approx(math.log(2) / 3, rel=1e-5)
