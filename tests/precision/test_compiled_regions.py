"""`torch.compile` of several regions, and of regions inside regions, under BalancedAMP."""

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from lightning_mp import BalancedAMP
from tests.precision.models import Regression, fit, loader, relative
from tests.quiet import parameters_of

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that:UserWarning")
CLASSES = torch._dynamo.config.recompile_limit + 1


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Scale(nn.Module):
    """Owns its weight, so the plugin replaces its `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def of_many_classes(backend: Any) -> nn.Module:
    """Return a network of layers that are compiled one by one and share no code."""
    layers = []
    for index in range(CLASSES):
        own = types.FunctionType(Scale.forward.__code__.replace(co_name=f"of{index}"), globals())
        layers.append(type(f"Scale{index}", (Scale,), {"forward": own})())
    for layer in layers if backend is not None else ():
        layer.compile(backend=backend, fullgraph=True)
    return nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 1))


class Nested(nn.Module):
    """Is compiled around a layer that is compiled, too."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(8, 16), Scale(), nn.Linear(16, 1)
        self.scale.register_forward_hook(lambda module, args, output: output * 2)
        if backend is not None:
            self.scale.compile(backend=backend, fullgraph=True)
            self.up.compile(backend=backend, fullgraph=True)
            self.compile(backend=backend, fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.scale(self.up(x))))


@pytest.mark.parametrize("weights", ["half", "full"])
@pytest.mark.parametrize(("network", "graphs"), [(of_many_classes, CLASSES), (Nested, 1)])
def test_regions_compile_to_as_many_graphs_as_without_a_plugin(
    network: Any, graphs: int, weights: Any
) -> None:
    ends, counter = [], CompileCounterWithBackend("aot_eager")
    for backend in (None, counter):
        model = Regression(lambda b=backend: network(b))
        start = parameters_of(model)
        fit(model, BalancedAMP(weights=weights), loader(3))
        ends.append(model)
    assert counter.frame_count == graphs
    assert relative(ends[1], ends[0], start) < 2**-7


def test_compiled_backward_of_fp32_modules_has_the_bits_of_eager_mode() -> None:
    ends = []
    for backend in (None, "aot_eager"):
        model = Regression(lambda b=backend: Nested(b))
        fit(model, BalancedAMP(fp32_modules=["network.up", "network.down"]), loader(3))
        ends.append(parameters_of(model))
    assert torch.equal(*ends)


class Checkpointed(nn.Module):
    """Recomputes a softmax, which is an fp32 op, in the backward."""

    def __init__(self, compile_options: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)
        if compile_options is not None:
            self.compile(backend="aot_eager", **compile_options)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, self.up(x), use_reentrant=False)

    def attend(self, x: Tensor) -> Tensor:
        return self.down(torch.softmax(4 * x, dim=-1) * x)


def test_op_policy_applies_inside_checkpoints_of_compiled_modules() -> None:
    name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    ends = []
    for is_one_graph, options in ((False, None), (False, {}), (True, {"fullgraph": True})):
        torch.compiler.reset()
        model = Regression(lambda o=options: Checkpointed(o))
        with torch._dynamo.config.patch({name: is_one_graph}):
            fit(model, BalancedAMP(), loader(3))
        ends.append(parameters_of(model))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
