"""Mapping over tensors keeps the types of containers and does not change the originals."""

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_mp._nested import map_tensors, open_container, tensors_in

Point = namedtuple("Point", ["x", "y"])
ONE, TWO = torch.tensor([1.0]), torch.tensor([2.0])


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: Tensor
    name: str = "a"
    unset: int = dataclasses.field(init=False)  # has no value yet


class Tagged(list[Any]):
    """A list with an attribute and a different constructor."""

    def __init__(self, *items: Any, tag: str) -> None:
        super().__init__(items)
        self.tag = tag


class Stored(UserDict[str, Any]):
    tag = "class"


class ReadOnly(Mapping[str, Any]):
    def __init__(self, items: Mapping[str, Any]) -> None:
        self.stored = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.stored[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


VALUES = [
    (ONE, TWO),
    [ONE, [TWO, None]],
    {"a": ONE, "b": (TWO, "text")},
    OrderedDict(a=ONE, b=TWO),
    Point(ONE, TWO),
    [Frozen(ONE), TWO],
    Tagged(ONE, TWO, tag="kept"),
    Stored(a=ONE, b=TWO),
    ReadOnly({"a": ONE, "b": TWO}),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_map_changes_tensors_and_keeps_types_and_originals(value: Any) -> None:
    mapped = map_tensors(value, lambda tensor: tensor + 10)
    assert type(mapped) is type(value)
    assert [float(tensor) for tensor in tensors_in(mapped)] == [11.0, 12.0]
    assert [id(tensor) for tensor in tensors_in(value)] == [id(ONE), id(TWO)]


def test_attributes_of_a_subclass_are_kept() -> None:
    assert map_tensors(Tagged(ONE, tag="kept"), torch.neg).tag == "kept"
    stored = Stored(a=ONE)
    stored.tag = "instance"
    assert map_tensors(stored, torch.neg).tag == "instance"
    assert map_tensors(Frozen(ONE, "b"), torch.neg).name == "b"


def test_packed_sequence_keeps_its_lengths() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    half = map_tensors(packed, lambda t: t.half() if t.is_floating_point() else t)
    assert isinstance(half, PackedSequence)
    assert half.data.dtype == torch.float16
    assert half.batch_sizes.tolist() == [2, 2, 1]


@pytest.mark.parametrize("value", [3, "text", None, ONE.shape, torch.float32, {1, 2}, Frozen])
def test_other_values_stay_the_same_object(value: Any) -> None:
    assert map_tensors(value, torch.neg) is value
    assert tensors_in(value) == []


def test_keys_are_indices_keys_and_names_of_fields() -> None:
    fields = open_container(Point(1, 2))
    assert fields is not None
    assert (fields.keys, fields.has_fields) == (["x", "y"], True)
    mapping = open_container(MappingProxyType({"a": 1, 2: 3}))
    assert mapping is not None
    assert (mapping.keys, mapping.items, mapping.has_fields) == (["a", 2], [1, 3], False)
    sequence = open_container([5, 6])
    assert sequence is not None
    assert sequence.keys == [0, 1]
    assert open_container("text") is None
