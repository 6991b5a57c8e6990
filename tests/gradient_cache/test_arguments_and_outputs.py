"""Roles of arguments, concatenation of outputs, and the errors for both."""

import re
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_mp.gradient_cache.gradient_cache import GradientCache


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None


@dataclass
class Computed:
    x: Any
    z: Any = field(init=False)

    def __post_init__(self) -> None:
        self.z = "made"


class ADict(dict):
    __getattr__ = dict.__getitem__  # raises `KeyError`, unlike an object


class AList(list):
    pass


class ATuple(tuple):
    __slots__ = ()


class Encoding(UserDict):
    """A mapping with an attribute besides its data, as `BatchEncoding`."""

    def __init__(self, data: Any = None, note: str = "") -> None:
        super().__init__(data)
        self.note = note


Pair = namedtuple("Pair", ["x", "y"])


def test_lists_of_token_ids_are_rows() -> None:
    cache = GradientCache(micro_batch_size=3)
    tokens = [[row] * 5 for row in range(8)]
    out = cache.call(lambda tokens: torch.tensor(tokens, dtype=torch.float32), tokens)
    assert out.tolist() == tokens


def test_error_of_a_tower_has_a_note_of_its_arguments() -> None:
    attend = nn.MultiheadAttention(4, 1, batch_first=True)
    x, mask = torch.ones(8, 8, 4), torch.zeros(8, 8)  # a mask as long as the batch
    cache = GradientCache(micro_batch_size=3)
    with pytest.raises(RuntimeError, match="should be") as error:
        cache.call(attend, x, x, x, attn_mask=mask)
    if hasattr(error.value, "__notes__"):
        (note,) = error.value.__notes__
        assert note.startswith("In a micro-batch of the tower `MultiheadAttention`; its `roles`: ")
        assert "`attn_mask` [8, 8]" in note
    cache = GradientCache(micro_batch_size=3, roles={"attn_mask": "whole"})
    assert cache.call(attend, x, x, x, attn_mask=mask)[0].shape == x.shape


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x, [x, {"x": x}]),
        lambda x: Pair(x, x),
        lambda x: OrderedDict(x=x, y=[x]),
        lambda x: defaultdict(list, {"x": x}),
        lambda x: Frozen(x, Frozen(x)),
        lambda x: Computed([x]),
        lambda x: ADict(x=x, y=(x,)),
        lambda x: AList([x, x]),
        lambda x: ATuple((x, x)),
        lambda x: deque([x, x]),
        lambda x: Encoding({"x": x, "y": {"z": x}}, "kept"),
    ],
)
def test_micro_batches_get_containers_of_the_same_types(make: Callable[[list[str]], Any]) -> None:
    value, seen = make(list("abcd")), []

    def tower(value: Any, x: Tensor) -> Tensor:
        seen.append(value)
        return x

    GradientCache(micro_batch_size=3).call(tower, value, torch.ones(4, 2))
    assert seen == [make(list("abc")), make(["d"])]
    assert {type(each) for each in seen} == {type(value)}
    assert value == make(list("abcd"))
    if isinstance(value, Encoding):
        assert [each.note for each in seen] == ["kept", "kept"]


