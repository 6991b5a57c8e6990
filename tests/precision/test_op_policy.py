"""`OpPolicy` chooses the dtype of each operation."""

import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_mp.precision._choice.op_tables import autocast_agrees
from lightning_mp.precision.op_policy import OpPolicy

HALVES = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


FP32 = torch.float32


def dtypes(values: object) -> list[torch.dtype]:
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [leaf.dtype for leaf in leaves if leaf.is_floating_point()]


class Recorder(TorchDispatchMode):
    """Records each kernel call: name, dtypes of inputs, dtypes of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[torch.dtype], list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.calls.append((func.overloadpacket.__name__, dtypes((args, kwargs)), dtypes(output)))
        return output

    def dtype_of(self, name: str) -> torch.dtype:
        (dtype,) = {each for called, inputs, _ in self.calls if called == name for each in inputs}
        return dtype


@functools.cache  # the search for similar names is slow
def class_of(name: str, policy: OpPolicy) -> str:
    try:
        return policy.class_of(f"aten::{name}")
    except ValueError:  # an internal op, such as `_unsafe_view`
        return "given"


def check_record(calls: list[Any], policy: OpPolicy, half: torch.dtype) -> None:
    assert calls
    for name, inputs, outputs in calls:
        op_class = class_of(name, policy)
        expected = {"half": half, "fp32": FP32, "norm": FP32}.get(op_class)
        if name == "_to_copy":
            assert {*inputs, *outputs} <= {half, FP32}
        elif name == "native_batch_norm":  # accumulates in fp32
            assert inputs == [half] + [FP32] * 4
            assert outputs[0] == half
        elif expected is not None:
            assert set(inputs) == {expected}, (name, inputs)
            assert outputs[0] == expected, (name, outputs)
        elif inputs and outputs:
            widest = FP32 if FP32 in inputs else half
            assert set(outputs) == {widest}, (name, inputs, outputs)


class Block(nn.Module):
    def __init__(self, attention: str = "explicit") -> None:
        super().__init__()
        self.attention = attention
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 5)

    def attend(self, x: Tensor) -> Tensor:
        if self.attention in ("weights", "no_weights"):
            return self.mha(x, x, x, need_weights=self.attention == "weights")[0]
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.attention == "sdpa":
            one_head = (x.unsqueeze(1) for x in (q, k, v))
            return self.proj(F.scaled_dot_product_attention(*one_head).squeeze(1))
        weights = (q @ k.transpose(1, 2) / math.sqrt(8)).softmax(-1)
        return self.proj(weights @ v)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attend(self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        logits = self.head(x.mean(1))
        return F.cross_entropy(logits, torch.tensor([0, 1])), F.softmax(logits, dim=-1)

    def manually(self, x: Tensor, half: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute `forward` with explicit casts."""

        def linear(layer: nn.Linear, x: Tensor) -> Tensor:
            return F.linear(x.to(half), layer.weight.to(half), layer.bias.to(half))

        def norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
            return F.layer_norm(x.float(), (8,), layer.weight, layer.bias).to(x.dtype)

        q, k, v = linear(self.qkv, norm(self.norm1, x)).chunk(3, dim=-1)
        weights = (q @ k.transpose(1, 2) / math.sqrt(8)).float().softmax(-1)
        x = x + linear(self.proj, weights.to(half) @ v)
        hidden = F.gelu(linear(self.up, norm(self.norm2, x)))
        x = x + linear(self.down, hidden)
        logits = linear(self.head, x.mean(1)).float()
        return F.cross_entropy(logits, torch.tensor([0, 1])), F.softmax(logits, dim=-1)


def make_block(attention: str, weights: str, half: torch.dtype) -> tuple[Block, Tensor]:
    """Return a block and inputs; `weights="half"` is O2, with half weights and fp32 norms."""
    torch.manual_seed(0)
    block, x = Block(attention), torch.randn(2, 3, 8)
    if weights == "half":
        block.to(half)
        block.norm1.float(), block.norm2.float()
        x = x.to(half)
    return block, x


