"""`ContrastiveLoss` on one process equals a dense float64 reference on random data."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import ContrastiveLoss
from lightning_mp.numerics import FLOAT_DTYPES
from tests.reference.contrastive import reference, relative_error

# Some scales and features here are meant to be extreme.
pytestmark = pytest.mark.filterwarnings("ignore:Passed .*(negative scale|Normalize features)")

# The reference gets the rounded inputs, so their rounding does not count. Gradients are rounded to
# the dtype of the features.
GRADIENT_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 4e-3,
}


def make_features(
    b: int, width: int, dtype: torch.dtype, closeness: float = 0.5, norm: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return random pairs; with `closeness=1`, texts equal their images."""
    image = torch.randn(b, width, dtype=torch.float64)
    text = closeness * image + (1 - closeness) * torch.randn(b, width, dtype=torch.float64)
    return tuple((norm * F.normalize(x, dim=-1)).to(dtype).requires_grad_() for x in (image, text))


def errors(
    image: Tensor, text: Tensor, scale: float, gain: float = 1.0, **kwargs: Any
) -> dict[str, float]:
    """Return relative errors of loss and gradients; `gain` is a loss scale for fp16."""
    scale_leaf = torch.tensor(
        scale, requires_grad=True, dtype=torch.promote_types(image.dtype, torch.float32)
    )
    loss = ContrastiveLoss(**kwargs)(image, text, scale_leaf)
    (loss * gain).backward()
    expected = reference(image, text, scale)
    # The scale's gradient is a sum whose terms may cancel; loss / scale is their size.
    size = max(expected.d_scale.abs().item(), expected.loss.item() / max(abs(scale), 1.0))
    d_scale_error = (scale_leaf.grad.double() - gain * expected.d_scale).abs().item()
    return {
        "loss": relative_error(loss.detach(), expected.loss),
        "d_image": relative_error(image.grad, gain * expected.d_image),
        "d_text": relative_error(text.grad, gain * expected.d_text),
        "d_scale": d_scale_error / max(gain * size, 1e-300),
    }


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("b", "width", "scale"),
    # At a larger scale, a few pairs may have converged by chance; other tests cover such pairs.
    [(1, 8, 2.0), (2, 8, 2.0), (65, 1, 2.0)]
    + [(b, width, scale) for b, width in ((193, 72), (257, 130)) for scale in (14.0, 100.0, -20.0)],
)
def test_loss_equals_float64_reference(
    b: int, width: int, scale: float, dtype: torch.dtype
) -> None:
    image, text = make_features(b, width, dtype, closeness=0.1)
    result = errors(image, text, scale, gain=2.0**10, workspace_bytes=2**20)
    assert result["loss"] < 1e-6
    assert result["d_image"] < GRADIENT_TOLERANCE[dtype], f"seed {torch.initial_seed()}"
    assert result["d_text"] < GRADIENT_TOLERANCE[dtype], f"seed {torch.initial_seed()}"
    assert result["d_scale"] < 1e-5, f"seed {torch.initial_seed()}"


