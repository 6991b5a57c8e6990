"""The chunked baseline against float64, at toy size with tiles that do not divide the batch."""

from functools import partial

import pytest
import torch

from benchmarks import _chunked
from benchmarks._chunked import chunked_loss
from benchmarks._inputs import Inputs
from tests.reference.contrastive import reference, relative_error

CPU = torch.device("cpu")
GRADIENT_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 4e-3,
    torch.float16: 6e-4,
}


def assert_equals_float64(inputs: Inputs, scale: float, tile_edge: int) -> None:
    before = inputs.image_bD.detach().clone(), inputs.text_bD.detach().clone()
    loss = inputs.run(partial(chunked_loss, tile_edge=tile_edge))
    expected = reference(inputs.image_bD.cpu(), inputs.text_bD.cpu(), scale)
    tolerance, gain = GRADIENT_TOLERANCE[inputs.image_bD.dtype], inputs.loss_scale
    assert relative_error(loss.cpu(), expected.loss) < min(tolerance, 5e-6)
    assert relative_error(inputs.image_bD.grad.cpu(), gain * expected.d_image) < tolerance
    assert relative_error(inputs.text_bD.grad.cpu(), gain * expected.d_text) < tolerance
    # The scale is held in fp32.
    error = relative_error(inputs.scale.grad.cpu(), gain * expected.d_scale)
    assert error < max(tolerance, 1e-6)
    for leaf, value in zip((inputs.image_bD, inputs.text_bD), before, strict=True):
        assert torch.equal(leaf.detach(), value)


@pytest.mark.parametrize("dtype", GRADIENT_TOLERANCE, ids=str)
@pytest.mark.parametrize("tile_edge", [32, 70, 8192])
def test_loss_and_gradients_equal_float64(dtype, tile_edge):
    assert_equals_float64(Inputs.make(70, 24, dtype, 50.0, CPU), 50.0, tile_edge)


def test_compiled_and_eager_are_one_function(monkeypatch):
    compiled = []

    def pretend(function):
        compiled.append(function.__name__)
        return function

    monkeypatch.setattr(_chunked, "_compiled", pretend)
    inputs = Inputs.make(40, 8, torch.float32, 10.0, CPU)
    eager = inputs.run(chunked_loss)
    assert torch.equal(inputs.run(partial(chunked_loss, compiled=True)), eager)
    assert compiled == ["_tile_lse", "_tile_softmax"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_loss_and_gradients_equal_float64_on_cuda(dtype):
    inputs = Inputs.make(1000, 64, dtype, 50.0, torch.device("cuda"))
    assert_equals_float64(inputs, 50.0, tile_edge=384)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler has advice about tf32
def test_compiled_equals_eager_on_cuda():
    inputs = Inputs.make(512, 64, torch.bfloat16, 50.0, torch.device("cuda"))
    eager, gradient = inputs.run(chunked_loss), inputs.image_bD.grad
    compiled = inputs.run(partial(chunked_loss, compiled=True))
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=0)
    assert relative_error(inputs.image_bD.grad, gradient) < 4e-3