class Takes(nn.Module):
    """A tower with one output per row of a batch of eight."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, a: Any, b: Any = None, c: Any = None) -> Tensor:
        return torch.ones(8, 2)


def roles(
    *args: Any, declared: Any = None, batch: Any = None, tower: Takes | None = None
) -> dict[str, bool]:
    """Return for each argument whether the cache splits it, in a step with a batch."""
    model = nn.Module()
    model.tower = tower or Takes()
    cache = GradientCache(micro_batch_size=8, roles=declared)
    with cache.serving(model, ["tower"], batch):
        model.tower(*args)
    return {path: role != "whole" for path, role in cache.roles["tower"]["arguments"].items()}


ROWS, PROMPT = torch.ones(8, 3), torch.ones(4, 3)
STRINGS = list("abcdefgh")


@pytest.mark.parametrize(
    ("args", "settings", "expected"),
    [
        ((ROWS, torch.ones(3, 3)), {}, {"a": True, "b": False}),
        ((PROMPT, ROWS), {"batch": ROWS}, {"a": False, "b": True}),
        ((PROMPT, ROWS), {"declared": {"a": "whole"}}, {"a": False, "b": True}),
        ((PROMPT, ROWS), {"declared": {"b": "rows"}}, {"a": False, "b": True}),
        ((nn.Parameter(PROMPT), ROWS), {}, {"a": False, "b": True}),
        ((nn.Parameter(ROWS), ROWS), {}, {"a": False, "b": True}),
        ((ROWS, STRINGS, 1.5), {}, {"a": True, "b": True, "c": False}),
        ((STRINGS,), {}, {"a": True}),
        ((tuple(STRINGS), "flag"), {}, {"a": True, "b": False}),
        ((ROWS, [ROWS, ROWS]), {}, {"a": True, "b[0]": True, "b[1]": True}),
        ((ROWS, [torch.ones(3, n + 1) for n in range(8)]), {}, {"a": True, "b": True}),
        ((ROWS, [torch.ones(n + 4, 3) for n in range(8)]), {}, {"a": True, "b": True}),
        (([torch.ones(3, n + 1) for n in range(8)],), {"batch": ROWS}, {"a": True}),
        (([torch.ones(3, n + 1) for n in range(8)],), {"declared": {"a": "rows"}}, {"a": True}),
        ((ROWS, [{"boxes": torch.ones(n, 4)} for n in range(8)]), {}, {"a": True, "b": True}),
        ((np.ones((8, 3)), np.ones(3)), {}, {"a": True, "b": False}),
        ((ROWS, torch.arange(8)), {}, {"a": True, "b": True}),
        ((ROWS, torch.ones(8)), {"declared": {"b": "rows"}}, {"a": True, "b": True}),
        ((ROWS, torch.ones(8)), {"declared": {"b": "whole"}}, {"a": True, "b": False}),
        ((Encoding({"x": ROWS, "n": STRINGS}), 2), {}, {"a.x": True, "a.n": True, "b": False}),
        ((torch.ones(8),), {}, {"a": True}),
        ((torch.ones(8), 1.5), {}, {"a": True, "b": False}),
        ((torch.ones(8), torch.ones(8)), {}, {"a": True, "b": True}),
        ((torch.ones(8), nn.Parameter(ROWS)), {}, {"a": True, "b": False}),
        ((ROWS, np.ones(8), np.array(2.0)), {}, {"a": True, "b": True, "c": False}),
        ((ROWS, [ROWS] * 8), {}, {"a": True} | {f"b[{n}]": True for n in range(8)}),
        (([STRINGS, STRINGS],), {}, {"a[0]": True, "a[1]": True}),
        (([["hard", "negative"]] * 8,), {"batch": ROWS}, {"a": True}),
    ],
)
def test_roles_of_arguments(args: Any, settings: Any, expected: dict[str, bool]) -> None:
    assert roles(*args, **settings) == expected


def test_buffer_of_the_tower_with_as_many_rows_as_the_batch_is_whole() -> None:
    tower = Takes(mask=torch.ones(8, 8))
    assert roles(ROWS, tower.mask, tower=tower) == {"a": True, "b": False}


def test_arguments_have_dotted_paths_and_are_declared_by_any_part_of_them() -> None:
    value = {"batch": Encoding({"pixels": ROWS}), "images": [ROWS, ROWS], "out": Frozen(ROWS)}
    paths = ["a.batch.pixels", "a.images[0]", "a.images[1]", "a.out.x"]
    everything = dict.fromkeys(paths, True) | {"a.out.y": False}
    assert roles(value) == everything
    for name, matched in {
        "batch": paths[:1],
        "pixels": paths[:1],
        "a.batch.pixels": paths[:1],
        "images": paths[1:3],
        "a.images[1]": paths[2:3],
    }.items():
        found = roles(value, declared={name: "whole"})
        assert found == everything | dict.fromkeys(matched, False)
    for name in ("a.images[2]", "image"):
        with pytest.raises(ValueError, match=re.escape(f"is named {name!r}")):
            roles(value, declared={name: "whole"})


def test_further_positional_arguments_are_numbered() -> None:
    class Views(Takes):
        def forward(self, a: Any, *views: Any, flag: bool = False) -> Tensor:
            return torch.ones(8, 2)

    found = roles(ROWS, ROWS, PROMPT, tower=Views())
    assert found == {"a": True, "views[0]": True, "views[1]": False}


def test_vector_of_batch_length_raises_and_names_both_roles() -> None:
    with pytest.raises(ValueError, match=r"`b` of shape \[8\].*{'b': 'rows'}.*{'b': 'whole'}"):
        roles(ROWS, torch.ones(8))


def test_sequence_before_the_batch_raises() -> None:
    model, batch, tokens = nn.Module(), {"image": ROWS, "text": ROWS}, torch.ones(5, 8, 3)
    model.tower = nn.Linear(3, 3)
    message = r"`input` of shape \[5, 8, 3\] .* 8 rows.*`batch_first=True`"
    cache = GradientCache(micro_batch_size=2)
    with cache.serving(model, ["tower"], batch), pytest.raises(ValueError, match=message):
        model.tower(tokens)
    declared = GradientCache(micro_batch_size=2, roles={"input": "rows"})
    with declared.serving(model, ["tower"], batch):
        assert model.tower(tokens).shape == tokens.shape
    for rows in (16, 4):  # two views of each row; one item for two rows
        with GradientCache(micro_batch_size=2).serving(model, ["tower"], batch):
            assert model.tower(torch.ones(rows, 8, 3)).shape == (rows, 8, 3)


def test_declared_rows_of_another_length_raise() -> None:
    with pytest.raises(ValueError, match=r"`b`, \[4, 3\], which is declared as 'rows'"):
        roles(ROWS, PROMPT, declared={"a": "rows", "b": "rows"})


@pytest.mark.parametrize(
    "batch",
    [
        [ROWS, torch.ones(8, 2), torch.ones(3)],
        {"text": STRINGS, "n": 3},
        [STRINGS, ROWS],
        {"images": [torch.ones(4, n) for n in range(8)], "text": ROWS},
        {"tokens": [torch.ones(n + 4, 2) for n in range(8)], "text": ROWS},
        {"views": [ROWS, ROWS], "weights": torch.ones(2), "prompt": PROMPT},
        {"text": STRINGS, "tags": [], "notes": []},
        [[0] * 8, [1] * 8],
    ],
    ids=["tensors", "strings", "both", "images", "sequences", "views", "empty", "columns"],
)
def test_rows_of_a_batch_are_the_most_frequent_length(batch: Any) -> None:
    assert roles(PROMPT, ROWS, batch=batch) == {"a": False, "b": True}


def test_list_of_rows_is_split_in_a_last_batch_of_few_rows() -> None:
    model, cache = nn.Module(), GradientCache(micro_batch_size=2)
    model.tower = Captions(lambda x, images: x)
    model.tower.embed = nn.Identity()
    model.tower.forward = lambda images: torch.stack([image.mean() for image in images])[:, None]
    for rows in (8, 3, 2):  # as many rows as the images have channels, and fewer
        images = [torch.ones(3, n + 1, 4) for n in range(rows)]
        with cache.serving(model, ["tower"], {"images": images, "text": torch.ones(rows, 5)}):
            assert model.tower(images).shape == (rows, 1)


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, prompt: Tensor, batch: Tensor) -> Tensor:
        return self.linear(batch + prompt.mean(0))


def test_error_lists_the_inferred_roles() -> None:
    message = (
        r"`Prompted` returned a tensor of shape \[8, 3\].*taken as rows of the batch: "
        r"`prompt` \[4, 3\]; taken whole: `batch` \[8, 3\]"
    )
    with pytest.raises(ValueError, match=message):
        GradientCache(micro_batch_size=3).call(Prompted(), PROMPT, ROWS)
    cache = GradientCache(micro_batch_size=3, roles={"prompt": "whole"})
    tower = Prompted()
    assert torch.allclose(cache.call(tower, PROMPT, ROWS), tower(PROMPT, ROWS))


class Captions(nn.Module):
    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.embed, self.pack = nn.Embedding(200, 3), pack

    def forward(self, names: list[str]) -> Any:
        return self.pack(self.embed(torch.tensor([ord(name) for name in names])), names)


def test_lists_of_strings_are_split_and_concatenated() -> None:
    tower = Captions(lambda x, names: {"x": x, "names": [n.upper() for n in names], "flags": [1]})
    out = GradientCache(micro_batch_size=3).call(tower, STRINGS[:7])
    assert out["names"] == list("ABCDEFG")
    assert out["flags"] == [1], "not one of the row of the last micro-batch"
    out["x"].sum().backward()
    assert tower.embed.weight.grad[ord("a") : ord("h")].eq(1).all()


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (lambda x, names: object(), "returned a object without tensors"),
        (lambda x, names: names, "returned a list without tensors"),
        (lambda x, names: (x, names[0]), r"returned `\[1\]` of type str, which differs"),
        (lambda x, names: (x, [n for n in names if n != "h"]), r"`\[1\]` of type list, which dif"),
        (lambda x, names: {"x": x, names[0]: x}, r"for one micro-batch and"),
        (lambda x, names: {"x": x} | {n: 1 for n in names if n < "c"}, r"for one micro-batch and"),
    ],
)
def test_outputs_that_cannot_be_concatenated_raise(pack: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradientCache(micro_batch_size=3).call(Captions(pack), STRINGS)


class Hidden(nn.Module):
    """Returns features and all tokens, as Hugging Face's towers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        tokens = self.linear(batch)
        return {"last_hidden_state": tokens, "pooler_output": tokens.mean(1)}


