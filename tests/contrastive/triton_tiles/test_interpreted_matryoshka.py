"""`MatryoshkaLoss` on Triton tiles, in Triton's interpreter, against the sum in float64."""

import pytest
import torch

from lightning_mp import ContrastiveLoss, MatryoshkaLoss
from tests.contrastive.test_candidates import data
from tests.contrastive.test_matryoshka import WEIGHTS, WIDTHS, dense
from tests.reference.contrastive import relative_error

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # Rounding prefixes changes logits of 20 by 20 eps, which is the relative error of the softmax.
    [(torch.float32, 4e-5), (torch.float16, 20 * torch.finfo(torch.float16).eps)],
    ids=str,
)
def test_loss_and_gradients_equal_float64(dtype: torch.dtype, tolerance: float) -> None:
    inputs = data(70, 90, 24, 0, dtype)
    loss_fn = MatryoshkaLoss(loss=ContrastiveLoss(backend="triton"), widths=WIDTHS, weights=WEIGHTS)
    loss = loss_fn(*inputs)
    found = [loss.detach(), *torch.autograd.grad(loss, inputs)]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    right = dense(*doubles, torch.arange(70))
    expected = [right.detach(), *torch.autograd.grad(right, doubles)]
    assert all(relative_error(*pair) < tolerance for pair in zip(found, expected, strict=True))
