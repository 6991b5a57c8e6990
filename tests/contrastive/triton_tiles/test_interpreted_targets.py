"""Pair options on Triton tiles, in Triton's interpreter."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_mp import ContrastiveLoss
from tests.contrastive.pair_cases import CASES, PairCase, check, loss_and_gradients
from tests.contrastive.test_ids import LOSSES, dense, few_ids
from tests.contrastive.test_targets import check_copies
from tests.reference.contrastive import relative_error

pytestmark = pytest.mark.interpreted


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _each_once() -> list[Any]:
    """Return every case in one dtype, dtypes in turn; other combinations are marked `sweep`."""
    return [
        pytest.param(name, dtype, marks=[pytest.mark.sweep] * (number % 3 != place))
        for number, name in enumerate(CASES)
        for place, dtype in enumerate(DTYPES)
    ]


@pytest.mark.parametrize(("name", "dtype"), _each_once(), ids=str)
def test_loss_equals_dense_targets(name: str, dtype: torch.dtype) -> None:
    case = PairCase(name, [(75, 91)], 0)
    loss_fn = ContrastiveLoss(backend="triton", tile_dtype="fp32", **case.setup)
    check(loss_and_gradients(case, loss_fn, dtype, 20.0), case.expected(dtype, 20.0, "both"), dtype)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pairs_of_equal_ids_are_masked(name: str, dtype: torch.dtype) -> None:
    b = 150
    features = [F.normalize(torch.randn(b, 24), dim=1).to(dtype) for _ in range(2)]
    # At this scale, the logits of unit features exceed the range of one reference.
    inputs = [x.requires_grad_() for x in (*features, torch.tensor(150.0), torch.tensor(-5.0))]
    ids = few_ids(b, 0)
    loss = LOSSES[name](backend="triton", tile_dtype="fp32")(*inputs, ids=ids)
    results = [loss.detach(), *torch.autograd.grad(loss, inputs[:2])]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    right = dense(name, *doubles, ids)
    expected = [right.detach(), *torch.autograd.grad(right, doubles[:2])]
    for value, other in zip(results, expected, strict=True):
        # Logits near 150 are rounded to multiples of 1.5e-5.
        bound = 4e-5 if value.dtype == torch.float32 else torch.finfo(dtype).eps
        assert relative_error(value, other) < bound


@pytest.mark.parametrize("guide", [None, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_copy_of_the_positive_without_margin_remains_a_negative(
    dtype: torch.dtype, guide: torch.dtype | None
) -> None:
    loss_fn = ContrastiveLoss(backend="triton", tile_dtype="fp32", false_negatives="absolute")
    check_copies(loss_fn, dtype, guide)


def test_batch_with_a_single_id_has_no_negatives() -> None:
    image = torch.randn(40, 16, requires_grad=True)
    loss_fn = ContrastiveLoss(backend="triton")
    loss = loss_fn(image, torch.randn(40, 16), 1.0, ids=torch.full((40,), 2**40))
    loss.backward()
    assert loss == 0
    assert torch.count_nonzero(image.grad) == 0


@pytest.mark.parametrize(("b", "n"), [(70, 7), (5, 150)])
def test_small_batches_equal_torch_tiles(b: int, n: int) -> None:
    features = [F.normalize(torch.randn(size, 24), dim=1).requires_grad_() for size in (b, n)]
    call = {"positives": torch.randint(-1, n, (b, 3)), "weights": torch.arange(b) % 3}
    results = []
    for backend in ("triton", "torch"):
        loss = ContrastiveLoss(backend=backend, tile_dtype="fp32")(*features, 20.0, **call)  # type: ignore[arg-type]
        results.append([loss.detach(), *torch.autograd.grad(loss, features)])
    assert all(relative_error(*pair) < 1e-5 for pair in zip(*results, strict=True))
