"""Logits of attention equal a float64 reference, with every kind of mask."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mp.callbacks._step.functions import FunctionMode, logits_of


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
def test_largest_logit_equals_a_float64_reference(
    options: dict[str, Any], keep: Tensor | None, bias: Any
) -> None:
    query, key, value = tensors()
    logits = logits_of(query, key, value, **options)
    largest = float(logits.masked_fill(logits == -torch.inf, 0.0).abs().max())
    # A product of 8 numbers in fp32.
    assert largest == pytest.approx(reference(query, key, keep, bias), rel=8 * 2**-23)


def test_grouped_heads_and_long_sequences_are_measured() -> None:
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


def test_calls_belong_to_the_innermost_running_module_and_outputs_do_not_change() -> None:
    model, seen = nn.Sequential(Outer()), []
    names = {name: module for name, module in model.named_modules() if name}
    expected = helper(*tensors())
    with FunctionMode(names, lambda name, found: seen.append(name)):
        torch.testing.assert_close(model[0](*tensors()), expected, rtol=0, atol=0)
        helper(*tensors())  # called outside all modules
    model[0](*tensors())
    assert seen == ["0"]


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` with known logits.

    Args:
        options: Of its call.
        settings: Of the module.
    """

    def __init__(self, options: dict[str, Any], **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = nn.MultiheadAttention(16, 2, **settings)
        nn.init.normal_(self.attend.in_proj_bias)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x, **self.options)[0]

    def largest(self, x_BLE: Tensor, keep: Tensor | None) -> float:
        weight, bias = self.attend.in_proj_weight.double(), self.attend.in_proj_bias.double()
        query, key, _ = (x_BLE.double() @ weight.mT + bias).chunk(3, dim=-1)
        query, key = (x.unflatten(-1, (2, 8)).transpose(1, 2) for x in (query, key))
        logits = query @ key.mT / 8**0.5
        logits = logits if keep is None else logits[keep.expand(logits.shape)]
        return float(logits.detach().abs().max())


PADDED = torch.arange(7) >= torch.tensor([7, 4, 2])[:, None]  # three samples; true where masked
SQUARE = torch.ones(7, 7, dtype=torch.bool).tril()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    ("options", "keep"),
    [
        ({}, None),
        ({"need_weights": False}, None),
        ({"key_padding_mask": PADDED}, ~PADDED[:, None, None]),
        ({"attn_mask": ~SQUARE, "is_causal": True, "need_weights": False}, SQUARE),
        (
            {"key_padding_mask": PADDED, "attn_mask": (~SQUARE).expand(6, 7, 7)},
            SQUARE & ~PADDED[:, None, None],
        ),
    ],
    ids=["weights", "none", "padding", "causal", "both"],
)
def test_largest_logit_of_multihead_attention_equals_a_float64_reference(
    options: dict[str, Any], keep: Tensor | None, batch_first: bool
) -> None:
    model, seen = SelfAttention(options, batch_first=batch_first), {}
    x_BLE = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0))
    with FunctionMode(dict(model.named_modules()), lambda *call: seen.update([call])):
        model(x_BLE if batch_first else x_BLE.transpose(0, 1))
    assert list(seen) == ["attend"]
    # Two products of 16 numbers, and one of 8, in fp32.
    expected = pytest.approx(model.largest(x_BLE, keep), rel=(16 + 16 + 8) * 2**-23)
    assert float(seen["attend"]["attention_logit"].abs().max()) == expected


class Eager(nn.Module):
    """Eager attention; `soften` is one of the ways to call softmax."""

    def __init__(self, soften: Any) -> None:
        super().__init__()
        self.soften = soften

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        logits = (query @ key.mT / 8**0.5).masked_fill(~CAUSAL, torch.finfo(query.dtype).min)
        return (self.soften(logits) @ value).flatten(1).softmax(dim=-1)  # the last is no attention


@pytest.mark.parametrize(
    "soften",
    [
        lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: torch.softmax(x, 3),
        lambda x: x.softmax(-1),
        nn.Softmax(dim=-1),
    ],
)
def test_largest_unmasked_logit_of_eager_attention_is_measured(soften: Any) -> None:
    model, seen = Eager(soften), []
    query, key, value = tensors()
    with FunctionMode({"eager": model}, lambda *call: seen.append(call)):
        model(query, key, value)
    # The softmax of two dimensions is not attention and is not measured.
    (name, found), (_, nothing) = seen
    assert (name, nothing) == ("eager", {})
    logits = found["attention_logit"]
    expected = pytest.approx(reference(query, key, CAUSAL), rel=8 * 2**-23)
    assert float(logits.abs().max()) == expected


def test_largest_logit_of_multihead_attention_with_another_key_width_is_measured() -> None:
    torch.manual_seed(0)
    attend, seen = nn.MultiheadAttention(16, 2, kdim=6, vdim=6, bias=False), []
    query_LE, key_SE = torch.randn(7, 16), torch.randn(9, 6)
    with FunctionMode({"attend": attend}, lambda *call: seen.append(call)):
        attend(query_LE, key_SE, key_SE)
    query = query_LE.double() @ attend.q_proj_weight.detach().double().mT
    key = key_SE.double() @ attend.k_proj_weight.detach().double().mT
    heads = (x.unflatten(-1, (2, 8)).transpose(0, 1) for x in (query, key))
    expected = pytest.approx(reference(*heads, None), rel=(16 + 6 + 8) * 2**-23)
    ((name, found),) = seen
    assert (name, float(found["attention_logit"].abs().max())) == ("attend", expected)
