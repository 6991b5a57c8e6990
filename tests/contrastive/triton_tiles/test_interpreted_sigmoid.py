"""`SigmoidContrastiveLoss` on Triton tiles, in Triton's interpreter, against float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from lightning_mp import SigmoidContrastiveLoss
from lightning_mp.contrastive._tiles.tile_backend import Derivatives, Logits
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles
from tests.contrastive.test_sigmoid import expected, leaves, sizes_of_terms
from tests.contrastive.test_sigmoid_pairs import batch, dense
from tests.reference.contrastive import relative_error

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore:Passed .*negative scale")]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Sigmoids and gradients are each rounded by half a unit in the last place of the 16-bit dtype; for
# fp32 features, sigmoids are stored in two halves.
GRADIENT_TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("scale", "bias"), [(10.0, -10.0), (-100.0, 3.0)])
def test_loss_and_gradients_equal_float64(dtype: torch.dtype, scale: float, bias: float) -> None:
    b = 140
    inputs = leaves(b, 72, dtype, scale, bias)
    gain = float(b) if dtype == torch.float16 else 1.0
    loss = SigmoidContrastiveLoss(backend="triton")(*inputs)
    (loss * gain).backward()
    right = expected(inputs)
    # fp32 logits near 50 are rounded about three times by up to 4e-6; sums have fp32 terms.
    assert relative_error(loss.detach(), right[0]) < 1.5e-5
    for leaf, gradient in zip(inputs[:2], right[1:3], strict=True):
        assert leaf.grad.dtype == dtype
        assert relative_error(leaf.grad, gain * gradient) < GRADIENT_TOLERANCE[dtype]
    largest = sizes_of_terms(inputs)
    for name, leaf, gradient in zip(("scale", "bias"), inputs[2:], right[3:], strict=True):
        bound = GRADIENT_TOLERANCE[dtype] if name == "scale" else 1.5e-5  # the bias is not rounded
        assert (leaf.grad - gain * gradient).abs() < bound * gain * largest[name], name


@pytest.mark.parametrize("texts", [90, 40])
def test_positives_of_some_images_equal_float64(texts: int) -> None:
    """Images without a text of their own have no positive on the diagonal."""
    whole = batch([(70, texts)])
    inputs = {name: whole[name].float().requires_grad_() for name in ("image", "text", "scale")}
    loss_fn = SigmoidContrastiveLoss(backend="triton")
    bias, positives = whole["bias"].float(), whole["positives"]
    loss = loss_fn(*inputs.values(), bias, positives=positives)
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    right = dense({**whole, **exact}, [(70, texts)], "positives")
    gradients = torch.autograd.grad(loss, list(inputs.values()))
    expected_gradients = torch.autograd.grad(right, list(exact.values()))
    for gradient, value in zip(gradients, expected_gradients, strict=True):
        assert relative_error(gradient, value) < GRADIENT_TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("workspace_bytes", "diagonal"), [(1, None), (1, -150), (2**15, 3), (2**15, -150)]
)
def test_sweep_in_blocks_equals_float64(workspace_bytes: int, diagonal: int | None) -> None:
    rows, columns = torch.randn(193, 24), torch.randn(257, 24)
    totals = torch.zeros(2, dtype=torch.float64)
    d_rows, d_columns = torch.ones(193, 24), torch.ones(257, 24)
    scale, bias = (torch.tensor(value, dtype=torch.float64) for value in (1.5, -2.0))
    own = slice(20, 160)
    swept = Logits(rows, columns, scale, diagonal, own)
    gradients = Derivatives(d_rows, d_columns)
    TritonTiles(workspace_bytes).sigmoid_sweep(swept, bias, totals, gradients)
    logits = 1.5 * rows.double() @ columns.double().T - 2
    if diagonal is not None:
        index = torch.arange(20, 160)
        index = index[(index + diagonal >= 0) & (index + diagonal < 257)]
        logits[index, index + diagonal] = -torch.inf
    weights = logits.sigmoid()
    right = torch.stack([F.softplus(logits).sum(), weights.sum()])
    assert relative_error(totals, right) < 2e-6
    assert relative_error(d_rows - 1, weights @ columns.double()) < 2e-5
    assert relative_error(d_columns - 1, weights.T @ rows.double()) < 2e-5


def test_converged_pairs_keep_relative_precision() -> None:
    own = torch.eye(40) * math.sqrt(0.6)
    noise = [0.1 * F.normalize(torch.randn(40, 16), dim=1) for _ in range(2)]
    inputs = [torch.cat([x, own], 1).requires_grad_() for x in noise]
    inputs += [torch.tensor(100.0, requires_grad=True), torch.tensor(-30.0, requires_grad=True)]
    loss = SigmoidContrastiveLoss(backend="triton")(*inputs)
    found = [loss.detach(), *torch.autograd.grad(loss, inputs)]
    assert loss < 1e-11
    for value, right in zip(found, expected(inputs), strict=True):
        assert relative_error(value, right) < 3e-5


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_values_propagate(value: float) -> None:
    image, text, scale, bias = leaves(20, 8, torch.float32, 10.0, -10.0)
    with torch.no_grad():
        image[3, 2] = value
    loss_fn = SigmoidContrastiveLoss(backend="triton")
    assert not loss_fn(image, text, scale, bias).isfinite()
