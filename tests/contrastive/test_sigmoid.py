"""The sigmoid loss equals open_clip's formula in float64, on one rank and on several."""

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp import SigmoidContrastiveLoss
from tests.contrastive.test_exchange import (
    BATCHES,
    EXCHANGES,
    TwoTowers,
    _pairs,
    _ranks_own,
    check_steps,
)
from tests.contrastive.test_torch_tiles import PeakBytes, _addmm_flops
from tests.contrastive.visible import visible
from tests.processes import run_ranks
from tests.reference.contrastive import dense_sigmoid_loss, relative_error, sigmoid_loss_of_logits

NAMES = ("image", "text", "scale", "bias")

# Some scales and features here are meant to be extreme.
pytestmark = pytest.mark.filterwarnings("ignore:Passed .*(negative scale|Normalize features)")


def leaves(b: int, width: int, dtype: torch.dtype, scale: float, bias: float) -> list[Tensor]:
    features = (F.normalize(torch.randn(b, width), dim=1).to(dtype) for _ in range(2))
    scalars = (torch.tensor(value, dtype=torch.float64) for value in (scale, bias))
    return [x.requires_grad_() for x in (*features, *scalars)]


def sizes_of_terms(inputs: list[Tensor]) -> dict[str, Tensor]:
    """Return the sums of the magnitudes of the terms of the gradients of scale and bias.

    The rounding error of an inner product is relative to the norms, even if its terms cancel.
    """
    image, text, scale, bias = (x.detach().double() for x in inputs)
    dots = image @ text.T
    logits = scale * dots + bias
    weights = logits.sigmoid()
    weights.diagonal().copy_(logits.diagonal().neg().sigmoid())  # `sigmoid - 1` rounds to 0
    norms = image.norm(dim=1, keepdim=True) * text.norm(dim=1)
    terms = {"scale": weights * norms, "bias": weights}
    return {name: term.abs().sum() / len(image) for name, term in terms.items()}


def expected(inputs: list[Tensor]) -> list[Tensor]:
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    loss = dense_sigmoid_loss(*doubles)
    return [loss.detach(), *torch.autograd.grad(loss, doubles)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("scale", "bias"), [(10.0, -10.0), (100.0, -20.0), (1e4, 5.0), (-3.0, 0.0)]
)
@pytest.mark.parametrize(
    ("b", "width", "workspace_bytes"), [(333, 48, 1), (65, 7, 2**25), (1, 3, 1)]
)
def test_sigmoid_loss_equals_open_clips_formula(
    b: int, width: int, workspace_bytes: int, scale: float, bias: float, dtype: torch.dtype
) -> None:
    inputs = leaves(b, width, dtype, scale, bias)
    loss_fn = SigmoidContrastiveLoss()
    loss_fn.workspace_bytes = workspace_bytes
    loss = loss_fn(*inputs)
    found = [loss.detach(), *torch.autograd.grad(loss, inputs)]
    # The rounding error of an fp32 logit is the relative error of its term. Gradients are also
    # rounded to the dtype of the features.
    accumulation = torch.promote_types(dtype, torch.float32)
    error = 4 * max(abs(scale) + abs(bias), 1.0) * torch.finfo(accumulation).eps
    underflow = max(abs(scale), 1.0) * b * torch.finfo(accumulation).tiny
    for name, value, right in zip(("loss", *NAMES), found, expected(inputs), strict=True):
        bound = error + (torch.finfo(dtype).eps if value.dtype == dtype else 0)
        largest = sizes_of_terms(inputs).get(name, right.norm())  # sums of both signs cancel
        assert (value - right).norm() <= bound * largest + underflow, name


def test_converged_pairs_keep_relative_precision() -> None:
    own = torch.eye(40) * math.sqrt(0.6)
    noise = [0.1 * F.normalize(torch.randn(40, 16), dim=1) for _ in range(2)]
    inputs = [torch.cat([x, own], 1).requires_grad_() for x in noise]
    inputs += [torch.tensor(100.0, requires_grad=True), torch.tensor(-30.0, requires_grad=True)]
    loss = SigmoidContrastiveLoss()(*inputs)
    found = [loss.detach(), *torch.autograd.grad(loss, inputs)]
    right = expected(inputs)
    assert right[0] < 1e-11
    # Logits of 30 are rounded about three times to multiples of 2e-6.
    assert all(relative_error(*pair) < 1e-5 for pair in zip(found, right, strict=True))