@pytest.mark.parametrize("attention", ["explicit", "sdpa", "weights", "no_weights"])
@pytest.mark.parametrize("weights", ["full", "half"])
@HALVES
def test_transformer_runs_every_op_in_the_dtype_of_its_class(
    half: torch.dtype, weights: str, attention: str
) -> None:
    block, x = make_block(attention, weights, half)
    with OpPolicy().context("cpu", half), Recorder() as record:
        block(x)
    check_record(record.calls, OpPolicy(), half)
    names = [name for name, _, _ in record.calls]
    assert names.count("native_layer_norm") == 2
    assert {"addmm", "gelu", "_softmax", "_log_softmax", "nll_loss_forward"} <= set(names)
    adds = [outputs[0] for name, inputs, outputs in record.calls if name == "add" and inputs]
    assert adds[-1] == (half if weights == "half" else FP32)  # the residual stream


@pytest.mark.parametrize(
    ("field", "op", "kernel"),
    [
        ("fp32_ops", "torch.nn.functional.gelu", "gelu"),
        ("fp32_ops", "linear", "addmm"),
        ("fp32_ops", "aten::bmm", "bmm"),
        ("half_ops", "torch.Tensor.softmax", "_softmax"),
        ("half_ops", "layer_norm", "native_layer_norm"),
        ("half_ops", "cross_entropy", "nll_loss_forward"),
    ],
)
@HALVES
def test_only_the_moved_op_changes_its_dtype(
    half: torch.dtype, field: str, op: str, kernel: str
) -> None:
    policy = OpPolicy(**{field: (op,)})
    block, x = make_block("weights", "full", half)
    records = []
    for each in (OpPolicy(), policy):
        with each.context("cpu", half), Recorder() as record:
            block(x)
        records.append(record)
    before, after = (FP32, half) if field == "half_ops" else (half, FP32)
    assert records[0].dtype_of(kernel) == before
    assert records[1].dtype_of(kernel) == after
    # The ops that `linear` and `cross_entropy` consist of move with them.
    inside = {"linear": ["addmm", "mm"], "cross_entropy": ["_log_softmax"]}.get(op, [])
    others = [call for call in records[1].calls if call[0] not in (kernel, *inside)]
    check_record(others, OpPolicy(), half)


@HALVES
def test_values_and_gradients_equal_those_of_explicit_casts(half: torch.dtype) -> None:
    block, x = make_block("explicit", "full", half)
    block.mha.requires_grad_(False)
    with OpPolicy().context("cpu", half):
        loss, probabilities = block(x)
    expected_loss, expected = block.manually(x, half)
    assert torch.equal(probabilities, expected)
    assert torch.equal(loss, expected_loss)
    trained = [p for p in block.parameters() if p.requires_grad]
    expected_grads = torch.autograd.grad(expected_loss, trained)
    loss.backward()
    for parameter, grad in zip(trained, expected_grads, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype == FP32
        assert parameter.grad.abs().sum() > 0
        assert torch.allclose(parameter.grad, grad, rtol=1e-2, atol=1e-4)


@HALVES
def test_conv_net_keeps_batch_norm_statistics_in_fp32(half: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten())
    by_hand, x = copy.deepcopy(net), torch.randn(2, 3, 5, 5)
    with OpPolicy().context("cpu", half), Recorder() as record:
        output = net(x)
        loss = output.pow(2).sum()
    check_record(record.calls, OpPolicy(), half)
    conv, norm = by_hand[0], by_hand[1]
    hidden = F.conv2d(x.to(half), conv.weight.to(half), conv.bias.to(half))
    assert torch.equal(output, norm(hidden).relu().flatten(1))
    assert output.dtype == half
    assert torch.equal(net[1].running_var, norm.running_var)
    assert net[1].running_var.dtype == FP32
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == FP32 for p in net.parameters())


@pytest.mark.parametrize("field", ["half_ops", "fp32_ops"])
def test_moved_batch_norm_still_updates_its_statistics(field: str) -> None:
    norm = nn.BatchNorm1d(4)
    with OpPolicy(**{field: ("batch_norm",)}).context("cpu", torch.bfloat16):
        output = norm(torch.randn(8, 4) + 3)
        by_keyword = F.batch_norm(input=torch.randn(8, 4), running_mean=None, running_var=None,
                                  training=True)  # fmt: skip
    assert output.dtype == by_keyword.dtype == (FP32 if field == "fp32_ops" else torch.bfloat16)
    assert norm.running_mean.mean() > 0.1


