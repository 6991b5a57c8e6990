"""`torch.compile` under PureFP16 with batches of two sizes and with equal blocks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import AdamW
from torch.utils.data import DataLoader

from lightning_mp import PureFP16, SafeAdamW
from tests.precision.models import Block, Regression, Transformer, fit, relative, rows, sequences
from tests.quiet import parameters_of


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def uneven() -> DataLoader:
    """Return two batches of 16 samples and a last batch of 5."""
    return DataLoader(rows(37), batch_size=16)


class Whole(nn.Module):
    """A perceptron that compiles to one graph for each shape."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1)
        if backend is not None:
            self.compile(backend=backend, fullgraph=True, dynamic=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(nn.functional.gelu(self.up(x))))


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("make_optimizer", [AdamW, SafeAdamW])
@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_smaller_last_batch_compiles_to_one_graph_and_trains_as_in_eager_mode(
    half: Any, make_optimizer: Any, manual: bool
) -> None:
    class Trained(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

    ends, counter = [], CompileCounterWithBackend("aot_eager")
    for backend in (None, counter):
        model = Trained(lambda b=backend: Whole(b), lambda p: make_optimizer(p, lr=0.01))
        model.automatic_optimization = not manual
        fit(model, PureFP16(half=half), uneven(), max_epochs=2)
        ends.append(model)
    assert counter.frame_count == 2  # one graph for 16 samples and one for 5
    start = parameters_of(Regression(lambda: Whole(None)))
    assert relative(ends[1], ends[0], start) < {"fp16": 2**-7, "bf16": 2**-4}[half]


class Buffered(nn.Module):
    """Attention after a sum with an fp32 buffer."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(8, 1)
        self.register_buffer("position", torch.randn(2, 4))
        if backend is not None:
            self.compile(backend=backend, fullgraph=True, dynamic=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (2, 4)) + self.position
        return self.out(self.attend(x, x, x, need_weights=False)[0].flatten(1))


def test_attention_of_mixed_inputs_compiles_to_one_graph() -> None:
    ends, counter = [], CompileCounterWithBackend("aot_eager")
    for backend in (None, counter):
        model = Regression(lambda b=backend: Buffered(b))
        start = parameters_of(model)
        fit(model, PureFP16(), uneven())
        ends.append(model)
    assert counter.frame_count == 2  # one graph for 16 samples and one for 5
    assert relative(ends[1], ends[0], start) < 2**-7


class Method(Regression):
    """Compiles a method of the LightningModule."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        if backend is not None:
            self.loss = torch.compile(self.loss, backend=backend, fullgraph=True, dynamic=False)


class Forward(Regression):
    """Replaces `forward` of its network by a compiled function."""

    def __init__(self, backend: Any) -> None:
        super().__init__(lambda: Whole(None))
        if backend is not None:
            self.network.forward = torch.compile(
                self.network.forward, backend=backend, fullgraph=True, dynamic=False
            )


class Fused(nn.Linear):
    """Passes its weights to a function."""

    def __init__(self, function: Any) -> None:
        super().__init__(8, 16)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


class Function(Regression):
    """Computes a layer with a compiled function."""

    def __init__(self, backend: Any) -> None:
        function: Any = torch.nn.functional.linear
        if backend is not None:
            function = torch.compile(
                lambda *tensors: torch.nn.functional.linear(*tensors),
                backend=backend,
                fullgraph=True,
                dynamic=False,
            )
        super().__init__(lambda: nn.Sequential(Fused(function), nn.GELU(), nn.Linear(16, 1)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that:UserWarning")
@pytest.mark.parametrize("make", [Method, Forward, Function])
def test_compiled_function_accepts_a_smaller_last_batch(make: Any) -> None:
    ends, counter = [], CompileCounterWithBackend("aot_eager")
    for backend in (None, counter):
        model = make(backend)
        start = parameters_of(model)
        fit(model, PureFP16(), uneven(), max_epochs=2)
        ends.append(model)
    assert counter.frame_count == 2  # one graph for 16 samples and one for 5
    assert relative(ends[1], ends[0], start) < 2**-7


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that:UserWarning")
def test_equal_clamped_blocks_are_compiled_once() -> None:
    graphs = {}
    for blocks in (1, 4):
        torch.compiler.reset()
        graphs[blocks] = CompileCounterWithBackend("aot_eager")

        def network(blocks: int = blocks) -> nn.Module:
            model = Transformer()
            model.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
            for block in model.blocks:
                block.compile(backend=graphs[blocks], fullgraph=True)
            return model

        plugin = PureFP16(inf_clamp=["Block", "Linear"])
        fit(Regression(network), plugin, sequences(3))
        assert len(plugin.inf_clamp.names) == 2 + 5 * blocks  # embed, head, five in each block
    assert graphs[4].frame_count == graphs[1].frame_count


@pytest.mark.parametrize("make_optimizer", [AdamW, SafeAdamW])
def test_compiled_step_of_an_optimizer_runs_in_eager_mode(make_optimizer: Any) -> None:
    def compiled(parameters: Any) -> Any:
        optimizer = make_optimizer(parameters, lr=0.01)
        optimizer.step = torch.compile(optimizer.step, backend=counter)
        return optimizer

    ends, counter = [], CompileCounterWithBackend("eager")
    for make in (lambda p: make_optimizer(p, lr=0.01), compiled):
        model = Regression(make_optimizer=make)
        fit(model, PureFP16(), uneven())
        ends.append(parameters_of(model))
    assert torch.equal(*ends)
    assert counter.frame_count == 0  # a step would compile new graphs every time
