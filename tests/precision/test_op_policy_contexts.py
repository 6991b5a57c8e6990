"""`OpPolicy` with autocast, `torch.compile` and nested policies."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import CheckpointError, checkpoint

from lightning_mp.precision.op_policy import OpPolicy

FP32 = torch.float32


class Block(nn.Module):
    """Calls softmax directly and within a composite function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mha(*[self.norm(x)] * 3, need_weights=True)[0]
        return F.gelu(self.up(x)).softmax(-1)


def outcome(x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    return F.gelu(x).dtype, x.softmax(-1).dtype


def test_innermost_context_applies_and_its_end_restores_the_outer() -> None:
    x, half = torch.rand(2, 2).bfloat16(), torch.bfloat16
    plain, moved = OpPolicy(), OpPolicy(fp32_ops=("gelu",), half_ops=("softmax",))
    with plain.context("cpu", half):
        assert outcome(x) == (half, FP32)
        with moved.context("cpu", half):
            assert outcome(x) == (FP32, half)
            with OpPolicy().context("cpu", half):
                assert outcome(x) == (half, FP32)
            assert outcome(x) == (FP32, half)
        assert outcome(x) == (half, FP32)
    assert outcome(x) == (half, half)


def test_nested_equal_policy_adds_no_second_mode() -> None:
    with (
        OpPolicy().context("cpu", torch.float16),
        OpPolicy().context("cpu", torch.bfloat16),
    ):
        assert torch._C._len_torch_function_stack() == 1
        assert F.linear(torch.rand(2, 2), torch.rand(2, 2)).dtype == torch.bfloat16


def test_policy_does_not_apply_with_autocast_disabled() -> None:
    x = torch.rand(4, 4).half()
    with OpPolicy(fp32_ops=("gelu",)).context("cpu", torch.float16):
        with torch.autocast("cpu", enabled=False):
            assert x.softmax(-1).dtype == F.gelu(x).dtype == torch.float16
        assert x.softmax(-1).dtype == F.gelu(x).dtype == FP32


def test_exception_restores_the_previous_state() -> None:
    policy = OpPolicy(fp32_ops=("gelu",))
    with OpPolicy().context("cpu", torch.float16):
        with pytest.raises(ValueError, match="batch_size"), policy.context("cpu", torch.bfloat16):
            F.cross_entropy(torch.rand(2, 2), torch.rand(3))  # raises inside a moved op
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert outcome(torch.rand(2, 2).half()) == (torch.float16, FP32)
    assert not torch.is_autocast_enabled("cpu")
    assert torch._C._len_torch_function_stack() == 0


def test_composite_calls_functions_that_others_have_patched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend, seen = nn.MultiheadAttention(8, 2, batch_first=True), []
    with OpPolicy().context("cpu", torch.float16):
        attend(*[torch.randn(2, 3, 8)] * 3, need_weights=False)
    original = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **k: seen.append(1) or original(*a, **k)
    )
    with OpPolicy().context("cpu", torch.float16):
        attend(*[torch.randn(2, 3, 8)] * 3, need_weights=False)
    assert seen == [1]


@pytest.mark.parametrize("call", ["tensor", "autograd", "grad"])
def test_checkpointed_forward_is_recomputed_in_the_same_dtypes(call: str) -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 3, 8)
    weight = block.up.weight

    def backward(loss: Tensor) -> Tensor:
        if call == "grad":
            return torch.autograd.grad(loss, weight)[0]
        loss.backward() if call == "tensor" else torch.autograd.backward(loss)
        assert weight.grad is not None
        return weight.grad

    with OpPolicy().context("cpu", torch.float16):
        expected = torch.autograd.grad(block(x).sum(), weight)[0]
        losses = [checkpoint(block, x, use_reentrant=False).sum() for _ in range(2)]
    with pytest.raises(CheckpointError):
        backward(losses[0])
    weight.grad = None
    with OpPolicy().recompute_context("cpu"):
        assert F.gelu(x.half()).dtype == x.half().softmax(-1).dtype == torch.float16  # no autocast
        assert torch.equal(backward(losses[1]), expected)


# --- torch.compile -------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_module_follows_the_policy_and_its_changes() -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def dtype_in_graph(name: str) -> torch.dtype:
        inputs = [n.all_input_nodes[0] for n in graphs[-1].graph.nodes if name in str(n.target)]
        (dtype,) = {node.meta["val"].dtype for node in inputs}
        return dtype

    torch.manual_seed(0)
    half, block, x = torch.bfloat16, Block(), torch.randn(2, 3, 8)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=lambda graph, _: make_boxed_func(graph))
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    moved = OpPolicy(fp32_ops=("gelu",), half_ops=("softmax",))
    for policy, gelu, softmax, count in (
        (OpPolicy(), half, FP32, 1),
        (moved, FP32, half, 2),
        (OpPolicy(), half, FP32, 2),
    ):
        with policy.context("cpu", half):
            output, expected = compiled(x), block(x)
        assert len(graphs) == count  # one graph for each policy
        assert output.dtype == expected.dtype == softmax
        assert torch.equal(output, expected)
        output.sum().backward()
        if count == 1 or policy == moved:
            assert (dtype_in_graph("gelu"), dtype_in_graph("_softmax")) == (gelu, softmax)
            assert dtype_in_graph("native_layer_norm") == FP32
            assert dtype_in_graph("mm") == half
    assert block.up.weight.grad is not None


def test_function_of_a_user_may_have_the_name_of_a_decorator() -> None:
    def wrapped(x: Tensor) -> Tensor:
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(wrapped, (x,), x)
        return x + 1

    with OpPolicy().context("cpu", torch.float16):
        assert wrapped(torch.ones(1)) == 2


@pytest.mark.slow
def test_compiled_operators_get_the_dtypes_of_eager() -> None:
    torch._dynamo.reset()

    def function(x: Tensor) -> list[Tensor]:
        wide = [2**x, x**2, 1 / x, x.norm(), torch.norm(x), F.normalize(x), torch.ops.aten.exp(x)]
        given = [x.softmax(-1, dtype=torch.float16), x.unflatten(0, (1, -1)), x @ x.float()]
        return wide + given

    x = torch.rand(3, 3).half()
    with OpPolicy().context("cpu", torch.float16):
        outputs = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
        assert [each.dtype for each in outputs] == [each.dtype for each in function(x)]
    assert [each.dtype for each in outputs] == [FP32] * 7 + [torch.float16] * 3


@pytest.mark.slow
def test_compiled_moved_ops_get_the_dtypes_of_eager() -> None:
    torch._dynamo.reset()

    def function(x: Tensor) -> list[Tensor]:
        in_place = F.leaky_relu(x.clone(), 0.1, True)
        return [F.linear(x, x), F.leaky_relu(x, 0.1), x.softmax(-1), in_place]

    x = torch.rand(3, 3).half()
    with OpPolicy(fp32_ops=("linear", "leaky_relu")).context("cpu", torch.float16):
        outputs = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
        assert [each.dtype for each in outputs] == [each.dtype for each in function(x)]
    assert [each.dtype for each in outputs] == [FP32] * 3 + [torch.float16]


def test_half_dtype_fp32_raises() -> None:
    with (
        pytest.raises(ValueError, match="half_dtype=torch.float32.*Use no context for fp32"),
        OpPolicy().context("cpu", torch.float32),
    ):
        pass
