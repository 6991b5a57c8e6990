"""The character GPT predicts the next character; the sweep compares precisions."""

import math

import pytest
import torch
from torch.optim import AdamW

from lightning_mp.optim.safe_adamw import SafeAdamW
from tests.precision.char_gpt import (
    CharGPT,
    char_batches,
    held_out_loss,
    train_char_gpt,
    vocabulary,
)
from tests.precision.models import parameters_of


def test_targets_are_the_next_characters() -> None:
    batches = list(char_batches(3))
    assert len(batches) == 3
    for text, following in batches:
        assert torch.equal(text[:, 1:], following[:, :-1])
        assert text.max() < len(vocabulary())
    again = next(iter(char_batches(3)))
    assert torch.equal(again[0], batches[0][0])


@pytest.mark.slow
def test_untrained_model_predicts_a_uniform_distribution() -> None:
    model = CharGPT()
    assert held_out_loss(model) == pytest.approx(math.log(len(vocabulary())), rel=0.02)
    assert len(parameters_of(model)) < 40_000


@pytest.mark.sweep
def test_safe_adamw_in_fp32_equals_torch_adamw() -> None:
    ends = [
        train_char_gpt(0, None, make_optimizer=lambda p, kind=kind: kind(p, lr=3e-3))
        for kind in (AdamW, SafeAdamW)
    ]
    assert ends[0] < 0.7 * math.log(len(vocabulary()))
    assert ends[1] == pytest.approx(ends[0], rel=1e-4)
