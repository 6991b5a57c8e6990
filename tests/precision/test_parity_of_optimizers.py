"""A tiny transformer ends at the loss of fp32 with every precision plugin and optimizer."""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RAdam

from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.loss_scaler import LossScaleConfig
from lightning_mp.precision.pure_fp16 import PureFP16
from tests.parity import Parity
from tests.precision.models import Regression, Transformer, fit, sequences

pytestmark = pytest.mark.slow  # left to `make test`

EPOCHS, BATCHES = 2, 8

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.01, momentum=0.9),
    "fused sgd": lambda p: SGD(p, lr=0.01, momentum=0.9, fused=True),
    "adagrad": lambda p: Adagrad(p, lr=0.03),
    "radam": lambda p: RAdam(p, lr=3e-3),
    "adamw": lambda p: AdamW(p, lr=3e-3),
    "foreach adamw": lambda p: AdamW(p, lr=3e-3, foreach=True),
    "fused adamw": lambda p: AdamW(p, lr=3e-3, fused=True),
    "adamw of many groups": lambda p: AdamW([{"params": [each]} for each in p], lr=3e-3),
}
# Those that take the steps of another are compared with that one's runs in fp32.
SAME_STEPS = {"fused sgd": "sgd"} | {name: "adamw" for name in OPTIMIZERS if " adamw" in name}
SAME_STEPS["adamw of many groups"] = "adamw"

# The scale starts where no step of this model overflows: a skipped step is a step less.
BALANCED: dict[str, Callable[[], BalancedAMP]] = {
    "fp16 O2": lambda: BalancedAMP(),
    "fp16 O1": lambda: BalancedAMP(weights="full", loss_scale=LossScaleConfig(init_scale=2.0**10)),
    "bf16 O2": lambda: BalancedAMP(half="bf16"),
    "bf16 O1": lambda: BalancedAMP(half="bf16", weights="full"),
}
PURE: dict[str, Callable[[], PureFP16]] = {
    "pure fp16": lambda: PureFP16(),
    "pure bf16": lambda: PureFP16(half="bf16"),
}
# Optimizers of O1 are as plain as without the plugin: two will do.
CASES = [
    *((name, setting) for name in ("sgd", "adamw") for setting in BALANCED),
    *((name, f"{half} O2") for name in ("adagrad", "fused adamw") for half in ("fp16", "bf16")),
    *((name, setting) for name in OPTIMIZERS for setting in PURE if name != "adamw"),
]
# Each plugin once, in a half, and by SGD: Adam hides a wrong scale. `make sweep` has the others.
GATE = [("sgd", "fp16 O2"), ("sgd", "pure bf16")]


def case(optimizer: str, setting: str) -> Any:
    marks = [] if (optimizer, setting) in GATE else [pytest.mark.sweep]
    return pytest.param(optimizer, setting, marks=marks)


def train(optimizer: str, seed: int, plugin: Any) -> float:
    """Return the loss over all data after training, in fp32."""
    model, data = Regression(Transformer, OPTIMIZERS[optimizer], seed=seed), sequences(BATCHES)
    trainer = fit(model, plugin, data, max_epochs=EPOCHS)
    states = trainer.optimizers[0].state_dict()["state"].values()
    tensors = [v for state in states for v in state.values() if isinstance(v, Tensor)]
    assert {each.dtype for each in (*model.parameters(), *tensors)} == {torch.float32}
    if getattr(plugin, "scaler", None) is not None:
        assert plugin.scaler.skipped_steps == 0
    with torch.no_grad():
        return statistics.fmean(model.loss(batch).item() for batch in data)


# RAdam scatters little, so that five runs suffice.
PARITY = {
    name: Parity(functools.partial(train, name), references=5 if name == "radam" else 8)
    for name in OPTIMIZERS
}


@pytest.mark.parametrize(("optimizer", "setting"), [case(*each) for each in CASES])
def test_training_ends_at_the_loss_of_fp32(optimizer: str, setting: str) -> None:
    parity = PARITY[SAME_STEPS.get(optimizer, optimizer)]
    half = "fp16" if "fp16" in setting else "bf16"
    verdict = parity.judge((BALANCED | PURE)[setting], half, train=PARITY[optimizer].train)
    assert verdict.holds, verdict
    assert not set(verdict.losses) & set(verdict.in_fp32)  # the plugin does something


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - set(SAME_STEPS)))
def test_training_in_fp32_learns(optimizer: str) -> None:
    ends = PARITY[optimizer].in_fp32()
    with torch.no_grad():
        data = sequences(BATCHES)
        models = [Regression(Transformer, seed=seed) for seed in range(len(ends))]
        starts = [statistics.fmean(model.loss(b).item() for b in data) for model in models]
    assert statistics.fmean(ends) < 0.6 * statistics.fmean(starts)
