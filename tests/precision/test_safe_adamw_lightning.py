"""`SafeAdamW` in a Trainer with every precision and with clipping."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.optim import AdamW

from lightning_mp import BalancedAMP, LossScaleConfig, PureFP16, SafeAdamW
from tests.precision.models import Regression, fit, loader, parameters_of

SCALE = LossScaleConfig(init_scale=2.0**8)
PLUGINS = {
    "fp32": lambda: None,
    "16-mixed": lambda: MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8)
    ),
    "BalancedAMP": lambda: BalancedAMP(loss_scale=SCALE),
    "PureFP16": lambda: PureFP16(loss_scale=SCALE),
}


@pytest.mark.parametrize("make_plugin", PLUGINS.values(), ids=PLUGINS)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before.*optimizer.step")
def test_safe_adamw_trains_and_clips_like_torch_adamw(make_plugin: Any) -> None:
    ends = []
    for kind in (AdamW, SafeAdamW):
        model = Regression(make_optimizer=lambda p, kind=kind: kind(p, lr=0.01), interval="step")
        fit(model, make_plugin(), loader(8), gradient_clip_val=0.1)
        ends.append(parameters_of(model))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_safe_adamw_trains_half_weights_without_a_plugin() -> None:
    model = Regression(make_optimizer=lambda p: SafeAdamW(p, lr=0.01)).half()
    model.loss = lambda batch: torch.nn.functional.mse_loss(  # type: ignore[method-assign]
        model.network(batch[0].half()).float().flatten(), batch[1]
    )
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))
    fit(model, plugin, loader(40), max_epochs=3)
    assert sum(model.losses[-40:]) < 0.7 * sum(model.losses[:40])
    assert {p.dtype for p in model.parameters()} == {torch.float16}
