"""Modules that use their weights in unusual ways, and compiled modules, with half copies."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_mp.precision.op_policy import OpPolicy
from tests.precision.working_models import (
    HALVES,
    Seen,
    X,
    assert_close,
    bytes_held,
    gradients,
    network,
    run,
)

halves = pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)


# --- modules -------------------------------------------------------------------------------------


@halves
@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder_with_a_padding_mask_is_close_to_fp32(
    half: torch.dtype, training: bool, attached: Any
) -> None:
    """The fast path of inference uses weights without their modules and ignores autocast."""
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module = nn.Sequential(nn.Linear(6, 8), nn.TransformerEncoder(layer, 2))
    module.train(training)
    mask = torch.tensor([[False] * 3, [False, False, True]])
    x = torch.randn(2, 3, 6)
    expected = module[1](module[0](x), src_key_padding_mask=mask)
    attached(module, half, keep=[m for m in module.modules() if isinstance(m, nn.LayerNorm)])
    was_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the plugin does the same
    try:
        with torch.set_grad_enabled(training), OpPolicy().context("cpu", half):
            output = module[1](module[0](x), src_key_padding_mask=mask)
    finally:
        torch.backends.mha.set_fastpath_enabled(was_on)
    error = (output.float() - expected)[~mask].norm() / expected[~mask].norm()
    assert error < 8 * torch.finfo(half).eps


def test_recurrent_layers_compute_with_their_own_weights(attached: Any) -> None:
    torch.manual_seed(6)
    module = nn.LSTM(6, 5, batch_first=True)
    expected, _ = module(X[None])
    working = attached(module)
    assert module._flat_weights[0] is module.weight_ih_l0
    torch.testing.assert_close(module(X[None])[0], expected)
    assert bytes_held(working) == 0


def test_lazy_script_and_parametrized_modules_train(attached: Any) -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    module = nn.Sequential(
        nn.LazyLinear(4),
        torch.jit.script(Scripted()),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    )
    attached(module)
    assert len(gradients(module, X)) == 6
    assert all(g.norm() > 0 for g in gradients(module, X))
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_functional_calls_compute_with_the_given_weights(attached: Any) -> None:
    layer = Seen(6, 2)
    attached(layer)
    other = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
    with OpPolicy().context("cpu", torch.float16):
        output = torch.func.functional_call(layer, other, X)
    assert layer.seen == torch.float32
    assert (output == 0).all()


def test_second_derivatives_pass_through_copies(attached: Any) -> None:
    """A gradient penalty needs second derivatives."""
    module = network()
    plain = copy.deepcopy(module)
    attached(module, keep=[module[2]])
    found = []
    for each, context in (
        (module, OpPolicy().context("cpu", torch.float16)),
        (plain, nullcontext()),
    ):
        x = X.clone().requires_grad_()
        with context:
            (slope,) = torch.autograd.grad(each(x).float().sum(), x, create_graph=True)
        slope.float().square().sum().backward()
        found.append([p.grad for p in each.parameters() if p.grad is not None])
    assert_close(*found, torch.float16)


# --- compiled modules ----------------------------------------------------------------------------


class _Whole(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for each in self:
            x = each(x)
        return x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Dynamo:UserWarning")
@pytest.mark.parametrize("way", ["whole", "blocks", "wrapped", "function"])
def test_compiled_module_is_one_graph_and_learns(way: str, attached: Any) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    module: Any = network()
    if way == "whole":  # torch compiles members of an nn.Sequential separately
        module = _Whole(*module)
        module.compile(backend="aot_eager")
    elif way == "wrapped":
        module[0] = torch.compile(nn.Sequential(module[0], nn.Tanh()), backend="aot_eager")
    elif way == "blocks":
        module[0].compile(backend="aot_eager")
    norms = [each for each in module.modules() if isinstance(each, nn.LayerNorm)]
    working = attached(module, keep=norms)
    call = torch.compile(lambda x: module(x), backend="aot_eager") if way == "function" else module
    optimizer, losses = SGD(module.parameters(), lr=0.05), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = run(call, X).float().square().mean()
        loss.backward()
        optimizer.step()
        working.start_step()
        losses.append(loss.item())
    counters = torch._dynamo.utils.counters
    assert losses[-1] < 0.9 * losses[0]
    assert counters["stats"]["unique_graphs"] == 1
    assert sum(counters["graph_break"].values()) == 0
    assert all(
        isinstance(p, nn.Parameter) for m in module.modules() for p in m._parameters.values()
    )
    torch.compiler.reset()


class _Own(nn.Module):
    """Reads its own weights outside of layers."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.use = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6)), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


def _masked(x: Tensor, weight: Tensor) -> Tensor:
    y = x.clone()
    y[torch.arange(len(x)) % 2 == 0] = weight[0]
    return y


def _scattered(x: Tensor, weight: Tensor) -> Tensor:
    index = torch.arange(6)
    y = x.clone().index_copy_(0, index, weight).index_add_(0, index, weight)
    y = y.scatter_add_(0, index.expand(6, 6), weight).scatter_(0, index.expand(1, 6), weight[:1])
    return y.masked_scatter_(y > 0.5, weight).lerp_(weight[0], 0.5)


def _in_fp32(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = x.float() @ weight.mT
        return torch.cdist(nn.functional.linear(y, weight), weight)


# Under `16-mixed` these weights are fp32, like the tensors beside them.
USES = {"setitem": _masked, "in-place writes": _scattered, "autocast disabled": _in_fp32}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@halves
def test_own_weights_are_used_beside_fp32_tensors(use: Any, half: Any, attached: Any) -> None:
    module, plain = _Own(use), _Own(use)
    attached(module, half)
    found = gradients(module, X, half=half)
    plain(X).square().mean().backward()
    assert_close(found, [plain.weight.grad], half)


@halves
def test_embedding_bag_has_weights_per_sample(half: Any, attached: Any) -> None:
    module = nn.EmbeddingBag(4, 6, mode="sum")
    plain = copy.deepcopy(module)
    attached(module, half)
    ids, factors = torch.arange(8).view(2, 4) % 4, torch.linspace(0, 1, 8).view(2, 4)
    assert torch.equal(run(module, ids, None, factors, half=half), plain(ids, None, factors))
