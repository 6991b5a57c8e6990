"""Logits of attention, against float64, with every mask."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mp.callbacks._step.attention import AttentionMode, logits_of


def tensors(length: int = 7, heads: int = 4, groups: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, heads, length, 8), (3, groups, 9, 8), (3, groups, 9, 8))
    query, key, value = (3 * torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


def reference(query: Tensor, key: Tensor, keep: Tensor | None, bias: Any = 0.0) -> float:
    logits = query.double() @ key.double().mT / 8**0.5 + bias
    logits = logits if keep is None else logits[keep.expand(logits.shape)]
    return float(logits.abs().max())


MASK = torch.rand(7, 9, generator=torch.Generator().manual_seed(1)) > 0.5
CAUSAL = torch.ones(7, 9, dtype=torch.bool).tril()
BIAS = torch.arange(9.0)


@pytest.mark.parametrize(
    ("options", "keep", "bias"),
    [
        ({}, None, 0.0),
        ({"is_causal": True}, CAUSAL, 0.0),
        ({"attn_mask": MASK}, MASK, 0.0),
        ({"attn_mask": torch.zeros(7, 9).masked_fill(~MASK, -torch.inf)}, MASK, 0.0),
        ({"attn_mask": torch.zeros(3, 1, 7, 9).masked_fill(~MASK, -3e38)}, MASK, 0.0),
        ({"attn_mask": BIAS.expand(7, 9)}, None, BIAS.double()),
    ],
    ids=["plain", "causal", "bool", "-inf", "lowest", "bias"],
)
def test_largest_logit_equals_that_in_float64(
    options: dict[str, Any], keep: Tensor | None, bias: Any
) -> None:
    query, key, value = tensors()
    largest = float(logits_of(query, key, value, **options).abs().max())
    # A product of 8 numbers in fp32.
    assert largest == pytest.approx(reference(query, key, keep, bias), rel=8 * 2**-23)


def test_grouped_heads_and_long_sequences_are_seen() -> None:
    query, key, value = tensors(length=1000, heads=4, groups=2)
    logits = logits_of(query, key, value, enable_gqa=True)
    assert logits.shape == (3, 4, 250, 9)
    wide = key.repeat_interleave(2, dim=1)
    expected = reference(query[:, :, ::4], wide, None)
    assert float(logits.abs().max()) == pytest.approx(expected, rel=8 * 2**-23)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, *args: Tensor) -> Tensor:
        return helper(self.inner(args[0]), *args[1:])


def helper(*args: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*args)


def test_calls_are_counted_for_the_innermost_module_that_runs_and_change_nothing() -> None:
    model, seen = nn.Sequential(Outer()), []
    names = {name: module for name, module in model.named_modules() if name}
    expected = helper(*tensors())
    with AttentionMode(names, lambda name, logits: seen.append(name)):
        torch.testing.assert_close(model[0](*tensors()), expected, rtol=0, atol=0)
        helper(*tensors())  # of no module
    model[0](*tensors())
    assert seen == ["0"]
