"""`AdamStateMonitor` measures steps of `SafeAdamW` as they are made."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import AdamStateMonitor, SafeAdamW
from lightning_mp.callbacks._rules.adam import AdamNumbers
from lightning_mp.callbacks._rules.adam_statistics import adam_statistics
from tests.callbacks.models import Watched, watch
from tests.callbacks.test_adam_state_monitor import hooked

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.InstabilityWarning")


@pytest.mark.parametrize("options", [{"rule": "atan2"}, {"clip_update_rms": 0.5}])
def test_update_of_safe_adamw_is_that_of_its_step(options: dict[str, Any]) -> None:
    optimizer = SafeAdamW([nn.Parameter(torch.randn(50))], lr=0.1, weight_decay=0.0, **options)
    (parameter,) = optimizer.param_groups[0]["params"]
    row, before = Tensor(), Tensor()
    for _ in range(3):
        parameter.grad = torch.randn(50)
        (row,) = adam_statistics(optimizer, [parameter], [parameter.grad], 1.0)
        before = parameter.detach().clone()
        optimizer.step()
    clip = options.get("clip_update_rms", math.inf)
    found = AdamNumbers("weight", row.numpy(), beta2=0.999, eps=1e-8, clip=clip)
    update = (parameter.detach() - before).norm() / before.norm()
    assert found.ratio == pytest.approx(update.item(), rel=1e-4)


def kinds_of(**options: Any) -> set[str]:
    """Return the alarms about a gradient that grows and then stops."""

    def change(gradient: Tensor, step: int) -> Tensor:
        return torch.full_like(gradient, 1.0 if step < 161 else 10.0 if step < 171 else 0.0)

    watcher = AdamStateMonitor(every_n_steps=5, baseline_samples=5, zero_run_steps=50)
    sabotage = hooked("network.2.weight", change)
    make_optimizer = lambda p: SafeAdamW(p, lr=1e-6, **options)  # noqa: E731
    watch(Watched(None, make_optimizer, steps=230, sabotage=sabotage), [watcher])
    return {alarm.kind for alarm in watcher.alarms}


def test_remedies_end_the_alarms_that_advise_them() -> None:
    assert kinds_of() == {"update_rms", "zero_run"}
    assert kinds_of(clip_update_rms=1.0) == set()
    assert "below_epsilon" in kinds_of(eps=2.0)
    assert "below_epsilon" not in kinds_of(eps=2.0, rule="atan2")
