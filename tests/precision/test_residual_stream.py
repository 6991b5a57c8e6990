"""`find_residual_stream` finds the modules that write to the residual stream."""

import pytest
import torch
from torch import nn

from lightning_mp.precision._choice.residual_stream import find_residual_stream


class RMSNormLike(nn.Module):
    """A norm that is recognized by the name of its class."""


class DropPath(nn.Module):
    pass


class Attention(nn.Module):
    def __init__(self, last: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.attn_dropout = 0.4
        setattr(self, last, nn.Linear(4, 4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(4), RMSNormLike()
        self.attn = Attention("proj")
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(4, 8))
        self.mlp.add_module("c_proj", nn.Linear(8, 4))
        self.drop_path = DropPath()
        self.hidden_dropout, self.activation_dropout, self.layerdrop = 0.1, 0.2, 0.3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.1))
        self.blocks = nn.ModuleList([Block()])
        self.norm = nn.LayerNorm(4)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(4, 4)


def paths(root: nn.Module, found: object) -> set[str]:
    return {path for path, module in root.named_modules() if module in found}


def test_find_residual_stream_of_a_pre_norm_model_returns_its_writers_and_norms() -> None:
    model = Model()
    stream = find_residual_stream(model)
    assert paths(model, stream.writers) == {"blocks.0.attn.proj", "blocks.0.mlp.c_proj"}
    assert paths(model, stream.droppers) == {"blocks.0.drop_path", "dropout"}
    assert paths(model, stream.norms) == {"blocks.0.norm1", "blocks.0.norm2", "norm"}
    assert paths(model, stream.blocks) == {"blocks.0"}
    assert set(stream.writers.values()) == {0.1}


def test_find_residual_stream_of_a_torch_transformer_returns_the_attention_module() -> None:
    """`nn.MultiheadAttention` never calls its `out_proj`."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    stream = find_residual_stream(model)
    both = [f"layers.{i}" for i in (0, 1)]
    assert paths(model, stream.blocks) == {*both}
    assert paths(model, stream.writers) == {
        f"{block}.{name}" for block in both for name in ("self_attn", "linear2")
    }
    assert paths(model, stream.droppers) == {
        f"{block}.{name}" for block in both for name in ("dropout", "dropout1", "dropout2")
    }


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.1)),
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)),
        Attention("go"),  # not "o"
        nn.Identity(),
    ],
    ids=["mlp", "convolutions", "other-name", "identity"],
)
def test_find_residual_stream_without_writers_returns_nothing(model: nn.Module) -> None:
    stream = find_residual_stream(model)
    assert not any(stream)


def test_find_residual_stream_of_nested_lists_returns_the_innermost_members() -> None:
    inner = nn.Module()
    inner.layer_norm, inner.fc2 = nn.LayerNorm(4), nn.Linear(4, 4)
    outer = nn.Module()
    outer.layer = nn.ModuleList([inner])
    model = nn.ModuleDict({"stack": nn.ModuleList([outer])})
    assert find_residual_stream(model).blocks == {inner}


def test_find_residual_stream_ignores_lists_that_are_not_called() -> None:
    block = nn.ModuleList([nn.LayerNorm(4), Attention("o"), nn.ModuleList([nn.Linear(4, 4)])])
    to_out = nn.Module()
    to_out.to_out = nn.ModuleList([nn.Linear(4, 4), nn.Dropout(0.1)])
    stream = find_residual_stream(nn.ModuleList([block, to_out]))
    assert stream.blocks == set()
    assert {*stream.writers} == {block[1].o, to_out.to_out[0]}
    assert stream.droppers == {to_out.to_out[1]}


def test_find_residual_stream_of_a_compiled_model_equals_the_original() -> None:
    model = Model()
    model.blocks[0].mlp.c_proj = torch.compile(model.blocks[0].mlp.c_proj, backend="eager")
    stream = find_residual_stream(torch.compile(model, backend="eager"))
    assert model.blocks[0].mlp.c_proj in stream.writers
    assert stream.blocks == {model.blocks[0]}
