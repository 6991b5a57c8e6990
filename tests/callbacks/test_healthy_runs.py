"""Two thousand healthy steps raise no alarm in any precision.

`make sweep` runs this file; the runs of `make test` are in `tests/monitors`.
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

pytestmark = pytest.mark.sweep

STEPS = 2000
# Each network once, each precision once.
RUNS: dict[str, tuple[type[Watched], Callable[[], nn.Module], Any]] = {
    "dense in fp32": (Watched, perceptron, None),
    "dead ReLUs in PureFP16": (Watched, dying, PureFP16),
    "sparse embedding in BalancedAMP": (SparseWatched, bag_of_tokens, BalancedAMP),
}


def monitors() -> list[InstabilityMonitor]:
    return [
        LossScaleMonitor(),
        GradientUnderflowMonitor(),
        ActivationRangeMonitor(backward=True),
        AdamStateMonitor(),
        SpikeGuard(),
        NonFiniteLocator(),
    ]


def check_silence(watching: list[InstabilityMonitor]) -> None:
    alarms = [alarm for monitor in watching for alarm in monitor.alarms]
    # A dynamic loss scale finds its level by occasional overflows, which are notes.
    assert [alarm.message for alarm in alarms if alarm.severity != "info"] == []
    assert [monitor.samples >= 25 for monitor in watching[1:4]] == [True] * 3


@pytest.mark.parametrize(("model", "network", "plugin"), RUNS.values(), ids=RUNS)
def test_monitors_in_a_healthy_run_raise_no_alarm(
    model: type[Watched], network: Callable[[], nn.Module], plugin: Any
) -> None:
    watching = monitors()
    watch(model(network, steps=STEPS), watching, plugin and plugin())
    check_silence(watching)


def test_monitors_in_the_demo_raise_no_alarm(glyph_cache: Path) -> None:
    torch.manual_seed(0)
    data = GlyphData(batch_size=32, cache_dir=str(glyph_cache), progress=False)
    watching = monitors()
    trainer = make_trainer(
        callbacks=watching,
        max_epochs=-1,
        max_steps=STEPS,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    trainer.fit(GlyphCLIP(width=16, feature_width=64), data)
    assert trainer.global_step == STEPS
    check_silence(watching)
