"""Two thousand healthy steps: no monitor says a word, whatever the precision.

`make test` takes 400 of them, but for the demo, and samples as often; `make sweep` all.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples.glyph_clip.data import GlyphData
from examples.glyph_clip.model import GlyphCLIP
from lightning_mp import BalancedAMP, PureFP16
from lightning_mp.callbacks import (
    ActivationRangeMonitor,
    AdamStateMonitor,
    GradientUnderflowMonitor,
    InstabilityMonitor,
    LossScaleMonitor,
    NonFiniteLocator,
    SpikeGuard,
)
from tests.callbacks.models import (
    SparseWatched,
    Watched,
    bag_of_tokens,
    dying,
    perceptron,
    watch,
)
from tests.precision.models import make_trainer

# Steps -> how often monitors sample, as often as they do by themselves where it is `None`.
STEPS = {400: 10, 2000: None}
# Each network once, each precision once.
RUNS: dict[str, tuple[type[Watched], Callable[[], nn.Module], Any]] = {
    "dense in fp32": (Watched, perceptron, None),
    "dead ReLUs in PureFP16": (Watched, dying, PureFP16),
    "sparse embedding in BalancedAMP": (SparseWatched, bag_of_tokens, BalancedAMP),
}


def monitors(steps: int) -> list[InstabilityMonitor]:
    often: dict[str, Any] = {"every_n_steps": STEPS[steps]} if STEPS[steps] else {}
    return [
        LossScaleMonitor(),
        GradientUnderflowMonitor(**often),
        ActivationRangeMonitor(backward=True, **often),
        AdamStateMonitor(**often),
        SpikeGuard(),
        NonFiniteLocator(),
    ]


def check_silence(watching: list[InstabilityMonitor]) -> None:
    alarms = [alarm for monitor in watching for alarm in monitor.alarms]
    # An overflow now and then is how a dynamic loss scale finds its height: a note, no alarm.
    assert [alarm.message for alarm in alarms if alarm.severity != "info"] == []
    assert [monitor.samples >= 25 for monitor in watching[1:4]] == [True] * 3


each_length = pytest.mark.parametrize("steps", [400, pytest.param(2000, marks=pytest.mark.sweep)])


@pytest.mark.slow
@each_length
@pytest.mark.parametrize(("model", "network", "plugin"), RUNS.values(), ids=RUNS)
def test_monitors_in_a_healthy_run_raise_no_alarm(
    model: type[Watched], network: Callable[[], nn.Module], plugin: Any, steps: int
) -> None:
    watching = monitors(steps)
    watch(model(network, steps=steps), watching, plugin and plugin())
    check_silence(watching)


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [2000])
def test_monitors_in_the_demo_raise_no_alarm(glyph_cache: Path, steps: int) -> None:
    torch.manual_seed(0)
    data = GlyphData(batch_size=32, cache_dir=str(glyph_cache), progress=False)
    watching = monitors(steps)
    trainer = make_trainer(
        callbacks=watching,
        max_epochs=-1,
        max_steps=steps,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    trainer.fit(GlyphCLIP(width=16, feature_width=64), data)
    assert trainer.global_step == steps
    check_silence(watching)
