"""`ContrastiveLoss` and its operator on Triton tiles, in Triton's interpreter."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from lightning_mp import ContrastiveLoss
from lightning_mp.contrastive._call.request import tiles_for
from lightning_mp.contrastive._tiles.backends import tiles_problem
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles
from tests.contrastive.test_operator import opcheck
from tests.reference.contrastive import reference, relative_error

# Some scales and features here are meant to be extreme.
pytestmark = [
    pytest.mark.interpreted(rows=None),
    pytest.mark.filterwarnings("ignore:Passed .*(negative scale|Normalize features)"),
]

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def leaves(b: int, width: int, dtype: torch.dtype, scale: float = 20.0) -> list[Tensor]:
    image, noise = (torch.randn(b, width) for _ in range(2))
    text = 0.4 * image + 0.6 * noise
    features = [normalize(x, dim=1).to(dtype).requires_grad_() for x in (image, text)]
    return [*features, torch.tensor(scale, requires_grad=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [100.0, -30.0])
def test_loss_and_gradients_equal_float64(dtype: torch.dtype, scale: float) -> None:
    b = 150
    inputs = leaves(b, 72, dtype, scale)
    gain = float(b) if dtype == torch.float16 else 1.0
    loss = ContrastiveLoss(backend="triton")(*inputs)
    (loss * gain).backward()
    expected = reference(*inputs[:2], scale)
    assert loss.dtype == torch.float32
    # fp32 logits near 100 are 7.6e-6 apart, and at scale 100 a few pairs dominate the loss.
    assert relative_error(loss.detach(), expected.loss) < 1.5e-5
    for leaf, gradient in zip(inputs[:2], (expected.d_image, expected.d_text), strict=True):
        assert leaf.grad.dtype == dtype
        assert relative_error(leaf.grad, gain * gradient) < GRADIENT_TOLERANCE[dtype]
    # The scale's gradient sums <I, dI> / scale, whose terms cancel: the bound is a sum of |I| |dI|.
    norms = inputs[0].detach().double().norm(dim=1) * expected.d_image.norm(dim=1) / abs(scale)
    error = (inputs[2].grad.double() - gain * expected.d_scale).abs()
    assert error / (gain * norms.sum()) < 2 * GRADIENT_TOLERANCE[dtype]


def test_column_major_features_get_gradients() -> None:
    inputs = leaves(37, 24, torch.bfloat16)
    columns = [x.detach().T.contiguous().T.requires_grad_() for x in inputs[:2]]
    expected = reference(*inputs[:2], 20.0)
    ContrastiveLoss(backend="triton")(*columns, inputs[2]).backward()
    for leaf, gradient in zip(columns, (expected.d_image, expected.d_text), strict=True):
        assert relative_error(leaf.grad, gradient) < GRADIENT_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.sweep) for d in DTYPES[1:])],
    ids=str,
)
def test_operator_passes_opcheck(dtype: torch.dtype) -> None:
    image, text, scale = leaves(9, 16, dtype)
    loss_fn = ContrastiveLoss(backend="triton")
    opcheck(lambda: loss_fn(image, text, scale, scale), "contrastive_loss")


def test_compiled_loss_has_no_graph_break_and_equals_eager() -> None:
    image, text, scale = leaves(40, 24, torch.bfloat16)
    loss_fn = ContrastiveLoss(backend="triton", tile_dtype="fp32")
    compiled = torch.compile(loss_fn, backend="aot_eager", fullgraph=True)
    results = [
        torch.autograd.grad(function(image, text, scale), (image, text, scale))
        for function in (loss_fn, compiled)
    ]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("trained", ["image", "text", "scale"])
def test_inputs_without_grad_get_no_gradient_and_affect_no_other(trained: str) -> None:
    inputs = leaves(40, 24, torch.float32, 10.0)
    expected = reference(*inputs[:2], 10.0)
    for name, leaf in zip(("image", "text", "scale"), inputs, strict=True):
        leaf.requires_grad_(name == trained)
    ContrastiveLoss(backend="triton")(*inputs).backward()
    for name, leaf in zip(("image", "text", "scale"), inputs, strict=True):
        assert (leaf.grad is not None) == (name == trained)
        if name == trained:
            assert relative_error(leaf.grad, getattr(expected, f"d_{name}")) < 1e-5


def test_autocast_changes_nothing() -> None:
    inputs = leaves(40, 24, torch.float32)
    loss_fn = ContrastiveLoss(backend="triton")
    expected = torch.autograd.grad(loss_fn(*inputs), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(loss_fn(*inputs), inputs)
    assert all(torch.equal(*pair) for pair in zip(inside, expected, strict=True))


def test_bias_has_no_effect_and_a_zero_gradient() -> None:
    image, text, scale = leaves(30, 24, torch.bfloat16)
    bias = torch.tensor(-1e4, requires_grad=True)
    loss = ContrastiveLoss(backend="triton")(image, text, scale, bias)
    loss.backward()
    assert loss == ContrastiveLoss(backend="triton")(image, text, scale)
    assert bias.grad == 0


def test_constructor_options_reach_the_tile_backend() -> None:
    tiles = tiles_for(CPU, torch.float32, "triton", "tf32", 2**22, True)
    assert tiles == TritonTiles(2**22, "tf32", True)
    assert tiles_problem(CPU, torch.float32) is None
    assert "float64" in (tiles_problem(CPU, torch.float64) or "")


@pytest.mark.parametrize("direction", ["both", "image_to_text", "text_to_image"])
def test_texts_without_an_image_are_negatives_in_one_direction(direction: str) -> None:
    image, text, scale = leaves(150, 24, torch.float32)
    image = image.detach()[:70].requires_grad_()
    loss = ContrastiveLoss(backend="triton", directions=direction)(image, text, scale)  # type: ignore[arg-type]
    found = [loss.detach(), *torch.autograd.grad(loss, (image, text))]
    doubles = [x.detach().double().requires_grad_() for x in (image, text)]
    scores = 20 * doubles[0] @ doubles[1].T
    target = torch.arange(70)
    terms = {
        "image_to_text": cross_entropy(scores, target),
        "text_to_image": cross_entropy(scores[:, :70].T, target),
    }
    right = terms.get(direction, sum(terms.values()) / 2)
    expected = [right.detach(), *torch.autograd.grad(right, doubles)]
    assert all(relative_error(*pair) < 2e-5 for pair in zip(found, expected, strict=True))
