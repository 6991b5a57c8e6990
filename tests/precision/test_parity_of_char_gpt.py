"""A character GPT ends at the loss of fp32 with every precision, also averaged and wrapped."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_mp import BalancedAMP, LossScaleConfig, PureFP16
from tests.parity import Parity
from tests.precision.char_gpt import CharGPT, char_batches, held_out_loss
from tests.precision.models import fit
from tests.precision.test_balanced_amp_leaves_the_model_alone import Lookahead

pytestmark = [pytest.mark.slow, pytest.mark.sweep]

STEPS, ACCUMULATED = 60, 64
# The scale starts where no step overflows: a skipped step is a step less.
LOW = LossScaleConfig(init_scale=2.0**8)
PLUGINS: dict[str, Callable[[], Any]] = {
    "fp16 O2": lambda: BalancedAMP(loss_scale=LOW),
    "fp16 O1": lambda: BalancedAMP(weights="full", loss_scale=LOW),
    "bf16 O2": lambda: BalancedAMP(half="bf16"),
    "bf16 O1": lambda: BalancedAMP(half="bf16", weights="full"),
    "pure fp16": lambda: PureFP16(loss_scale=LOW),
    "pure bf16": lambda: PureFP16(half="bf16"),
}


class Averaged(CharGPT):
    """Keeps an exponential average of its weights."""

    average: AveragedModel

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self)


def train(kind: str, seed: int, plugin: Any) -> float:
    """Return the held-out loss in fp32 after training, of the average if there is one."""
    steps = 6 if kind == "accumulated" else STEPS
    options: dict[str, Any] = {"steps": steps, "seed": seed}
    if kind == "lookahead":
        options["make_optimizer"] = lambda p: Lookahead(AdamW(list(p), lr=3e-3))
    model = (Averaged if kind == "averaged" else CharGPT)(**options)
    if kind == "averaged":
        average = AveragedModel(CharGPT(**options), multi_avg_fn=get_ema_multi_avg_fn(0.9))
        object.__setattr__(model, "average", average)  # a teacher of its own, no part of the model
    if kind == "accumulated":
        data = char_batches(steps * ACCUMULATED, batch_size=2, seed=seed)
        fit(model, plugin, data, accumulate_grad_batches=ACCUMULATED)
    else:
        fit(model, plugin, char_batches(steps, seed=seed))
    return held_out_loss(model.average.module if kind == "averaged" else model)


PARITY = {
    kind: Parity(functools.partial(train, kind), references=4)
    for kind in ("plain", "averaged", "lookahead", "accumulated")
}
CASES = [
    *(("plain", setting) for setting in PLUGINS),
    *((kind, f"{half} O2") for kind in PARITY if kind != "plain" for half in ("fp16", "bf16")),
]


@pytest.mark.parametrize(("kind", "setting"), CASES)
def test_training_ends_at_the_loss_of_fp32(kind: str, setting: str) -> None:
    half = "fp16" if "fp16" in setting else "bf16"
    verdict = PARITY[kind].judge(PLUGINS[setting], half)
    print(f"{kind}, {setting}: {verdict}")
    assert verdict.holds, verdict


@pytest.mark.parametrize("kind", PARITY)
def test_training_in_fp32_learns(kind: str) -> None:
    with torch.no_grad():
        start = held_out_loss(CharGPT())
    factor = 0.98 if kind == "accumulated" else 0.9  # six steps
    assert PARITY[kind].in_fp32()[0] < factor * start
