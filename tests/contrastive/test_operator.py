"""Custom operators of the loss under compilers and autocast, and the choice of a backend."""

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp import ContrastiveLoss, SigmoidContrastiveLoss
from lightning_mp.contrastive import _operator

# Some scales and features here are meant to be extreme.
pytestmark = pytest.mark.filterwarnings("ignore:Passed .*(negative scale|Normalize features)")

CPU = torch.device("cpu")


def leaves(b: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    image, text = (F.normalize(torch.randn(b, width), dim=1).to(dtype) for _ in range(2))
    return [x.requires_grad_() for x in (image, text, torch.tensor(20.0), torch.tensor(-1.0))]


TRAINED = ("image text scale bias", "text scale", "image", "")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# Each combination of trained inputs, with and without a bias, in one dtype; `make sweep` runs the
# other dtypes.
COMBINATIONS = [
    pytest.param(
        DTYPES[(turn + index + has_bias) % 3],
        trained,
        has_bias,
        marks=[pytest.mark.sweep] * (turn > 0),
    )
    for turn in range(3)
    for index, trained in enumerate(TRAINED)
    for has_bias in (True, False)
]


def opcheck(compute: Callable[[], Any], what: str) -> None:
    """Run opcheck on the operator of a loss and on its backward operator."""
    with mock.patch.object(_operator, what, wraps=getattr(_operator, what)) as operator:
        loss = compute()
    (inputs,) = operator.call_args_list
    with warnings.catch_warnings():
        # opcheck itself uses deprecated parts of torch, and autograd of outputs without a gradient.
        warnings.simplefilter("ignore")
        torch.library.opcheck(getattr(_operator, what), inputs.args)
    if not loss.requires_grad:
        return
    with mock.patch.object(_operator, "finish", wraps=_operator.finish) as finish:
        loss.backward()
    detached = [x.detach() if isinstance(x, Tensor) else x for x in finish.call_args.args]
    torch.library.opcheck(_operator.finish, detached)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "trained", "has_bias"), COMBINATIONS)
@pytest.mark.parametrize("loss_class", [ContrastiveLoss, SigmoidContrastiveLoss])
def test_operators_pass_opcheck(
    loss_class: type[ContrastiveLoss], dtype: torch.dtype, trained: str, has_bias: bool
) -> None:
    image, text, scale, bias = leaves(9, 16, dtype)
    for name, leaf in {"image": image, "text": text, "scale": scale, "bias": bias}.items():
        leaf.requires_grad_(name in trained.split())
    inputs = (image, text, scale, bias if has_bias else None)
    opcheck(lambda: loss_class()(*inputs), "contrastive_loss")


@pytest.mark.slow
@pytest.mark.parametrize("loss_class", [ContrastiveLoss, SigmoidContrastiveLoss])
def test_compiled_loss_has_no_graph_break_and_equals_eager(loss_class: type) -> None:
    loss_fn = loss_class()

    def step(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return 3 * loss_fn(F.normalize(image, dim=1), F.normalize(text, dim=1), scale.exp(), bias)

    torch._dynamo.utils.counters.clear()  # counts of other tests in this process
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for b in (5, 12, 33):  # another batch size must not cause a recompilation
        image, text, _, bias = leaves(b, 24)
        inputs = (image, text, torch.tensor(2.0, requires_grad=True), bias)
        results = []
        for function in (step, compiled):
            loss = function(*inputs)
            results.append([loss.detach(), *torch.autograd.grad(loss, inputs)])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert torch._dynamo.utils.counters["graph_break"] == {}


def test_compiled_loss_refuses_triton_tiles_on_a_cpu_when_it_runs() -> None:
    image, text, *_ = leaves(7, 24)
    image, text = image.detach().double(), text.detach().double()
    compiled = torch.compile(ContrastiveLoss(backend="triton"), backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match="Passed `backend='triton'`"):
        compiled(image, text, 7.0)


@pytest.mark.sweep
def test_compiled_loss_accepts_the_arguments_of_eager() -> None:
    image, text, *_ = leaves(7, 24)
    compiled = torch.compile(ContrastiveLoss(), backend="aot_eager", fullgraph=True)
    eager = ContrastiveLoss()
    assert compiled(image, text, 7.0) == eager(image, text, 7.0)
    assert compiled(image, text, 7.0, 2.0, True) == eager(image, text, 7.0, output_dict=True)
    with pytest.raises(ValueError, match="one width"):
        torch.compile(ContrastiveLoss(), backend="aot_eager")(image, text.detach()[:, :3], 7.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compiled_loss_ignores_autocast(dtype: torch.dtype) -> None:
    image, text, scale, _ = leaves(50, 24)
    loss_fn = ContrastiveLoss()
    compiled = torch.compile(loss_fn, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(loss_fn(image, text, scale), (image, text, scale))
    with torch.autocast("cpu", dtype=dtype):
        inside = torch.autograd.grad(compiled(image, text, scale), (image, text, scale))
    assert all(torch.equal(*pair) for pair in zip(inside, expected, strict=True))


@pytest.mark.parametrize("make_context", [lambda: torch.device("meta"), FakeTensorMode])
def test_flops_are_counted_without_values(make_context: Callable[[], Any]) -> None:
    with make_context(), FlopCounterMode(display=False) as counter:
        # As in Lightning's `measure_flops`.
        image, text = (torch.ones(9, 16, requires_grad=True) for _ in range(2))
        ContrastiveLoss()(image, text, torch.ones(())).backward()
    assert image.grad.shape == image.shape
    assert counter.get_total_flops() == 3 * 2 * 9 * 9 * 16


def test_auto_selects_torch_tiles_on_a_cpu() -> None:
    # Smaller tiles than those of the default workspace sum in another order.
    for dtype in (torch.float32, torch.float64):
        image, text, scale, _ = leaves(700, 24, dtype)
        auto, explicit, default = (
            torch.autograd.grad(
                ContrastiveLoss(backend=backend, workspace_bytes=size)(image, text, scale), text
            )[0]
            for backend, size in (("auto", 2**20), ("torch", 2**20), ("torch", None))
        )
        assert torch.equal(auto, explicit)
        assert not torch.equal(auto, default)


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        (torch.float32, "the device is not a CUDA device"),
        (torch.float64, "tensor cores would round"),
    ],
)
def test_error_for_triton_on_a_cpu_lists_supported_devices(dtype: torch.dtype, reason: str) -> None:
    image, text, *_ = leaves(4, 8, dtype)
    with pytest.raises(ValueError, match=reason) as caught:
        ContrastiveLoss(backend="triton")(image, text, 5.0)
    assert "compute capability 8.0 or higher" in str(caught.value)
    assert "Leave `backend` out" in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"backend": "cuda"}, r"backend='cuda'.*'auto', 'triton', 'torch'"),
        ({"tile_dtype": "fp8"}, r"tile_dtype='fp8'.*'tf32', 'fp32'"),
        ({"workspace_bytes": 2**20 - 1}, r"workspace_bytes=1048575.*at least 2\*\*20.*Pass bytes"),
        ({"workspace_bytes": "64 MiB"}, "workspace_bytes='64 MiB'.*an integer"),
    ],
)
@pytest.mark.parametrize("loss_class", [ContrastiveLoss, SigmoidContrastiveLoss])
def test_error_for_unknown_option_lists_known_values(
    loss_class: type, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"`{loss_class.__name__}\({message}"):
        loss_class(**kwargs)
