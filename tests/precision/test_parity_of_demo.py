"""The demo, on its own glyphs and at its own size, ends at the loss of fp32 in every precision."""

import functools
import statistics
from typing import Any

import pytest
import torch

from examples.glyph_clip.data import GlyphData
from examples.glyph_clip.model import GlyphCLIP
from tests.parity import Parity
from tests.precision.models import fit
from tests.precision.test_parity_of_char_gpt import PLUGINS

pytestmark = [pytest.mark.slow, pytest.mark.sweep]

STEPS, BATCH = 30, 256  # the demo takes 320 steps of 2048 pairs


@functools.cache
def glyphs() -> GlyphData:
    """Render once; the fonts of the test are what the loss is measured on."""
    data = GlyphData(batch_size=BATCH, progress=False)
    data.prepare_data()
    data.setup()
    return data


def train(seed: int, plugin: Any, steps: int = STEPS) -> float:
    """Return the loss in fp32 over the test font after training."""
    data = glyphs()
    torch.manual_seed(seed)
    model = GlyphCLIP()
    data.seed = seed
    torch.manual_seed(seed)  # distortion of the glyphs
    fit(model, plugin, data.train_dataloader(), max_steps=steps)
    model.eval()
    with torch.no_grad():
        scale = model.logit_scale.exp()
        losses = [model.loss(*model(batch), scale).item() for batch in data.test_dataloader()]
    return statistics.fmean(losses)


PARITY = Parity(train, references=4)


@pytest.mark.parametrize("setting", PLUGINS)
def test_demo_ends_at_the_loss_of_fp32(setting: str) -> None:
    verdict = PARITY.judge(PLUGINS[setting], "fp16" if "fp16" in setting else "bf16")
    print(f"{setting}: {verdict}")
    assert verdict.holds, verdict


def test_demo_learns_in_fp32() -> None:
    """30 steps lower the loss by more than what rounding to half is allowed to change it by."""
    ends = PARITY.in_fp32()
    assert max(ends) < 0.95 * min(train(seed, None, steps=0) for seed in range(len(ends)))
