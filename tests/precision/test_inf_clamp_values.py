"""Argument `value` of `InfClamp`, and nested tensors of both layouts."""

import inspect

import pytest
import torch
from torch import Tensor, nn

from lightning_mp.precision.inf_clamp import InfClamp

INF = float("inf")
ROWS = [[1.0, INF, -2.0, 65504.0], [-INF, 0.5, 3.0, INF], [7.0, 8.0, -9.0, INF]]


def identity() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity())


@pytest.mark.parametrize("value", [1.0, 32752.0, 64504.0, 65504.0])
def test_inf_becomes_the_value_and_other_elements_stay(value: float) -> None:
    model, x = identity(), torch.tensor(ROWS).half()
    clamp = InfClamp(["0"], value=value).attach(model)
    expected = torch.where(x.isinf(), x.sign() * torch.tensor(value).half(), x)
    assert torch.equal(model(x), expected)
    assert clamp.counted() == {"0": 4}


def _takes_positions(module: nn.Module) -> bool:
    return "cache_position" in inspect.signature(module.forward).parameters


def test_value_64504_equals_the_clamp_of_t5() -> None:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Block

    torch.manual_seed(0)
    config = T5Config(d_model=8, d_kv=4, d_ff=16, num_heads=2, dropout_rate=0.0)
    block = T5Block(config, has_relative_attention_bias=True).half().eval()
    block.layer[-1].DenseReluDense.wo.weight.data.fill_(6e4)
    x = torch.randn(1, 3, 8).half()
    # transformers 4 needs explicit cache positions.
    told = {"cache_position": torch.arange(3)} if _takes_positions(block) else {}
    own = block(x, **told)[0]
    assert (own.abs() == 64512).any()
    clamp = InfClamp(["layer.0", "layer.1"], value=64504.0).attach(block)
    inside: list[Tensor] = []
    block.layer[-1].register_forward_hook(lambda _, __, out: inside.append(out))
    assert torch.equal(block(x, **told)[0], own)
    assert torch.equal(inside[0], own)  # clamped before the clamp of T5
    assert clamp.counted()["layer.1"] == (own.abs() == 64512).sum()


@pytest.mark.parametrize("value", [0.0, -1.0, 65505.0, INF, float("nan"), True])
def test_value_out_of_range_raises(value: float) -> None:
    with pytest.raises(ValueError, match=r"InfClamp\(value=.*65504"):
        InfClamp(value=value)


def nested(layout: torch.layout) -> Tensor:
    rows = torch.tensor(ROWS).half()
    return torch.nested.nested_tensor([rows[:1], rows[1:]], layout=layout, requires_grad=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("gradient", ["zero", "straight_through"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_nested_tensors_are_clamped_and_counted_like_their_components(
    layout: torch.layout, gradient: str
) -> None:
    plain, model = identity(), identity()
    InfClamp(["0"], gradient=gradient).attach(plain)
    clamp = InfClamp(["0"], gradient=gradient).attach(model)
    rows = torch.tensor(ROWS).half().requires_grad_()
    expected = plain(rows)
    expected.sum().backward()
    x = nested(layout)
    y = model(x)
    assert y.layout is layout
    assert torch.equal(torch.cat(y.unbind()), expected)
    assert (y + x).is_nested  # x and y have the same structure
    torch.cat(y.unbind()).sum().backward()
    assert torch.equal(torch.cat(x.grad.unbind()), rows.grad)
    assert clamp.counted() == {"0": 4}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transformer_encoder_with_padding_is_clamped_in_evaluation() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).half().eval()
    x, mask = torch.randn(2, 5, 8).half(), torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=mask)
        assert InfClamp().attach(encoder).names
        got = encoder(x, src_key_padding_mask=mask)
    torch.testing.assert_close(got[~mask], expected[~mask], rtol=2**-8, atol=2**-8)
