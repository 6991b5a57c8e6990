"""Mixed dtypes, numpy scales, copies, pickles and higher derivatives of the loss."""

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from lightning_mp import ContrastiveLoss
from tests.processes import run_ranks

# Some scales and features here are meant to be extreme.
pytestmark = pytest.mark.filterwarnings("ignore:Passed .*(negative scale|Normalize features)")


def features(*dtypes: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    parts = torch.nn.functional.normalize(torch.randn(2, 9, 8), dim=-1)
    return [x.to(dtype).requires_grad_() for x, dtype in zip(parts, dtypes, strict=True)]


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float64, torch.half)])
def test_features_of_two_dtypes_are_promoted(dtypes: Any) -> None:
    image, text = features(*dtypes)
    wide = torch.promote_types(*dtypes)
    twins = [x.detach().to(wide).requires_grad_() for x in (image, text)]
    loss, expected = ContrastiveLoss()(image, text, 5.0), ContrastiveLoss()(*twins, 5.0)
    assert loss.dtype == wide
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    for x, twin in zip((image, text), twins, strict=True):
        assert x.grad.dtype == x.dtype
        assert torch.equal(x.grad, twin.grad.to(x.dtype))


@pytest.mark.parametrize(
    "scale", [np.float32(5), np.float64(5), np.array(5.0), np.array([5.0]), np.int64(5), 5]
)
def test_numpy_numbers_are_accepted_as_scale(scale: Any) -> None:
    image, text = features(torch.float32, torch.float32)
    assert torch.equal(ContrastiveLoss()(image, text, scale), ContrastiveLoss()(image, text, 5.0))


class Scaled(ContrastiveLoss):
    """A subclass with its own parameter, attribute and `__init__`."""

    def __init__(self, start: float) -> None:
        super().__init__(backend="torch")
        self.log_scale, self.note = nn.Parameter(torch.tensor(start)), ["kept"]

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return super().forward(image, text, self.log_scale.exp())


def _note_call(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def _copies(loss: nn.Module) -> list[nn.Module]:
    return [copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))]


def test_copies_and_pickles_of_subclasses_keep_parameters_attributes_and_hooks() -> None:
    loss = Scaled(1.0).eval()
    loss.register_forward_hook(_note_call)
    image, text = features(torch.float32, torch.float32)
    for copied in _copies(loss):
        assert (copied.note, copied.training, copied.backend) == (["kept"], False, "torch")
        assert copied.note is not loss.note
        assert torch.equal(copied(image, text), loss(image, text))
        with torch.no_grad():
            copied.log_scale.zero_()
        assert loss.log_scale == 1


def _copy_with_group(rank: int) -> tuple[bool, str]:
    loss = nn.ModuleList([ContrastiveLoss(process_group=dist.new_group([0, 1]))])
    copied = copy.deepcopy(loss)
    try:
        pickle.dumps(loss)
    except TypeError as error:
        return copied[0].process_group is loss[0].process_group, str(error)
    return False, ""


@pytest.mark.distributed
def test_deepcopy_shares_the_process_group_and_pickle_raises() -> None:
    for shares, message in run_ranks(_copy_with_group, 2):
        assert shares
        assert "Set `loss.process_group = None` first" in message


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(f)(x),
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.vmap(f)(x[None]),
        lambda f, x: torch.func.hessian(f)(x),
    ],
)
def test_torch_func_transforms_raise(transform: Callable[..., Any]) -> None:
    image, text = (x.detach() for x in features(torch.float32, torch.float32))
    with pytest.raises(RuntimeError, match="`ContrastiveLoss` in forward-mode AD or inside a tran"):
        transform(lambda x: ContrastiveLoss()(x, text, 5.0), image)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_forward_mode_ad_raises(which: int) -> None:
    inputs = [*(x.detach() for x in features(torch.float32, torch.float32)), torch.tensor(5.0)]
    with forward_ad.dual_level():
        inputs[which] = forward_ad.make_dual(inputs[which], torch.ones_like(inputs[which]))
        with pytest.raises(RuntimeError, match="in forward-mode AD"):
            ContrastiveLoss()(*inputs)


def _second_derivative(rank: int = 0) -> tuple[float, str]:
    image, text = features(torch.float32, torch.float32)
    loss = ContrastiveLoss()(image, text, 5.0)
    (grad,) = torch.autograd.grad(loss, image, create_graph=True)
    (plain,) = torch.autograd.grad(ContrastiveLoss()(image, text, 5.0), image)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(loss + grad.square().sum(), image)
    try:
        grad.square().sum().backward()
    except RuntimeError as error:
        return (grad - plain).abs().max().item(), str(error)
    return 0.0, "no error"


def test_second_derivatives_raise_and_create_graph_gives_exact_first_ones() -> None:
    difference, message = _second_derivative()
    assert difference == 0
    assert "second derivative through a contrastive loss" in message


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_leaves_gradients_unchanged(use_reentrant: bool) -> None:
    image, text = (torch.randn(20, 8, requires_grad=True) for _ in range(2))
    (expected,) = torch.autograd.grad(ContrastiveLoss()(image, text, 1.0), image)
    checkpoint(ContrastiveLoss(), image, text, 1.0, use_reentrant=use_reentrant).backward()
    assert torch.equal(image.grad, expected)


@pytest.mark.distributed
def test_second_derivatives_raise_on_all_ranks() -> None:
    for difference, message in run_ranks(_second_derivative, 2):
        assert difference == 0
        assert "second derivative through a contrastive loss" in message


_INTERPRETED = """
import torch
from lightning_mp import ContrastiveLoss
torch.manual_seed(0)
image, text = torch.nn.functional.normalize(torch.randn(2, 32, 16), dim=-1).bfloat16()
values = [ContrastiveLoss(backend=b)(image, text, 5.0).item() for b in ("auto", "torch")]
assert values[0] == values[1], values
"""


@pytest.mark.sweep  # another interpreter imports torch
def test_auto_does_not_select_the_triton_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", _INTERPRETED], env=environment, check=True)
