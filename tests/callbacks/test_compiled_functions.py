"""Monitors whose modules are called by a compiled function, in which hooks do not run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from lightning_mp.callbacks import ActivationRangeMonitor, RepresentationMonitor, TensorCollector
from tests.callbacks.models import Watched, watch

MONITORS: dict[str, Any] = {
    "ActivationRangeMonitor": lambda _: ActivationRangeMonitor(
        modules=["network.0"], every_n_steps=2
    ),
    "RepresentationMonitor": lambda _: RepresentationMonitor(
        modules=["network.0"], every_n_steps=2
    ),
    "TensorCollector": lambda path: TensorCollector(
        include=["network.0"], collect=["outputs"], every_n_steps=2, dirpath=str(path)
    ),
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", MONITORS)
def test_compiled_function_contains_no_statistics_and_the_monitor_warns(
    name: str, tmp_path: Path
) -> None:
    model, counter = Watched(steps=6), CompileCounter()
    model.network.forward = torch.compile(model.network.forward, backend=counter, fullgraph=True)
    with pytest.warns(UserWarning, match=f"`{name}` measured no module") as warned:
        watch(model, [MONITORS[name](tmp_path)])
    assert sum("measured no module" in str(each.message) for each in warned) == 1
    # One graph with a hook, which does nothing, and one without; five operations in the perceptron.
    assert counter.frame_count <= 2
    assert counter.op_count == 5 * counter.frame_count


class Attending(nn.Module):
    """Attention over tokens of four values."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (4, 4))
        return self.out(self.attend(x, x, x, need_weights=False)[0].flatten(1))


@pytest.mark.filterwarnings("ignore:`ActivationRangeMonitor` measured no module")
def test_attention_in_a_compiled_function_stays_in_one_graph() -> None:
    model, counter = Watched(Attending, steps=6), CompileCounter()
    model.network.forward = torch.compile(model.network.forward, backend=counter, fullgraph=True)
    watch(model, [ActivationRangeMonitor(every_n_steps=2)])
    assert counter.frame_count <= 2  # with and without the mode of the monitor