def test_sum_that_overflows_under_autocast_is_finite() -> None:
    ones = torch.ones(100_000, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.float16):
        assert ones.sum().isinf()
    with OpPolicy().context("cpu", torch.float16):
        assert ones.sum() == 100_000


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (OpPolicy(), torch.float16),
        (OpPolicy(norm_output="fp32"), FP32),
        (OpPolicy(fp32_ops=("layer_norm",)), FP32),
        (OpPolicy(half_ops=("layer_norm",), norm_output="fp32"), torch.float16),
    ],
)
def test_norm_output_sets_the_dtype_of_a_post_norm_residual_stream(
    policy: OpPolicy, expected: torch.dtype
) -> None:
    norm, x = nn.LayerNorm(8), torch.randn(2, 8)
    with policy.context("cpu", torch.float16), Recorder() as record:
        assert norm(x.half()).dtype == expected
        wide = norm(x)
    inside = torch.float16 if policy.half_ops else FP32
    assert record.dtype_of("native_layer_norm") == inside
    assert wide.dtype == inside


@pytest.fixture
def cuda_on_paper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tensor]]:
    """Return a function that creates fake CUDA tensors, which follow CUDA's autocast."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    with FakeTensorMode():
        yield lambda *shape, dtype=torch.float16: torch.rand(*shape, device="cuda", dtype=dtype)


def test_policy_on_cuda_changes_norms_and_moved_ops_only(
    cuda_on_paper: Callable[..., Tensor],
) -> None:
    x = cuda_on_paper(2, 2)
    with OpPolicy(fp32_ops=("gelu",), half_ops=("softmax",)).context("cuda", torch.float16):
        assert F.layer_norm(x, (2,)).dtype == torch.float16
        assert F.gelu(x).dtype == FP32
        assert x.softmax(-1).dtype == torch.float16
        assert x.sum().dtype == F.linear(x, x).float().dtype == FP32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(x, x)
    with OpPolicy(fp32_ops=("binary_cross_entropy",)).context("cuda", torch.float16):
        assert F.binary_cross_entropy(x, x).dtype == FP32


def test_policy_equal_to_cuda_autocast_uses_no_function_mode(
    cuda_on_paper: Callable[..., Tensor],
) -> None:
    x = cuda_on_paper(2, 2)
    # The autocast of torch 2.10 has no rule for rms_norm.
    modes = 0 if autocast_agrees("cuda", "rms_norm") else 1
    with OpPolicy(norm_output="fp32").context("cuda", torch.float16):
        assert torch._C._len_torch_function_stack() == modes
        assert F.layer_norm(x, (2,)).dtype == F.rms_norm(x, (2,)).dtype == FP32
        assert F.linear(x, x).dtype == torch.float16


def test_calls_with_explicit_dtype_out_or_inplace_are_unchanged() -> None:
    policy = OpPolicy(fp32_ops=("relu", "silu", "sin"), half_ops=("cos", "log_softmax"))
    x = torch.rand(4).half()
    with policy.context("cpu", torch.float16):
        assert x.softmax(0, dtype=torch.float16).dtype == torch.float16
        assert F.softmax(x, 0, None, torch.float64).dtype == torch.float64
        out = torch.empty(4, dtype=torch.float16)
        assert torch.sin(x, out=out) is out
        assert x.sin().dtype == FP32
        for inplace in (lambda: F.silu(x, inplace=True), lambda: F.silu(x, True), x.relu_):
            assert inplace() is x
        assert F.silu(x).dtype == F.relu(x, False).dtype == FP32
        wide = torch.rand(4)
        by_position = torch.log_softmax(wide, 0, torch.float32)
        expected = wide.double().log_softmax(0).float()
        assert torch.allclose(by_position, expected, rtol=1e-6, atol=0)  # half: an error of 5e-4
        double = torch.rand(4).double()
        assert double.exp().dtype == double.cos().dtype == double.softmax(0).dtype == torch.float64


def test_weight_stepped_within_the_context_is_cast_again() -> None:
    """A GAN steps twice in one training step; the cache of autocast would hold old weights."""
    layer, x = nn.Linear(4, 4, bias=False), torch.rand(2, 4)
    with OpPolicy().context("cpu", torch.float16):
        layer(x)
        with torch.no_grad():
            layer.weight.mul_(2)
        after = layer(x)
    torch.testing.assert_close(after.float(), x @ layer.weight.T, rtol=2**-9, atol=2**-9)


def test_torch_function_of_a_tensor_subclass_is_called() -> None:
    class Answering(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return (
                "its own"
                if func is F.normalize
                else super().__torch_function__(func, types, args, kwargs)
            )

    with OpPolicy().context("cpu", torch.float16):
        assert F.normalize(torch.rand(2, 2).as_subclass(Answering)) == "its own"
