"""Fields of loader batches are concatenated by their roles; ambiguous fields raise."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from lightning_mp import ContrastiveLoss, InfCLStrategy
from tests.processes import run_ranks
from tests.strategies.models import TinyCLIP, gather_batches, loader, make_trainer, pairs

SEVERAL = {"image": "rows", "text": "rows", "positives": "row numbers of text"}


def several_texts(counts: list[int], seed: int = 0) -> dict[str, Tensor]:
    """Return a batch with several texts per image, numbered by `positives`."""
    generator = torch.Generator().manual_seed(seed)
    image, text = (
        torch.randn(n, 5, dtype=torch.float64, generator=generator)
        for n in (len(counts), sum(counts))
    )
    numbers = iter(range(sum(counts)))
    rows = [torch.tensor([next(numbers) for _ in range(count)]) for count in counts]
    positives = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    return {"image": image, "text": text, "positives": positives}


def loss_of(batch: dict[str, Tensor]) -> float:
    image, text = (F.normalize(batch[name], dim=1) for name in ("image", "text"))
    scale = torch.tensor(3.0, dtype=torch.float64)
    return ContrastiveLoss()(image, text, scale, positives=batch["positives"]).item()


@pytest.mark.parametrize("counts", [[2, 2, 2, 2], [3, 1, 2, 3], [1, 1, 1, 1]])
def test_several_texts_per_image_are_concatenated_with_shifted_row_numbers(
    counts: list[int],
) -> None:
    parts = [several_texts(counts, 1), several_texts(counts[::-1], 2)]
    whole = several_texts([*counts, *counts[::-1]])
    whole |= {name: torch.cat([part[name] for part in parts]) for name in ("image", "text")}
    roles = {**SEVERAL, "positives": "rows padded with -1"}  # the width of the widest loader batch
    (naive,) = gather_batches(parts, 2, **roles)
    (joined,) = gather_batches(parts, 2, **SEVERAL)
    assert torch.equal(joined["positives"], whole["positives"])
    assert loss_of(joined) == loss_of(whole)
    assert abs(loss_of(naive) - loss_of(whole)) > 0.01, "numbers that are only joined are others"


def test_several_texts_per_image_may_be_declared_as_rows_per_sample() -> None:
    parts = [several_texts([2] * 4, seed) for seed in range(3)]
    roles = {"text": "2 rows", "positives": "row numbers of text"}
    first, last = gather_batches(parts, 2, **roles)
    assert first["text"].shape == (16, 5)
    assert first["positives"].tolist() == [[2 * row, 2 * row + 1] for row in range(8)]
    assert last["positives"].tolist() == [[2 * row, 2 * row + 1] for row in range(4)]
    with pytest.raises(ValueError, match=r"`text` with 8 rows, but its role is '3 rows'"):
        list(gather_batches(parts, 2, text="3 rows", image="rows"))


@pytest.mark.parametrize("texts", [(9, 8), (8, 8)])
def test_undeclared_several_texts_raise_and_suggest_roles(texts: Any) -> None:
    batches = [{"image": torch.ones(4, 2), "text": torch.rand(n, 3)} for n in texts]
    shapes = rf"float32 of shape \[{texts[0]}, 3\] and torch.float32 of shape \[{texts[1]}, 3\]"
    declared = "rows" if texts[0] == 9 else "2 rows"
    message = rf"`text`, .*{shapes}.*roles={{'image': 'rows', 'text': '{declared}'}}"
    with pytest.raises(ValueError, match=message) as error:
        list(gather_batches(batches, 2))
    assert "tensor(" not in str(error.value)


@pytest.mark.parametrize(
    ("positives", "roles", "message"),
    [
        ([0, 4, 2, 3], {"positives": "row numbers"}, "neither from 0 to 3 nor"),
        ([0.0, 1.0, 2.0, 3.0], {"positives": "row numbers"}, "neither from 0 to 3 nor"),
        (
            [0, 1, 2, 3],
            {"positives": "row numbers of texts"},
            "no field with rows is named",
        ),
        (
            [0, 1, 2, 3],
            {"positives": "row numbers of image", "image": "whole"},
            "no field with rows is named",
        ),
    ],
)
def test_wrong_row_numbers_raise(
    positives: list[float], roles: dict[str, str], message: str
) -> None:
    batch = {"image": torch.ones(4, 2), "positives": torch.tensor(positives)}
    with pytest.raises(ValueError, match=message):
        list(gather_batches([batch, batch], 2, **roles))


@pytest.mark.parametrize(
    "kind", [list, tuple, np.asarray, torch.tensor, torch.int8, torch.uint8, torch.uint16]
)
def test_row_numbers_of_every_kind_are_shifted(kind: Any) -> None:
    is_dtype = isinstance(kind, torch.dtype)
    numbers = torch.arange(100).to(kind) if is_dtype else kind(list(range(100)))
    batches = [{"image": torch.ones(100, 2), "positives": numbers}] * 3
    (whole,) = gather_batches(batches, 3, positives="row numbers")
    assert [int(x) for x in whole["positives"]] == list(range(300))  # 299 does not fit into int8
    assert type(whole["positives"]) is type(numbers)


IDS = {
    "distinct": (torch.arange(16), True),
    "of captions": (torch.arange(16) // 5, True),
    "shuffled": (torch.tensor([3, 1, 0, 2] * 4), True),
    "indices of the data set": (torch.arange(16) + 100, False),
    "with gaps": (torch.arange(16) * 2, False),
    "one class": (torch.zeros(16, dtype=torch.long), False),
}


@pytest.mark.parametrize("case", IDS)
def test_ids_numbered_within_a_loader_batch_raise(case: str) -> None:
    ids, is_local = IDS[case]
    batches = [{"image": torch.ones(16, 2), "ids": ids}] * 2
    if not is_local:
        (whole,) = gather_batches(batches, 2)
        assert torch.equal(whole["ids"], torch.cat([ids, ids]))
        return
    with pytest.raises(ValueError, match=r"equal ids would not.*roles={'ids': 'rows'}"):
        list(gather_batches(batches, 2))
    (whole,) = gather_batches(batches, 2, ids="rows")  # class labels
    assert torch.equal(whole["ids"], torch.cat([ids, ids]))


def test_ids_of_the_data_set_are_concatenated() -> None:
    batches = [{"image": torch.ones(8, 2), "ids": torch.arange(8) + 8 * n} for n in range(4)]
    (whole,) = gather_batches(batches, 4)
    assert whole["ids"].tolist() == list(range(32))


@pytest.mark.parametrize(
    "values",
    [
        np.array(["a", "b"]),
        np.array([{"a": 1}, None], dtype=object),
        np.array(["2026-01-01", "2026-01-02"], dtype="datetime64[D]"),
        torch.tensor([2**63 + 5, 7], dtype=torch.uint64),
        torch.tensor([1j, 2j]),
        [2**64, 2**70],
        torch.full((2,), -1),
        torch.arange(8) - 4,
        torch.arange(8) + 1,
    ],
    ids=lambda values: str(getattr(values, "dtype", "large")),
)
def test_values_that_are_no_row_numbers_are_concatenated(values: Any) -> None:
    for name in ("ids", "labels"):  # warnings are errors here
        batches = [{"x": torch.rand(len(values), 2).bfloat16(), name: values}] * 2
        (whole,) = gather_batches(batches, 2)
        assert list(whole[name]) == [*values, *values]


@pytest.mark.parametrize(
    "values",
    [
        [torch.rand(3, n + 1, 4) for n in range(8)],
        [torch.rand(n + 1, 3) for n in range(8)],  # the length of one is that of the batch
        [{"boxes": torch.rand(n, 4), "label": n} for n in range(8)],
        [["one caption"], ["a", "b"], [], ["four"] * 4] * 2,
    ],
    ids=["images", "sequences", "targets", "captions"],
)
def test_lists_with_one_item_per_row_are_concatenated(values: list[Any]) -> None:
    parts = values[:4], values[4:6], values[6:]  # the last batches of few rows
    for make_text in (lambda n: torch.rand(n, 2), lambda n: ["text"] * n):
        batches = [{"values": part, "text": make_text(len(part))} for part in parts]
        (whole,) = gather_batches(batches, 3)
        assert [id(x) for x in whole["values"]] == [id(x) for x in values]


def test_lists_of_token_ids_are_rows() -> None:
    batches = [{"input_ids": [[n] * 7] * 4, "mask": [[1] * 7, [], [0], [1]]} for n in range(3)]
    (whole,) = gather_batches(batches, 3)
    assert whole == {
        "input_ids": [[n] * 7 for n in range(3) for _ in range(4)],
        "mask": [[1] * 7, [], [0], [1]] * 3,
    }


def test_a_list_of_strings_may_be_the_whole_batch() -> None:
    assert list(gather_batches([["a", "b"], ["c"]], 2)) == [["a", "b", "c"]]


def test_lists_of_columns_are_concatenated_column_by_column() -> None:
    batches = [{"names": [["a"] * n, ["b"] * n], "text": torch.rand(n, 2)} for n in (4, 2)]
    for order in (batches, batches[::-1]):
        (whole,) = gather_batches(order, 2)
        assert whole["names"] == [["a"] * 6, ["b"] * 6]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.nested.nested_tensor(x, layout=torch.jagged),
        pack_sequence,
    ],
    ids=["nested", "packed"],
)
def test_nested_and_packed_tensors_raise(make: Any) -> None:
    # As many rows as a packed sequence has parts.
    batches = [{"x": torch.rand(4, 2), "n": make([torch.ones(n)] * 4)} for n in (1, 2)]
    with pytest.raises(ValueError, match=r"`n`, which differs .*: (\(nested|a PackedSequence of)"):
        list(gather_batches(batches, 2))


@pytest.mark.parametrize(
    "sample",
    [lambda n: (f"q{n}", f"p{n}"), lambda n: {"q": f"q{n}"}, lambda n: (torch.ones(3, n + 1), n)],
    ids=["tuples", "dicts", "tensors"],
)
def test_samples_that_no_collate_function_combines_are_rows(sample: Any) -> None:
    samples = [sample(n) for n in range(10)]
    loader = DataLoader(samples, batch_size=4, collate_fn=list)
    first, last = gather_batches(loader, 2)
    assert [*first, *last] == samples
    assert len(first) == 8


def test_sequences_of_different_lengths_are_padded_as_declared() -> None:
    lengths = (3, 5, 2)
    batches = [
        {"tokens": torch.full((4, n), n), "attention_mask": torch.ones(4, n, dtype=torch.bool)}
        | {"tokens_length": torch.full((4,), n)}
        for n in lengths
    ]
    padded = {name: "rows padded with 9" for name in ("tokens", "tokens_length")}
    (whole,) = gather_batches(batches, 3, **padded, attention_mask="mask")
    assert whole["tokens_length"].tolist() == [n for n in lengths for _ in range(4)]
    expected = [[n] * n + [9] * (5 - n) for n in lengths for _ in range(4)]
    assert whole["tokens"].tolist() == expected
    assert whole["attention_mask"].sum(1).tolist() == [n for n in lengths for _ in range(4)]
    assert whole["attention_mask"].dtype == torch.bool
    with pytest.raises(ValueError, match=r"roles={'tokens': 'rows padded with 0'}"):
        list(gather_batches(batches, 3, attention_mask="mask"))
    lists = [{"tokens": [[1], [2, 3]], "n": torch.ones(2)}] * 2
    with pytest.raises(ValueError, match=r"`tokens`, declared as .* Only tensors can be padded"):
        list(gather_batches(lists, 2, tokens="rows padded with 9"))


@pytest.mark.parametrize("positives", [np.arange(4), list(range(4)), torch.arange(4)])
def test_row_numbers_stay_on_the_host_under_another_default_device(positives: Any) -> None:
    batches = [{"text": torch.ones(4, 2), "positives": positives} for _ in range(2)]
    with torch.device("meta"):
        (whole,) = gather_batches(batches, 2, positives="row numbers of text")
    assert [int(number) for number in whole["positives"]] == list(range(8))


def test_whole_value_that_only_one_loader_batch_has_raises_and_nan_is_equal_to_itself() -> None:
    always = {"rate": float("nan"), "scale": 2.0}
    batches = [
        {"x": torch.ones(4, 2), "mask": None}
        | {name: torch.tensor(x) for name, x in always.items()}
        for _ in range(2)
    ]
    batches = [batch | {"rates": always["rate"]} for batch in batches]
    (whole,) = gather_batches(batches, 2)
    assert len(whole["x"]) == 8
    for name, value in {"mask": torch.ones(4, 3), "scale": torch.tensor(3.0)}.items():
        changed = [batches[0], batches[1] | {name: value}]
        with pytest.raises(ValueError, match=f"`{name}`, which differs .* (of type N|\\[\\] and)"):
            next(iter(gather_batches(changed, 2)))


def test_whole_field_stays_whole_in_a_short_loader_batch() -> None:
    classes, prompt = ["cat", "dog"], torch.rand(2, 3)
    sizes = (4, 4, 2)
    shared = {"classes": classes, "prompt": prompt, "places": torch.arange(10)}
    batches = [{"x": torch.rand(n, 2), **shared} for n in sizes]
    first, last = gather_batches(batches, 2)
    for whole in (first, last):
        assert whole["classes"] == classes
        assert torch.equal(whole["prompt"], prompt)
    assert [len(whole["x"]) for whole in (first, last)] == [8, 2]
    (declared,) = gather_batches(batches, 3, places="whole")
    assert len(declared["x"]) == 10
    batches[1]["classes"] = ["cat", "cow"]
    with pytest.raises(ValueError, match="`classes`, which differs .* a list of 2 and a list of 2"):
        list(gather_batches(batches, 2))


@pytest.mark.parametrize(
    "values", [("a secret", "another"), (torch.tensor(1.5), torch.tensor(2.5))]
)
def test_messages_contain_no_values_of_the_data_set(values: Any) -> None:
    with pytest.raises(ValueError, match="`n`, which differs between loader batches") as error:
        list(gather_batches([{"x": torch.rand(4, 2), "n": value} for value in values], 2))
    assert not any(word in str(error.value) for word in ("secret", "tensor(", "1.5"))


def test_field_with_another_number_of_rows_raises() -> None:
    batches = [{"x": torch.rand(4, 2), "y": torch.rand(n, 2), "z": torch.rand(4)} for n in (4, 1)]
    with pytest.raises(ValueError, match="`y` with 1 rows, but its role is 'rows'"):
        list(gather_batches(batches, 2))


def test_strategy_returns_the_roles_of_the_fields_of_a_batch() -> None:
    strategy = InfCLStrategy(roles={**SEVERAL, "prompt": "whole"})
    batch = {**several_texts([2, 1]), "prompt": torch.ones(2, 3), "names": ["a", "b"], "n": 3}
    assert strategy.roles_of(batch) == {
        "batch": {"fields": {**SEVERAL, "prompt": "whole", "names": "rows", "n": "whole"}}
    }


def test_roles_of_towers_are_known_after_the_run() -> None:
    strategy = InfCLStrategy(micro_batch_size=4)
    make_trainer(strategy, max_steps=1).fit(TinyCLIP(), loader(8, 8))
    assert strategy.roles_of()["text"] == {"arguments": {"input": "rows"}, "outputs": {"": "rows"}}


def _batches(positives: Any, count: int = 2) -> list[dict[str, Any]]:
    return [{"image": torch.ones(8, 2), "extra": {"positives": positives}} for _ in range(count)]


@pytest.mark.parametrize(
    "positives",
    [
        torch.arange(8).flip(0),
        torch.tensor([[row, -1] for row in range(8)], dtype=torch.int32),
        np.arange(8),
        list(range(8)),
        torch.tensor([[0, 1], *([row, -1] for row in range(2, 9))]),  # nine texts
    ],
    ids=["permuted", "padded", "array", "list", "several texts"],
)
def test_positives_numbered_within_a_loader_batch_raise(positives: Any) -> None:
    gathered = gather_batches(_batches(positives), 2)
    with pytest.raises(ValueError, match=r"`extra.positives` .* numbers the rows of each loader"):
        list(gathered)
    (alone,) = gather_batches(_batches(positives, 1), 2)  # nothing is concatenated
    assert len(alone["image"]) == 8


@pytest.mark.parametrize(
    "positives",
    [
        torch.arange(8) % 3,
        torch.randint(50, 1000, (8, 5)),  # tokens of positive texts
        torch.rand(8),
        torch.ones(8, 4, dtype=torch.bool),
    ],
)
def test_positives_that_are_not_row_numbers_are_concatenated(positives: Tensor) -> None:
    (whole,) = gather_batches(_batches(positives), 2)
    assert torch.equal(whole["extra"]["positives"], torch.cat([positives] * 2))


def test_row_numbers_under_another_name_warn_and_are_concatenated() -> None:
    rows = torch.arange(8)
    with pytest.warns(UserWarning, match=r"`\[1\]` .*If the numbers are labels"):
        list(gather_batches([(torch.ones(8, 2), rows)] * 2, 2))
    later = [(torch.ones(8, 2), rows), (torch.ones(8, 2), rows + 8)]  # row numbers of the data set
    (whole,) = gather_batches(later, 2)
    assert torch.equal(whole[1], torch.arange(16))
    few = [(torch.ones(2, 2), torch.arange(2))] * 2  # labels may look like row numbers
    (whole,) = gather_batches(few, 2)
    assert whole[1].tolist() == [0, 1, 0, 1]


class WithIds(TinyCLIP):
    """Takes dictionaries with ids that its loss does not use."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor | None:
        return super().training_step([batch["image"], batch["text"]], batch_idx)


def _warnings(rank: int) -> list[int]:
    counts = []
    for step, roles in ((1, {}), (100, {}), (1, {"ids": "rows"})):
        rows = [
            {"image": image, "text": text, "ids": step * index}
            for index, (image, text) in enumerate(pairs(8))
        ]
        strategy = InfCLStrategy(micro_batch_size=4, roles=roles)
        # All ranks have the same rows and so the same numbers.
        trainer = make_trainer(strategy, devices=2, max_epochs=2, use_distributed_sampler=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(WithIds(dropout=0.0), DataLoader(rows, batch_size=8))
        counts.append(sum("Every rank numbers" in str(w.message) for w in caught))
    return counts


@pytest.mark.distributed
def test_ids_that_every_rank_numbers_from_0_warn_once() -> None:
    assert run_ranks(_warnings, 2) == [[1, 0, 0], [0, 0, 0]]
