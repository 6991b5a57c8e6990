"""`ContrastiveRecall` on two ranks against one process."""

import warnings

import pytest
import torch
from torch import Tensor

from lightning_mp.metrics import ContrastiveRecall
from tests.metrics.pairs import DTYPES, as_floats, compute_once, make_pairs
from tests.processes import run_ranks


def rank_rows(case: str, rank: int) -> list[Tensor]:
    """Returns the row numbers of each update of a rank; two ranks share 31 pairs."""
    uneven = [[torch.arange(0, 8), torch.arange(8, 19)], [torch.arange(19, 31)]]
    empty = [[], [torch.arange(0, 31)]]
    return (empty if case.startswith("empty") else uneven)[rank]


def distributed_batch(case: str) -> tuple[Tensor, ...]:
    batch = make_pairs(31, 31, 6, seed=4)
    dtype = torch.bfloat16 if case.endswith("bf16") else torch.float32
    features = (batch[0].to(dtype), batch[1].to(dtype))
    if "positions" in case:
        return features[0], features[0] + features[1]
    return (*features, *batch[2:])


DISTRIBUTED_CASES = [
    "uneven ids",
    "uneven positions",
    "empty ids bf16",
    "empty positions",
    "uneven positions bf16",
]


def compute_on_rank(rank: int) -> dict[str, object]:
    warnings.simplefilter("ignore")  # compute() before update() on the rank without data
    results: dict[str, object] = {}
    for case in DISTRIBUTED_CASES:
        batch = distributed_batch(case)
        metric = ContrastiveRecall(workspace_bytes=2_000)
        for rows in rank_rows(case, rank):
            metric.update(*(tensor[rows] for tensor in batch))
        results[case] = as_floats(metric.compute())
        metric.update(*(tensor[:1] for tensor in batch))  # still local, still accumulating
        results[f"{case} rows"] = sum(map(len, metric.image_features))
    errors = {
        "nothing": lambda m: None,
        "width": lambda m: m.update(torch.eye(3 + rank), torch.eye(3 + rank)),
        "dtype": lambda m: m.update(*[torch.eye(3, dtype=DTYPES[rank])] * 2),
        "mode": lambda m: m.update(*[torch.eye(3)] * 2, *[torch.arange(3)] * 2 * rank),
        "no match": lambda m: m.update(*[torch.eye(3)] * 2, torch.arange(3), torch.arange(3) + 9),
    }
    for case, feed in errors.items():
        metric = ContrastiveRecall()
        feed(metric)
        for attempt in range(2):  # the second finds the state local again
            try:
                metric.compute()
            except (ValueError, RuntimeError) as error:
                results[f"{case} {attempt}"] = str(error)
    return results


@pytest.fixture(scope="module")
def rank_results() -> list[dict[str, object]]:
    return run_ranks(compute_on_rank, 2)


@pytest.mark.distributed
@pytest.mark.parametrize("case", DISTRIBUTED_CASES)
def test_two_ranks_equal_one_process(case: str, rank_results: list[dict[str, object]]) -> None:
    expected = compute_once(*distributed_batch(case))
    assert 1 < expected["image_to_text_mean_rank"] < 12
    for rank, results in enumerate(rank_results):
        assert results[case] == expected
        assert results[f"{case} rows"] == sum(map(len, rank_rows(case, rank))) + 1


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nothing", "with 0 images and 0 texts"),
        ("width", "rank 0: width 3, torch.float32, no ids; rank 1: width 4"),
        ("dtype", "torch.float16, no ids; rank 1: width 3, torch.bfloat16"),
        ("mode", "no ids; rank 1: width 3, torch.float32, ids"),
        ("no match", "6 images and 6 texts without any equal ids"),
    ],
)
def test_two_ranks_raise_together_and_recover(
    case: str, message: str, rank_results: list[dict[str, object]]
) -> None:
    for results in rank_results:
        assert message in str(results[f"{case} 0"])
        assert message in str(results[f"{case} 1"])
