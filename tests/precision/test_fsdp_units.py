"""Units of FSDP: fp32 units with submodules, ranks without a shard, and gathered root weights."""

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import SGD, Optimizer

from lightning_mp import FSDPBalancedAMP, ModelParallelBalancedAMP
from tests.precision.models import TOKENS, WIDTH_IN, Regression, fit, make_trainer
from tests.precision.test_fsdp import (
    PLUGINS,
    RANKS,
    SCALE,
    _CPUStrategy,
    _Manual,
    _Model,
    _SelfSharding,
    batches,
    error_of,
    fit_on_ranks,
)
from tests.processes import run_ranks

pytestmark = pytest.mark.distributed

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

    for kind, make in PLUGINS.items():
        for name, modules in FP32.items():
            train(f"{kind} {name}", _Attends(), make(fp32_modules=modules))
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
def test_fp32_modules_with_submodules_train(ends: Any, kind: str, name: str, bound: float) -> None:
    end = ends[f"{kind} {name}"]
    expected = _fp32_end(_Attends())
    assert (end - expected).norm() < bound * expected.norm()


def test_rank_without_a_gradient_clips_by_value_with_the_other_rank(ends: Any) -> None:
    assert error_of(ends["one bias"], _fp32_end(_OneBias())) < 2**-9


# --- the root module, whose weights stay gathered after a forward --------------------------------


class _StepsRootWeights(_Model):
    """Steps weights of the root module past the plugin."""

    def on_fit_start(self) -> None:
        inner = ("blocks.", "norm.")
        named = [(n.removeprefix("network."), p) for n, p in self.network.named_parameters()]
        named = [(n.removeprefix("_fsdp_wrapped_module."), p) for n, p in named]
        self.own = SGD([p for n, p in named if not n.startswith(inner)], lr=0.1)

    def on_after_backward(self) -> None:
        self.own.step()


class _ShardsAndStepsRootWeights(_StepsRootWeights, _SelfSharding):
    pass


def _use_root(rank: int) -> tuple[list[str], Tensor, Tensor]:
    messages = []
    for kind, make in PLUGINS.items():
        network = _StepsRootWeights if kind == "fsdp" else _ShardsAndStepsRootWeights
        with pytest.raises(RuntimeError) as caught:
            fit_on_ranks(network(), make(loss_scale=SCALE), rank)
        messages.append(str(caught.value))
    alone, evaluated = _SelfSharding(), _Evaluated()
    fit_on_ranks(alone, ModelParallelBalancedAMP(loss_scale=SCALE), rank)
    for run in ("validate", "fit", "test"):
        options = {"devices": RANKS, "use_distributed_sampler": False}
        plugin = ModelParallelBalancedAMP(loss_scale=SCALE)
        trainer = make_trainer(plugin, strategy=ModelParallelStrategy(RANKS, 1), **options)
        getattr(trainer, run)(evaluated, batches(rank))
    return messages, alone.end, evaluated.end


class _Evaluated(_SelfSharding):
    def configure_model(self) -> None:
        if not isinstance(self.network, FSDPModule):  # once for all trainers
            super().configure_model()


def test_root_weights_of_an_optimizer_outside_the_trainer_and_after_an_evaluation() -> None:
    for messages, alone, evaluated in run_ranks(_use_root, RANKS):
        assert all("was not called through" in message for message in messages)
        assert torch.equal(evaluated, alone)


# --- frozen units --------------------------------------------------------------------------------


class _Thaws(_Model):
    """Trains its blocks, and the other weights of the root module, in the second epoch only."""

    def on_train_epoch_start(self) -> None:
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(self.current_epoch == 1 or "head" in name)


class _ShardsAndThaws(_Thaws, _SelfSharding):
    pass


def _thaw(rank: int) -> list[Tensor]:
    ends = []
    for kind, make in PLUGINS.items():
        model = _Thaws() if kind == "fsdp" else _ShardsAndThaws()
        fit_on_ranks(model, make(loss_scale=SCALE), rank, max_epochs=2)
        ends.append(model.end)
    return ends


def test_units_that_start_frozen_train_once_unfrozen() -> None:
    expected = _Thaws()
    fit(expected, None, batches(), max_epochs=2)
    for end in run_ranks(_thaw, RANKS)[0]:
        assert error_of(end, expected.end) < 2**-9


# --- several Trainers ----------------------------------------------------------------------------


class _Tries(_Model):
    """Goes on after the refusals of two other Trainers with the same plugin."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3:
            return
        plugin = self.trainer.precision_plugin
        other = _SelfSharding if isinstance(plugin, ModelParallelBalancedAMP) else _Model
        with pytest.raises(MisconfigurationException, match="the run of the first has not ended"):
            fit_on_ranks(other(), plugin, self.global_rank)


class _ShardsAndTries(_Tries, _SelfSharding):
    pass


def _try_second(rank: int) -> list[tuple[Tensor, Tensor]]:
    ends = []
    for kind, make in PLUGINS.items():
        both = (_Model, _Tries) if kind == "fsdp" else (_SelfSharding, _ShardsAndTries)
        alone, beside = (network() for network in both)
        for model in (alone, beside):
            fit_on_ranks(model, make(loss_scale=SCALE), rank)
        ends.append((alone.end, beside.end))
    return ends


def test_refused_second_trainer_leaves_the_run_as_it_was() -> None:
    for ends in run_ranks(_try_second, RANKS):
        assert all(torch.equal(alone, beside) for alone, beside in ends)
