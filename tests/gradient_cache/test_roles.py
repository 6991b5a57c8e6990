"""Roles of arguments and outputs: declared or inferred, and kept from call to call."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import GradientCache

BATCH, WIDTH = 6, 4


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("rows", 4),
        ("5 rows", 20),
        ("rows padded with 0", 4),
        ("3 rows padded with -100", 12),
        ("mask", 4),
        ("mask of 3 rows", 12),
        ("row numbers", 4),
        ("row numbers of batch.text", 4),
        ("whole", 7),
    ],
)
def test_roles_of_arguments_are_parsed_and_printed(words: str, rows: int) -> None:
    def tower(first: Tensor, x: Tensor) -> Tensor:
        return first

    cache = GradientCache(micro_batch_size=4, roles={"x": words})
    cache.call(tower, torch.ones(4, 2), torch.ones(rows, 5).long())
    assert cache.roles["tower"]["arguments"] == {"first": "rows", "x": words}


@pytest.mark.parametrize("words", ["mean", "sum", "left out"])
def test_roles_of_outputs_are_parsed_and_printed(words: str) -> None:
    def tower(first: Tensor) -> dict[str, Tensor]:
        return {"first": first, "x": first.sum()}

    cache = GradientCache(micro_batch_size=4, roles={"x": words})
    cache.call(tower, torch.ones(4, 2))
    kept = {} if words == "left out" else {"x": words}
    assert cache.roles["tower"]["outputs"] == {"first": "rows", **kept}


@pytest.mark.parametrize("words", ["row", "0 rows", "rows padded with", "wholes", ""])
def test_invalid_role_texts_raise(words: str) -> None:
    with pytest.raises(ValueError, match=r"roles=\{'x': .* must be a mapping of names to roles"):
        GradientCache(micro_batch_size=2, roles={"x": words})


class Joint(nn.Module):
    """Takes images with three texts each, and returns the outputs of a whole model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.visual, self.text = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, text: Tensor, image: Tensor, names: Any = None) -> dict[str, Tensor]:
        x, y = self.visual(image), self.text(text).tanh()
        pairs = (x[:, None] * y.view(len(x), -1, WIDTH)).sum(-1)
        assert names is None or len(names) == len(text)
        return {"image": x, "text": y, "loss": pairs.square().sum(), "table": self.text.weight.T}


def loss_of(out: dict[str, Tensor]) -> Tensor:
    scores = out["image"] @ out["text"].T @ out["table"].mean().exp()[None, None].expand(18, 18)
    return scores.logsumexp(1).mean() + 0.1 * out["loss"].square()


JOINT = {"text": "3 rows", "names": "3 rows", "loss": "sum", "table": "whole"}


