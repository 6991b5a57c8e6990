"""Pair options with partially trained inputs, non-finite values, autocast and several ranks."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import ContrastiveLoss
from tests.contrastive.pair_cases import PairCase, check
from tests.contrastive.test_torch_tiles import PeakBytes
from tests.contrastive.visible import visible
from tests.processes import run_ranks
from tests.reference.contrastive import relative_error
from tests.reference.contrastive_targets import dense_targets

# One of each kind.
EXAMPLES = [
    "shared_texts",
    "smoothed_mask",
    "weighted_multi_positive",
    "negatives",
    "relative_with_guide",
]


def leaves_of(case: PairCase) -> list[Tensor]:
    features = [x.clone().requires_grad_() for x in case.features]
    return [*features, torch.tensor(20.0, requires_grad=True)]


def loss_of(case: PairCase, leaves: list[Tensor]) -> Tensor:
    image, text, *negatives, scale = leaves
    call = {**case.call, "negatives": negatives[0]} if negatives else case.call
    return ContrastiveLoss(**case.setup)(image, text, scale, **call)


@pytest.mark.parametrize("name", EXAMPLES)
def test_inputs_without_grad_get_no_gradient_and_affect_no_other(name: str) -> None:
    case = PairCase(name, [(31, 40)], 5)
    leaves = leaves_of(case)
    expected = torch.autograd.grad(loss_of(case, leaves), leaves)
    for trains in itertools.product([False, True], repeat=len(leaves)):
        for leaf, is_trained in zip(leaves, trains, strict=True):
            leaf.grad = None
            leaf.requires_grad_(is_trained)
        loss = loss_of(case, leaves)
        assert loss.requires_grad == any(trains)
        if not any(trains):
            continue
        loss.backward()
        for leaf, right, is_trained in zip(leaves, expected, trains, strict=True):
            assert (leaf.grad is not None) == is_trained
            # If one tower is locked, the scale's gradient comes from the products of the other one.
            assert not is_trained or relative_error(leaf.grad, right) < 1e-5


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_non_finite_values_propagate(name: str, value: float, place: int) -> None:
    case = PairCase(name, [(31, 40)], 5)
    leaves = [x.detach() for x in leaves_of(case)]
    leaves[place].view(-1)[0] = value
    assert not loss_of(case, leaves).isfinite()


@pytest.mark.parametrize("name", EXAMPLES)
def test_second_derivatives_raise(name: str) -> None:
    case = PairCase(name, [(9, 12)], 5)
    leaves = leaves_of(case)
    loss = loss_of(case, leaves)
    (d_image,) = torch.autograd.grad(loss, leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="which has a first derivative only"):
        d_image.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="which has a first derivative only"):
        torch.autograd.grad(loss + d_image.square().sum(), leaves[:1])  # a gradient penalty


@pytest.mark.parametrize("name", EXAMPLES)
def test_negative_cotangent_negates_all_gradients(name: str) -> None:
    case = PairCase(name, [(31, 40)], 5)
    leaves = leaves_of(case)
    up, down = (torch.autograd.grad(sign * loss_of(case, leaves), leaves) for sign in (1, -1))
    assert all(torch.equal(x, -y) for x, y in zip(up, down, strict=True))


@pytest.mark.parametrize("name", EXAMPLES)
def test_autocast_changes_nothing(name: str) -> None:
    case = PairCase(name, [(31, 40)], 5)
    leaves = leaves_of(case)
    expected = torch.autograd.grad(loss_of(case, leaves), leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(loss_of(case, leaves), leaves)
    assert all(torch.equal(*pair) for pair in zip(inside, expected, strict=True))


def test_fewer_texts_than_images_can_be_shared() -> None:
    image, text = (F.normalize(torch.randn(b, 12), dim=1).double() for b in (40, 7))
    leaves = [x.requires_grad_() for x in (image, text, torch.tensor(20.0).double())]
    positives = torch.randint(0, 7, (40,))
    loss = ContrastiveLoss()(*leaves, positives=positives)
    found = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    right = dense_targets(*leaves, F.one_hot(positives, 7).bool())
    expected = [right.detach(), *torch.autograd.grad(right, leaves)]
    check(found, expected, torch.float64)


def _shared(rank: int) -> list[Tensor]:
    """Return images and texts of one of two ranks, and the positives."""
    generator = torch.Generator().manual_seed(rank)
    b, n = ((9, 4), (3, 6))[rank]
    image, text = (torch.randn(size, 12, generator=generator) for size in (b, n))
    return [image, text, torch.randint(0, n, (b,), generator=generator)]


def _shared_step(rank: int) -> list[list[Tensor]]:
    results = []
    for exchange in ("slices", "ring"):
        image, text, positives = _shared(rank)
        leaves = [x.requires_grad_() for x in (image, text, torch.tensor(2.0))]
        loss = ContrastiveLoss(exchange=exchange)(*leaves, positives=positives)  # type: ignore[arg-type]
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    return results


@pytest.mark.distributed
def test_fewer_texts_than_images_can_be_shared_on_several_ranks() -> None:
    parts = [_shared(rank) for rank in range(2)]
    image, text = (torch.cat([x[side] for x in parts]).double() for side in (0, 1))
    match = F.one_hot(torch.cat([parts[0][2], parts[1][2] + 4]), 10).bool()
    leaves = [x.requires_grad_() for x in (image, text, torch.tensor(2.0).double())]
    right = dense_targets(*leaves, match)
    d_image, d_text, d_scale = torch.autograd.grad(right, leaves)
    for rank, results in enumerate(run_ranks(_shared_step, 2)):
        own = d_image.split((9, 3))[rank], d_text.split((4, 6))[rank]
        for found in results:
            expected = [right.detach(), 2 * own[0], 2 * own[1], d_scale]
            check(found, expected, torch.float32, rank)


def test_positives_in_order_equal_the_default() -> None:
    case = PairCase("weights", [(31, 40)], 5)
    leaves = leaves_of(case)
    results: list[Any] = []
    for positives in (None, torch.arange(31)):
        case.call["positives"] = positives
        loss = loss_of(case, leaves)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_ids_may_be_strided() -> None:
    image, text = (torch.randn(20, 4) for _ in range(2))
    ids = torch.randint(0, 5, (20, 3))[:, 1]
    for loss_fn in (ContrastiveLoss(), ContrastiveLoss(duplicates="multi_positive")):
        assert torch.equal(
            loss_fn(image, text, 1.0, ids=ids), loss_fn(image, text, 1.0, ids=ids.clone())
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.sweep)], ids=str
)
@pytest.mark.parametrize("option", ["weights", "ids", "positives", "smoothing", "negatives"])
def test_memory_is_linear_in_the_batch(option: str, dtype: torch.dtype) -> None:
    b, width, k = 2048, 64, 4
    image, text = (F.normalize(torch.randn(b, width), dim=1).to(dtype) for _ in range(2))
    call = {
        "weights": {"weights": torch.rand(b)},
        "ids": {"ids": torch.randint(0, 500, (b,))},
        "positives": {"positives": torch.randint(0, b, (b, 3))},
        "negatives": {"negatives": torch.randn(b, k, width).to(dtype).requires_grad_()},
    }
    setup: dict[str, Any] = {"duplicates": "multi_positive"} if option == "ids" else {}
    setup |= {"label_smoothing": 0.1} if option == "smoothing" else {}
    loss_fn = ContrastiveLoss(workspace_bytes=2**20, **setup)
    with visible(), PeakBytes() as made:
        loss_fn(
            image.requires_grad_(), text.requires_grad_(), 20.0, **call.get(option, {})
        ).backward()
    # The documented memory, float64 vectors, and the gradient of `negatives` before and after the
    # cotangent is applied.
    linear = 13 + 2 * k * (option == "negatives")
    assert made.peak < 2**20 + linear * b * width * 4 + 40 * b * 8 < b * b * 4
