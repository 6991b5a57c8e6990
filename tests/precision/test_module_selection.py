"""Modules are selected by `"norm"`, by path and by class."""

import pytest
import torch
from torch import nn

from lightning_mp.precision._choice.module_selection import as_written, select_modules, select_norms


class T5LayerNorm(nn.Module):
    """A norm that is not a class of torch, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class LlamaRMSNorm(T5LayerNorm):
    pass


class LayerNorm2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1, 1))


class FrozenBatchNorm2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(4))


class MyNorm(nn.LayerNorm):
    pass


class AdaLayerNorm(nn.Module):
    """Computes the scale of its norm from a condition, by weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 8), nn.LayerNorm(4)


class LayerNormLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 4))


class PreNorm(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(4), inner


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.encoder2 = nn.Linear(4, 4)
        self.final = MyNorm(4)


def test_norm_selects_the_normalisation_layers_of_torch() -> None:
    norms = [
        nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.BatchNorm3d(4), nn.SyncBatchNorm(4),
        nn.InstanceNorm1d(4), nn.InstanceNorm2d(4), nn.LazyBatchNorm1d(), nn.GroupNorm(2, 4),
        nn.LayerNorm(4), nn.LayerNorm((4, 4)), nn.RMSNorm(4), nn.LocalResponseNorm(2),
    ]  # fmt: skip
    others = [nn.Linear(4, 4), nn.Dropout(), nn.Embedding(3, 4), nn.PReLU(), nn.LSTM(4, 4)]
    root = nn.Sequential(*norms, *others)
    assert list(select_modules(root, ["norm"]).values()) == norms


def test_norm_selects_similar_classes_but_none_with_other_weights() -> None:
    norms = [T5LayerNorm(), LlamaRMSNorm(), LayerNorm2d(), FrozenBatchNorm2d(), MyNorm(4)]
    others = [AdaLayerNorm(), LayerNormLSTM(), PreNorm(nn.Linear(4, 4))]
    root = nn.Sequential(*norms, *others)
    selected = select_modules(root, ["norm"])
    assert list(selected) == ["0", "1", "2", "3", "4", "5.inner", "7.norm"]


def test_norm_selects_a_submodule_of_that_name_as_well() -> None:
    """A hand-written norm is often an attribute `norm` of the model, which is its dotted path."""
    root = Model()
    root.norm = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    root.encoder.norm = nn.Identity()  # its path is `encoder.norm`
    expected = ["encoder.block.1", "final", "norm", "norm.0", "norm.1"]
    assert list(select_modules(root, ["norm"])) == expected
    assert list(select_norms(root)) == ["encoder.block.1", "final"]


def test_norm_selects_nothing_in_a_model_without_norms() -> None:
    assert select_modules(nn.Linear(4, 4), ["norm"]) == {}
    assert select_modules(nn.Linear(4, 4), []) == {}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["MyNorm"], ["final"]),
        (["LayerNorm"], ["encoder.block.1", "final"]),  # base classes match too
        (["encoder.head"], ["encoder.head", "encoder.head.0", "encoder.head.1"]),
        (["encoder2"], ["encoder2"]),
        (["norm", "final"], ["encoder.block.1", "final"]),
        (["final", "encoder.head.0", "norm"], ["encoder.block.1", "encoder.head.0", "final"]),
    ],
)
def test_names_select_whole_subtrees_in_the_order_of_the_model(
    names: list[str], expected: list[str]
) -> None:
    model = Model()
    selected = select_modules(model, names)
    assert list(selected) == expected
    assert all(model.get_submodule(path) is module for path, module in selected.items())


def test_class_of_a_container_selects_all_modules_inside() -> None:
    model = Model()
    assert set(select_modules(model, ["Encoder"]).values()) == set(model.encoder.modules())


def test_shared_module_is_listed_once_under_its_first_path() -> None:
    model = Model()
    model.again = model.encoder.head
    paths = ["encoder.head", "encoder.head.0", "encoder.head.1"]
    for names in (["again"], ["encoder.head"], ["again", "encoder.head"]):
        assert list(select_modules(model, names)) == paths
    model.again_alone = model.again[0]
    assert list(select_modules(model, ["again_alone"])) == ["encoder.head.0"]


@pytest.mark.slow
def test_path_through_a_compiled_module_is_that_of_the_original() -> None:
    model = Model()
    model.encoder = torch.compile(model.encoder)
    selected = select_modules(model, ["encoder.head", "LayerNorm"])
    assert list(selected.values()) == [
        model.encoder.block[1], *model.encoder.head.modules(), model.final
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("MyNrom", "'MyNorm'"),
        ("encoder.haed", "'encoder.head'"),
        ("layernorm", "'LayerNorm'"),
        ("norms", "'norm'"),
        ("encoder.", "'encoder'"),
    ],
)
def test_error_for_unknown_name_lists_similar_names(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"Passed the module '{name}', but Model.*{near}"):
        select_modules(Model(), ["norm", name])


@pytest.mark.parametrize("name", ["", "Module", "object", "xyz"])
def test_name_that_selects_everything_or_nothing_raises(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"Its submodules: \['encoder', 'encoder2', 'final'\]|Similar"
    ):
        select_modules(Model(), [name])


def test_names_omit_the_prefixes_of_wrappers() -> None:
    assert as_written("a._orig_mod.b._fsdp_wrapped_module.c") == "a.b.c"