@pytest.mark.parametrize("rows", [1, 2, 4, 6, "auto"])
def test_several_rows_per_sample_sums_and_constants_have_exact_gradients(rows: Any) -> None:
    tower = Joint().double()
    image = torch.randn(BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
    text = torch.randn(3 * BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = [image, text, *tower.parameters()]
    plain = tower(text, image)
    expected = torch.autograd.grad(loss_of(plain), inputs)
    cache = GradientCache(micro_batch_size=rows, roles=JOINT, activation_bytes=2**11)
    out = cache.call(tower, text, image, names=[str(n) for n in range(3 * BATCH)])
    for name, value in out.items():
        assert torch.allclose(value, plain[name], rtol=1e-13)
    for value, wanted in zip(torch.autograd.grad(loss_of(out), inputs), expected, strict=True):
        # float64 sums in a different order.
        assert torch.allclose(value, wanted, rtol=1e-11, atol=1e-13)
    assert cache.roles["Joint"] == {
        "arguments": {"text": "3 rows", "image": "rows", "names": "3 rows"},
        "outputs": {"image": "rows", "text": "3 rows", "loss": "sum", "table": "whole"},
    }


def test_several_rows_per_sample_alone_in_a_call_are_rows() -> None:
    tower, text = nn.Linear(WIDTH, WIDTH), torch.randn(18, WIDTH)
    seen: list[int] = []
    tower.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    cache = GradientCache(micro_batch_size=6, roles={"input": "3 rows"})
    assert torch.allclose(cache.call(tower, text), tower(text), atol=1e-6)
    assert seen[2:5] == [6, 6, 6], "after a trial of two and of three rows"


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (
            {"image": "rows", "text": "2 rows"},
            r"`text`, \[18, 4\], which is declared as '2 rows'",
        ),
        ({**JOINT, "loss": "rows"}, r"`loss` of shape \[\] .* 2 rows were expected"),
        ({name: JOINT[name] for name in ("text", "loss")}, r"`table` of shape \[4, 4\]"),
    ],
)
def test_wrong_roles_raise_and_name_the_argument(roles: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradientCache(micro_batch_size=2, roles=roles).call(
            Joint(), torch.randn(18, WIDTH), torch.randn(6, WIDTH)
        )


class Sees(nn.Module):
    """Records whether the last call got only some rows of the mask."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.rows = len(mask)
        return x


def has_rows(cache: GradientCache, tower: Sees, rows: int, mask: Tensor) -> bool:
    cache.call(tower, torch.ones(rows, 2), mask)
    return tower.rows < len(mask)


def test_whole_argument_stays_whole_beside_a_batch_of_its_length() -> None:
    earlier, prompt = (GradientCache(micro_batch_size=4), Sees()), torch.ones(8, 2)
    assert not has_rows(*earlier, 12, prompt)
    assert not has_rows(*earlier, 8, prompt), "the last batch of an epoch"
    assert has_rows(*earlier, 12, torch.ones(12, 2))
    has_rows(*earlier, 1, torch.ones(1, 2))  # a batch of one row
    assert not has_rows(*earlier, 12, torch.ones(1, 2)), "broadcast"
    assert has_rows(GradientCache(micro_batch_size=4), Sees(), 8, prompt), "nothing known before"


def test_mask_of_changing_length_stays_whole_beside_a_batch_of_its_length() -> None:
    earlier = GradientCache(micro_batch_size=4), Sees()
    for length in (5, 9, 8):
        assert not has_rows(*earlier, 8, torch.ones(length, length))


def test_argument_split_by_chance_raises_in_a_later_call() -> None:
    earlier, prompt = (GradientCache(micro_batch_size=4), Sees()), torch.ones(8, 2)
    assert has_rows(*earlier, 8, prompt)
    with pytest.raises(ValueError, match=r"`mask` of shape \[8, 2\] .* with 12 rows.*'whole'"):
        has_rows(*earlier, 12, prompt)


def test_roles_are_logged_once_per_tower(logged: list[str]) -> None:
    logging.getLogger("lightning_mp").setLevel(logging.DEBUG)
    cache, tower = GradientCache(micro_batch_size=2), nn.Linear(WIDTH, WIDTH)
    for _ in range(2):
        cache.call(tower, torch.randn(BATCH, WIDTH))
    (line,) = [each for each in logged if "Roles in the call" in each]
    assert "`Linear`" in line
    assert "{'input': 'rows'}" in line


class Reads(nn.Module):
    """A small transformer that returns tokens, their mean, and their number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.lengths: list[int] = []

    def forward(
        self, ids: Tensor, attention_mask: Tensor, bias: Tensor | None = None
    ) -> dict[str, Tensor]:
        self.lengths.append(ids.shape[1])
        x = self.embed(ids) if bias is None else self.embed(ids) + bias
        x = self.layer(x, src_key_padding_mask=attention_mask == 0)
        mask = attention_mask[..., None].to(x.dtype)
        mean, number = (x * mask).sum(1) / mask.sum(1), attention_mask.sum(1)
        return {"tokens": x * mask, "mean": mean, "number": number}


LENGTHS = [3, 2, 7, 5, 1, 4]
PADDED = {"ids": "rows padded with 0", "attention_mask": "mask", "bias": "rows padded with 0"}


@pytest.mark.parametrize("rows", [1, 2, 4, 6])
@pytest.mark.parametrize("on_left", [False, True])
def test_padding_is_cut_to_the_longest_row_of_a_micro_batch(rows: int, on_left: bool) -> None:
    tower = Reads().double()
    mask = (torch.arange(9) < torch.tensor(LENGTHS)[:, None]).long()
    mask = mask.flip(1) if on_left else mask
    ids = torch.randint(1, 50, (6, 9)) * mask
    bias = torch.randn(6, 9, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = [bias, *tower.parameters()]

    def differentiated(out: dict[str, Tensor]) -> tuple[Tensor, ...]:
        loss = (out["mean"] @ out["mean"].T).logsumexp(1).sum() + out["tokens"].square().sum()
        return torch.autograd.grad(loss, inputs)

    plain = tower(ids, mask, bias)
    expected = differentiated(plain)
    padded = dict.fromkeys(["tokens", "number"], "rows padded with 0")
    cache = GradientCache(micro_batch_size=rows, roles={**PADDED, **padded})
    tower.lengths.clear()
    out = cache.call(tower, ids, mask, bias=bias)
    parts = [LENGTHS[start : start + rows] for start in range(0, 6, rows)]
    seen = tower.lengths[-len(parts) :]  # after the shape check
    assert seen == [9 if on_left else max(part) for part in parts]
    for name, value in out.items():
        assert value.shape == plain[name].shape
        assert torch.allclose(value, plain[name], atol=1e-14)
    for value, wanted in zip(differentiated(out), expected, strict=True):
        assert torch.allclose(value, wanted, rtol=1e-10, atol=1e-12)


class ReadsBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text = Reads()

    def forward(self, query: Any, document: Any, table: Tensor) -> dict[str, Tensor]:
        query, document = (self.text(**text)["tokens"] for text in (query, document))
        return {"query": query, "document": document, "table": table}


@pytest.mark.parametrize("lengths", [(9, 12), (12, 9)])
def test_two_padded_sequences_are_told_apart_if_their_longest_rows_agree(lengths: Any) -> None:
    tower, texts = ReadsBoth(), []
    for length in lengths:
        mask = (torch.arange(length) < torch.tensor([4, 3, 7, length])[:, None]).long()
        texts.append({"ids": torch.randint(1, 50, mask.shape) * mask, "attention_mask": mask})
    table = torch.randn(4, lengths[0])  # as wide as the queries are long
    roles = dict.fromkeys(["query", "document"], "rows padded with 0") | {"attention_mask": "mask"}
    out = GradientCache(micro_batch_size=2, roles=roles).call(tower, *texts, table)
    for name, expected in tower(*texts, table).items():
        torch.testing.assert_close(out[name], expected)


class Described(nn.Module):
    """Takes images with two descriptions each."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = nn.Linear(WIDTH, WIDTH), Reads()

    def forward(self, image: Tensor, ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"image": self.visual(image), "text": self.text(ids, attention_mask)["mean"]}


def test_masks_of_several_rows_per_sample_cut_padding() -> None:
    tower, image = Described().double(), torch.randn(3, WIDTH, dtype=torch.float64)
    mask = (torch.arange(9) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(1, 50, (6, 9)) * mask
    plain = tower(image, ids, mask)
    roles = {"ids": "2 rows padded with 0", "attention_mask": "mask of 2 rows"}
    out = GradientCache(micro_batch_size=1, roles=roles).call(tower, image, ids, mask)
    assert tower.text.lengths[-3:] == [3, 7, 4]
    for name, value in out.items():
        assert torch.allclose(value, plain[name], atol=1e-14)


def test_mask_of_another_shape_raises() -> None:
    cache = GradientCache(micro_batch_size=2, roles=PADDED)
    with pytest.raises(ValueError, match="declared as 'mask' but is not a tensor of shape"):
        cache.call(Reads(), torch.ones(4, 3, dtype=torch.long), torch.ones(4, 1, 3))
