"""A checkpoint of any precision, sharded or not, resumes under any other precision."""

import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_mp import (
    BalancedAMP,
    FSDPBalancedAMP,
    LossScaleConfig,
    ModelParallelBalancedAMP,
    PureFP16,
)
from tests.precision.models import Block, fit, parameters_of
from tests.precision.test_fsdp import RANKS, STEPS, _CPUStrategy, _Model, adamw, batches
from tests.precision.test_fsdp import _SelfSharding as SelfSharding
from tests.processes import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SCALE = LossScaleConfig(init_scale=2.0**8)
# torch cannot gather full weights of FSDP 1 on a CPU, so this setting saves no checkpoint.
ONLY_TARGET = "FSDPBalancedAMP"
SETTINGS = (
    "fp32", "16-mixed", "BalancedAMP", "PureFP16", "ModelParallelBalancedAMP", ONLY_TARGET,
)  # fmt: skip
# Every setting saves and resumes once; `make sweep` tests every pair.
CHAIN = (*(SETTINGS[index] for index in (0, 4, 3, 1, 2, 4, 0)), ONLY_TARGET)
PAIRS = [(a, b) for a in SETTINGS if a != ONLY_TARGET for b in SETTINGS]


class Noting:
    """Records full weights and the step count when training starts."""

    def on_train_start(self) -> None:
        trainer: Any = self.trainer  # type: ignore[attr-defined]
        self.began = _whole_weights(self)
        state = next(iter(trainer.optimizers[0].state.values()), {"step": 0})
        self.began_at = int(state["step"])


class Plain(Noting, _Model): ...


class Sharding(Noting, SelfSharding): ...


def _whole_weights(model: Any) -> Tensor:
    root = model.trainer.strategy.model
    if any(isinstance(module, FullyShardedDataParallel) for module in root.modules()):
        with FullyShardedDataParallel.summon_full_params(root, writeback=False):
            return parameters_of(model)
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().double().flatten() for p in full])


def _parts(setting: str) -> tuple[type[Any], Any, Strategy]:
    """Return model class, plugin and strategy of a setting."""
    if setting == "ModelParallelBalancedAMP":
        strategy = ModelParallelStrategy(RANKS, 1, save_distributed_checkpoint=False)
        return Sharding, ModelParallelBalancedAMP(loss_scale=SCALE), strategy
    if setting == ONLY_TARGET:
        strategy = _CPUStrategy(auto_wrap_policy={Block}, state_dict_type="sharded")
        return Plain, FSDPBalancedAMP(loss_scale=SCALE), strategy
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    plugin = {
        "fp32": lambda: None,
        "16-mixed": lambda: MixedPrecision("16-mixed", "cpu", scaler),
        "BalancedAMP": lambda: BalancedAMP(loss_scale=SCALE),
        "PureFP16": lambda: PureFP16(loss_scale=SCALE),
    }[setting]()
    return Plain, plugin, DDPStrategy()


def _go_through(rank: int, settings: Sequence[str], folder: str) -> list[tuple[Any, ...]]:
    """Train one epoch under each setting in turn; return weights and steps of each."""
    noted, path = [], None
    for index, setting in enumerate(settings):
        kind, plugin, strategy = _parts(setting)
        model = kind(make_optimizer=adamw, seed=index)
        trainer = fit(
            model, plugin, batches(rank), strategy=strategy, max_epochs=index + 1, ckpt_path=path,
            devices=RANKS, use_distributed_sampler=False,
        )  # fmt: skip
        noted.append((model.began, model.began_at, model.end, len(model.losses)))
        path = f"{folder}/{index}"
        if setting != ONLY_TARGET:
            trainer.save_checkpoint(path)
    return noted


def _go_through_all(rank: int, chains: Sequence[Sequence[str]]) -> list[list[tuple[Any, ...]]]:
    folder = [""]
    with tempfile.TemporaryDirectory() as own:
        folder[0] = own
        dist.broadcast_object_list(folder)  # all ranks read the files of rank 0
        results = []
        for index, chain in enumerate(chains):
            results.append(_go_through(rank, chain, f"{folder[0]}/{index}"))
        dist.barrier()
    return results


def check(chain: Sequence[str], noted: list[tuple[Any, ...]], in_fp32: list[Tensor]) -> None:
    """Compare initial weights with the previous setting, and final weights with fp32."""
    for index in range(1, len(chain)):
        where = f"{chain[index - 1]} -> {chain[index]}"
        began, at, end, steps = noted[index]
        assert (at, steps) == (index * STEPS, STEPS), where
        # Half weights of PureFP16 are recorded without their residuals.
        bits = 11 if "PureFP16" in chain[index - 1 : index + 1] else 24
        before = noted[index - 1][2]
        assert torch.allclose(began, before, rtol=2.0**-bits, atol=2.0**-25), where
        error = (end - in_fp32[index]).norm() / (in_fp32[index] - in_fp32[index - 1]).norm()
        assert error < 0.5, f"{where}: an epoch ended {error:.2f} of its way off that of fp32"


def reference(epochs: int) -> list[Tensor]:
    """Return the weights after every epoch in fp32 in one process."""
    ends: list[Tensor] = []

    class NotesEpochs(_Model):
        def on_train_epoch_end(self) -> None:
            ends.append(parameters_of(self))

    fit(NotesEpochs(make_optimizer=adamw), None, batches(), max_epochs=epochs)
    return ends


def test_run_resumes_under_each_setting_in_turn() -> None:
    in_fp32 = reference(len(CHAIN))
    for (noted,) in run_ranks(_go_through_all, RANKS, [CHAIN]):
        check(CHAIN, noted, in_fp32)


@pytest.mark.sweep
def test_every_setting_resumes_a_run_of_every_other() -> None:
    in_fp32 = reference(2)
    for results in run_ranks(_go_through_all, RANKS, PAIRS):
        for pair, noted in zip(PAIRS, results, strict=True):
            check(pair, noted, in_fp32)