@pytest.mark.slow
def test_loss_of_a_wide_batch_equals_float64_reference() -> None:
    image, text = make_features(1000, 1280, torch.float32, closeness=0.1)
    result = errors(image, text, 100.0)
    assert result.pop("loss") < 1e-6
    assert max(result.values()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_loss_with_logits_of_ten_thousand_is_accurate(dtype: torch.dtype) -> None:
    image, text = make_features(193, 72, dtype, closeness=0.1, norm=10.0)
    result = errors(image, text, 100.0)
    # fp32 logits near 1e4 are 1e-3 apart, so their exponentials have a relative error of 1e-3.
    assert result["loss"] < 1e-4
    assert max(result.values()) < 2e-2


@pytest.mark.parametrize(("scale", "loss_below"), [(30.0, 1e-6), (45.0, 1e-12), (60.0, 1e-16)])
def test_converged_pairs_keep_relative_precision(scale: float, loss_below: float) -> None:
    image, text = make_features(193, 256, torch.float32, closeness=1.0)
    assert reference(image, text, scale).loss < loss_below
    result = errors(image, text, scale)
    assert max(result.values()) < 1e-4


def test_converged_loss_keeps_relative_precision_with_tiny_gradients() -> None:
    image, text = make_features(193, 256, torch.float32, closeness=1.0)
    result = errors(image, text, 100.0)
    assert reference(image, text, 100.0).loss < 1e-24
    assert result["loss"] < 1e-4
    assert image.grad.abs().max() < 1e-24


def test_usual_formula_loses_the_digits_of_converged_pairs() -> None:
    """The usual formula returns rounding noise for pairs of the tests above."""
    image, text = (x.detach() for x in make_features(193, 256, torch.float32, closeness=1.0))
    expected = reference(image, text, 60.0)
    usual = F.cross_entropy(60.0 * image @ text.T, torch.arange(193))
    assert relative_error(usual, expected.loss) > 0.1
    assert relative_error(ContrastiveLoss()(image, text, 60.0), expected.loss) < 1e-4


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_loss_of_one_pair_is_zero_with_zero_gradients(dtype: torch.dtype) -> None:
    image, text = make_features(1, 16, dtype)
    scale = torch.tensor(50.0, requires_grad=True)
    loss = ContrastiveLoss()(image, text, scale)
    loss.backward()
    assert loss == 0
    assert torch.count_nonzero(image.grad) == torch.count_nonzero(text.grad) == scale.grad == 0


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_scale_of_zero_gets_its_gradient(zero: float) -> None:
    image, text = make_features(33, 16, torch.float32)
    result = errors(image, text, zero)
    assert result["loss"] < 1e-6
    assert result["d_scale"] < 1e-5
    assert torch.count_nonzero(image.grad) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("b", [1, 2, 70])
@pytest.mark.parametrize("where", ["image", "text", "scale", "bias"])
def test_non_finite_values_propagate(where: str, b: int, value: float) -> None:
    image, text = make_features(b, 8, torch.float32)
    inputs = {"image": image, "text": text, "scale": torch.tensor(5.0), "bias": torch.tensor(1.0)}
    inputs = {name: x.detach().clone() for name, x in inputs.items()}
    inputs[where].view(-1)[-1] = value
    for x in inputs.values():
        x.requires_grad_()
    loss = ContrastiveLoss(workspace_bytes=2**20)(*inputs.values())
    loss.backward()
    assert not loss.isfinite()
    assert not inputs["bias"].grad.isfinite()
    if where != "bias":
        assert not inputs["scale"].grad.isfinite()
        assert not inputs["image"].grad.isfinite().all()
        assert not inputs["text"].grad.isfinite().all()


def test_non_finite_cotangent_propagates() -> None:
    for value in (math.nan, math.inf):
        image, text = make_features(3, 8, torch.float32)
        (ContrastiveLoss()(image, text, 5.0) * value).backward()
        assert not image.grad.isfinite().any()


def test_negative_zeros_equal_positive_zeros() -> None:
    image, text = make_features(20, 8, torch.float32)
    with torch.no_grad():
        image[:, 2], text[:, 5] = -0.0, -0.0
    result = errors(image, text, 10.0)
    assert max(result.values()) < 1e-5


def test_bias_affects_neither_loss_nor_gradients() -> None:
    image, text = make_features(50, 8, torch.float32)
    bias = torch.tensor([-1e4], requires_grad=True)
    scale = torch.tensor(10.0)
    loss = ContrastiveLoss()(image, text, scale, bias)
    loss.backward()
    assert loss == ContrastiveLoss()(image, text, scale)
    assert torch.equal(bias.grad, torch.zeros(1))


def test_loss_is_bitwise_reproducible_and_independent_of_the_workspace_up_to_rounding() -> None:
    results = []
    features = make_features(700, 40, torch.float32, closeness=0.2)
    for workspace in (2**20, 2**20, 2**26):
        image, text = (x.detach().requires_grad_() for x in features)
        loss = ContrastiveLoss(workspace_bytes=workspace)(image, text, 20.0)
        loss.backward()
        results.append(torch.cat([loss.reshape(1), image.grad.flatten(), text.grad.flatten()]))
    assert torch.equal(results[0], results[1])
    assert relative_error(results[0], results[2]) < 1e-6


def test_loss_accepts_any_strides() -> None:
    image, text = make_features(90, 24, torch.float32)
    strided = (image.detach().T.contiguous().T, torch.stack([text.detach()] * 2, 2)[..., 1])
    loss = ContrastiveLoss()(*strided, 10.0)
    assert relative_error(loss, reference(image, text, 10.0).loss) < 1e-6


def test_loss_does_not_modify_its_inputs() -> None:
    image, text = make_features(30, 24, torch.float64)
    before = image.detach().clone()
    ContrastiveLoss()(image, text, torch.tensor(30.0)).backward()
    assert torch.equal(image, before)


@pytest.mark.parametrize("trained", ["image", "text", "scale", "bias", "nothing"])
def test_inputs_without_grad_get_no_gradient_and_affect_no_other(trained: str) -> None:
    image, text = make_features(40, 24, torch.float32)
    expected = reference(image, text, 10.0)
    leaves = {
        "image": image.detach(),
        "text": text.detach(),
        "scale": torch.tensor(10.0),
        "bias": torch.tensor(0.0),
    }
    leaves = {name: x.requires_grad_(name == trained) for name, x in leaves.items()}
    loss = ContrastiveLoss()(*leaves.values())
    assert relative_error(loss.detach(), expected.loss) < 1e-6
    if trained == "nothing":
        assert not loss.requires_grad
        return
    loss.backward()
    assert [name for name, x in leaves.items() if x.grad is not None] == [trained]
    if trained != "bias":
        value = getattr(expected, f"d_{trained}")
        assert relative_error(leaves[trained].grad, value) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_loss_ignores_autocast(dtype: torch.dtype) -> None:
    image, text = make_features(50, 24, torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        inside = ContrastiveLoss()(image, text, 20.0)
        inside.backward()
    gradient, image.grad = image.grad, None
    outside = ContrastiveLoss()(image, text, 20.0)
    outside.backward()
    assert torch.equal(inside, outside)
    assert torch.equal(gradient, image.grad)


def test_scale_may_be_a_number_or_a_tensor_of_one_value() -> None:
    image, text = make_features(9, 24, torch.float32)
    losses = [ContrastiveLoss()(image, text, s) for s in (7.0, 7, torch.tensor([7.0]))]
    assert losses[0] == losses[1] == losses[2]
    scale = torch.tensor([[7.0]], requires_grad=True)
    ContrastiveLoss()(image, text, scale).backward()
    assert scale.grad.shape == (1, 1)


def test_call_signature_equals_open_clip() -> None:
    image, text = make_features(9, 24, torch.float32)
    output = {"image_features": image, "text_features": text, "logit_scale": torch.tensor(10.0)}
    result = ContrastiveLoss()(**output, output_dict=True)
    assert result == {"contrastive_loss": ContrastiveLoss()(**output, logit_bias=None)}
    assert result["contrastive_loss"].shape == ()
    assert result["contrastive_loss"].dtype == torch.float32


@pytest.mark.slow
def test_loss_can_be_compiled_and_copied() -> None:
    image, text = make_features(9, 24, torch.float32)
    module = copy.deepcopy(ContrastiveLoss(workspace_bytes=2**21).eval())
    assert (module.workspace_bytes, module.training) == (2**21, False)
    step = torch.compile(lambda i, t: module(F.normalize(i, dim=-1), t, 3.0), backend="eager")
    assert torch.equal(step(image, text), module(F.normalize(image, dim=-1), text, 3.0))


def _bad_inputs() -> dict[str, tuple[tuple[Any, ...], str]]:
    good = torch.randn(4, 3)
    return {
        "1-D": ((good[0], good[0], 1.0), r"shape \[3\].*must be of shape \(batch, width\)"),
        "3-D": ((good[None], good[None], 1.0), r"shape \[1, 4, 3\]"),
        "list": (([1.0], good, 1.0), "of type list"),
        "rows": ((good, good[:2], 1.0), r"\[4, 3\] and `text_features` of shape \[2, 3\]"),
        "width": ((good, good[:, :2], 1.0), r"Both must have one width\. Project both"),
        "devices": ((good, good.to("meta"), 1.0), "on one device"),
        "integers": ((good.int(), good.int(), 1.0), "dtype torch.int32"),
        "empty": ((good[:0], good[:0], 1.0), "empty batch"),
        "no width": ((good[:, :0], good[:, :0], 1.0), r"shape \[4, 0\]"),
        "scale vector": ((good, good, torch.ones(4)), r"`logit_scale` of .*shape \[4\]"),
        "scale string": ((good, good, "1"), "`logit_scale` of type str"),
        "scale integer": ((good, good, torch.tensor(1)), "dtype torch.int64"),
        "no scale": ((good, good, None), "type NoneType"),
        "bias vector": ((good, good, 1.0, torch.ones(2)), "`logit_bias`"),
    }


@pytest.mark.parametrize("case", _bad_inputs())
def test_error_for_invalid_input_lists_accepted_values(case: str) -> None:
    arguments, message = _bad_inputs()[case]
    with pytest.raises(ValueError, match=message):
        ContrastiveLoss()(*arguments)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"backend": "cuda"}, "backend='cuda'"), ({"workspace_bytes": 100}, "workspace_bytes=100")],
)
def test_error_for_invalid_argument_names_it(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContrastiveLoss(**kwargs)