@pytest.mark.parametrize(
    ("trained", "units"),
    [("image text scale bias", 3), ("image", 2), ("text scale", 2), ("scale", 2), ("", 1)],
)
def test_sigmoid_loss_takes_one_sweep_and_one_product_per_tower(trained: str, units: int) -> None:
    b, width = 333, 48
    inputs = leaves(b, width, torch.float32, 10.0, -10.0)
    for name, leaf in zip(NAMES, inputs, strict=True):
        leaf.requires_grad_(name in trained.split())
    counted = {torch.ops.aten.addmm_: _addmm_flops}
    for opened in (visible(), contextlib.nullcontext()):
        with opened, FlopCounterMode(display=False, custom_mapping=counted) as counter:
            loss = SigmoidContrastiveLoss()(*inputs)
            if trained:
                loss.backward()
        assert counter.get_total_flops() == units * 2 * b * b * width
    assert [x.grad is not None for x in inputs] == [name in trained.split() for name in NAMES]


@pytest.mark.slow
def test_memory_is_the_workspace_plus_a_linear_part() -> None:
    b, width = 2048, 64
    image, text = (torch.randn(b, width, requires_grad=True) for _ in range(2))
    with visible(), PeakBytes() as made:
        SigmoidContrastiveLoss(workspace_bytes=2**20)(image, text, 1.0, -5.0).backward()
    # Gradients before and after the cotangent is applied, a float64 copy of a chunk, and vectors.
    assert made.peak < 2**20 + 8 * b * width * 4 + 24 * b * 8 < b * b * 4


def test_missing_bias_is_zero() -> None:
    image, text, scale, _ = leaves(20, 8, torch.float32, 10.0, 0.0)
    loss_fn = SigmoidContrastiveLoss()
    assert loss_fn(image, text, scale) == loss_fn(image, text, scale, 0.0)
    assert loss_fn(image, text, scale, output_dict=True)["contrastive_loss"].dtype == torch.float32


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_values_propagate(value: float) -> None:
    image, text, scale, bias = leaves(20, 8, torch.float32, 10.0, -10.0)
    with torch.no_grad():
        image[3, 2] = value
    assert not SigmoidContrastiveLoss()(image, text, scale, bias).isfinite()


@pytest.mark.parametrize("is_trained", [True, False])
def test_second_derivative_raises(is_trained: bool) -> None:
    """The loss also raises if the logit scale is not trained."""
    image, text, *scalars = leaves(5, 8, torch.float32, 10.0, -10.0)
    loss = SigmoidContrastiveLoss()(image, text, *(scalars if is_trained else (10.0, -10.0)))
    (gradient,) = torch.autograd.grad(loss, image, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative through"):
        (loss + gradient.square().sum()).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second derivative through"):
        torch.autograd.grad(loss + gradient.square().sum(), image)


def _step(rank: int, sizes: list[int], seed: int, options: dict[str, Any]) -> dict[str, Tensor]:
    model = nn.parallel.DistributedDataParallel(TwoTowers())
    image, text = (_ranks_own(x, sizes, rank) for x in _pairs(sum(sizes), seed))
    options = dict(options)
    workspace_bytes = options.pop("workspace_bytes", None)
    loss_fn = SigmoidContrastiveLoss(**options)
    loss_fn.workspace_bytes = workspace_bytes
    loss = loss_fn(*model(image, text))
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.module.named_parameters()}}


def _steps(rank: int, cases: list[list[int]], seed: int) -> list[dict[str, dict[str, Tensor]]]:
    return [
        {name: _step(rank, sizes, seed, options) for name, options in EXCHANGES.items()}
        for sizes in cases
    ]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
def test_sigmoid_loss_with_ddp_mean_equals_one_process(world_size: int) -> None:
    seed = torch.seed() % 2**31
    by_rank = run_ranks(_steps, world_size, BATCHES[world_size], seed)
    for case, sizes in enumerate(BATCHES[world_size]):
        check_steps(sigmoid_loss_of_logits, sizes, seed, [cases[case] for cases in by_rank])