def test_unused_outputs_draw_one_warning_with_bytes_and_name() -> None:
    cache, tower, batch = GradientCache(micro_batch_size=16), Hidden(), torch.ones(64, 2048, 4)
    unused = 64 * 2048 * 4 * 4
    message = rf"{unused:,} bytes .*`roles={{'last_hidden_state': 'left out'}}`"
    with pytest.warns(UserWarning, match=message):
        cache.call(tower, batch)["pooler_output"].sum().backward()
    cache.call(tower, batch)["pooler_output"].sum().backward()  # warnings are errors here


def test_outputs_without_grad_draw_no_warning_about_unused_outputs() -> None:
    linear = nn.Linear(4, 4)
    features, ids = GradientCache(micro_batch_size=16).call(
        lambda x: (linear(x), torch.zeros(len(x), 2048, dtype=torch.long)), torch.ones(64, 4)
    )
    (features + ids[:, :4]).sum().backward()  # warnings are errors here


def test_left_out_outputs_are_not_stored() -> None:
    tower, batch = Hidden(), torch.ones(64, 2048, 4)
    cache = GradientCache(micro_batch_size=16, roles={"last_hidden_state": "left out"})
    out = cache.call(tower, batch)
    assert out["last_hidden_state"] is None
    out["pooler_output"].sum().backward()
    expected = torch.autograd.grad(tower(batch)["pooler_output"].sum(), tower.linear.weight)[0]
    assert torch.allclose(tower.linear.weight.grad, expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"roles": {"prompt": "hole"}}, r"roles={'prompt': 'hole'}.*'hole' is not a role"),
        ({"replay_tolerance": -1.0}, "replay_tolerance=-1.0"),
        ({"replay_tolerance": float("nan")}, "replay_tolerance=nan"),
    ],
)
def test_bad_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradientCache(**{"micro_batch_size": 3, **settings})


@pytest.mark.parametrize("rows", [4, 3])
def test_array_that_differs_between_micro_batches_raises(rows: int) -> None:
    def tower(x: Tensor) -> dict[str, Any]:
        return {"features": 2 * x, "lengths": x.detach().numpy()[:, 0]}

    cache = GradientCache(micro_batch_size=2)
    with pytest.raises(ValueError, match="`lengths` of type ndarray.*'left out'"):
        cache.call(tower, torch.randn(rows, 3, requires_grad=True))
    cache = GradientCache(micro_batch_size=2, roles={"lengths": "left out"})
    assert cache.call(tower, torch.randn(rows, 3, requires_grad=True))["lengths"] is None
