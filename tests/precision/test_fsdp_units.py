"""Nested modules in fp32 units, and an optimizer without a shard on one of two ranks."""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import SGD, Optimizer

from lightning_mp import FSDPBalancedAMP, ModelParallelBalancedAMP
from tests.precision.models import TOKENS, WIDTH_IN, Regression, fit
from tests.precision.test_fsdp import RANKS, _CPUStrategy, _Manual, _Model, batches, error_of
from tests.processes import run_ranks

pytestmark = pytest.mark.distributed

PLUGINS: list[Any] = [FSDPBalancedAMP, ModelParallelBalancedAMP]
# Attention reads the weights of a submodule; the network has weights and submodules of its own.
FP32 = {"attention": ["norm", "network.attention"], "network": ["Attentive"]}


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(TOKENS, WIDTH_IN))
        self.attention = nn.MultiheadAttention(WIDTH_IN, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(WIDTH_IN), nn.Linear(WIDTH_IN, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens + self.position
        return self.head(self.norm(x + self.attention(x, x, x)[0]).mean(dim=1))


class _Attends(Regression):
    """Shards its attention and the rest."""

    on_train_end = _Model.on_train_end

    def __init__(self) -> None:
        super().__init__(Attentive)

    def configure_model(self) -> None:
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, ModelParallelBalancedAMP):
            mesh = self.device_mesh["data_parallel"]
            plugin.shard_fp32_modules(self, mesh)
            for module in (self.network.attention, self.network):
                if not isinstance(module, FSDPModule):
                    fully_shard(module, mesh=mesh, mp_policy=plugin.mp_policy)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        pass


class _OneBias(_Manual):
    """Clips and steps by itself a bias of one element, which only one rank holds."""

    def configure_optimizers(self) -> list[Optimizer]:
        is_bias = {name: name.endswith("head.bias") for name, _ in self.named_parameters()}
        return [
            SGD([p for name, p in self.named_parameters() if is_bias[name] == chosen], lr=0.1)
            for chosen in (True, False)
        ]

    def clip_gradients(self, optimizer: Any, *_: Any) -> None:
        super().clip_gradients(optimizer, 0.02, "value")


def _train(rank: int) -> dict[str, Tensor]:
    ends = {}

    def train(name: str, model: Any, plugin: Any) -> None:
        strategy: Any = ModelParallelStrategy(RANKS, 1)
        if isinstance(plugin, FSDPBalancedAMP):
            wrap = {nn.MultiheadAttention, nn.LayerNorm, Attentive}
            strategy = _CPUStrategy(auto_wrap_policy=wrap, state_dict_type="sharded")
        options = {"devices": RANKS, "use_distributed_sampler": False}
        fit(model, plugin, batches(rank), strategy=strategy, **options)
        ends[name] = model.end

    for kind in PLUGINS:
        for name, modules in FP32.items():
            train(f"{kind.__name__} {name}", _Attends(), kind(fp32_modules=modules))
    train("one bias", _OneBias(), FSDPBalancedAMP(fp32_modules=[]))
    return ends


@pytest.fixture(scope="module")
def ends() -> dict[str, Tensor]:
    first, second = run_ranks(_train, RANKS)
    assert all(torch.equal(end, second[name]) for name, end in first.items())
    return first


def _fp32_end(model: Any) -> Tensor:
    fit(model, None, batches())
    return model.end


@pytest.mark.parametrize("kind", PLUGINS)
@pytest.mark.parametrize(("name", "bound"), [("attention", 2**-9), ("network", 2**-20)])
def test_fp32_modules_with_submodules_train(ends: Any, kind: Any, name: str, bound: float) -> None:
    end = ends[f"{kind.__name__} {name}"]
    expected = _fp32_end(_Attends())
    assert (end - expected).norm() < bound * expected.norm()


def test_rank_without_a_gradient_clips_by_value_with_the_other_rank(ends: Any) -> None:
    assert error_of(ends["one bias"], _fp32_end(_OneBias())) < 2**-9
