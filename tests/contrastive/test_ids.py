"""Pairs with equal ids are masked in both losses, on one process and on several ranks."""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mp import ContrastiveLoss, SigmoidContrastiveLoss
from tests.contrastive.test_exchange import EXCHANGES, TwoTowers, _pairs, _ranks_own, check_steps
from tests.processes import run_ranks
from tests.reference.contrastive import relative_error

LOSSES = {"softmax": ContrastiveLoss, "sigmoid": SigmoidContrastiveLoss}


def dense(
    name: str, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, ids: Tensor
) -> Tensor:
    logits = scale * image @ text.T + (bias if name == "sigmoid" else 0.0)
    return of_logits(name, ids, logits)


def of_logits(name: str, ids: Tensor, logits: Tensor) -> Tensor:
    """Return the loss with duplicates masked in every sum, for autograd."""
    own = torch.eye(len(ids), dtype=torch.bool)
    logits = logits.masked_fill((ids[:, None] == ids) & ~own, -torch.inf)
    if name == "sigmoid":
        return (F.softplus(logits[~own]).sum() + F.softplus(-logits.diagonal()).sum()) / len(ids)
    target = torch.arange(len(ids))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def few_ids(b: int, seed: int) -> Tensor:
    """Return 64-bit ids of both signs; most rows share their id with one or two others."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-b // 4, b // 4 + 1, (b,), generator=generator) * 2**40


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("workspace_bytes", [1, 400_000, 2**25])
def test_pairs_of_equal_ids_are_masked(name: str, dtype: torch.dtype, workspace_bytes: int) -> None:
    b = 193
    features = [F.normalize(torch.randn(b, 24), dim=1).to(dtype) for _ in range(2)]
    inputs = [x.requires_grad_() for x in (*features, torch.tensor(20.0), torch.tensor(-5.0))]
    ids = few_ids(b, 0)
    loss_fn = LOSSES[name]()
    loss_fn.workspace_bytes = workspace_bytes
    loss = loss_fn(*inputs, ids=ids)
    found = [loss.detach(), *torch.autograd.grad(loss, inputs)]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    right = dense(name, *doubles, ids)
    expected = [right.detach(), *torch.autograd.grad(right, doubles, allow_unused=True)]
    # Logits near 20 are rounded to multiples of 2e-6, and of the scale's gradient much cancels.
    for value, other in zip(found, expected, strict=True):
        bound = 4e-5 if value.dtype == torch.float32 else max(torch.finfo(dtype).eps, 1e-13)
        assert value.abs().sum() == 0 if other is None else relative_error(value, other) < bound


@pytest.mark.parametrize("name", LOSSES)
def test_distinct_ids_change_nothing(name: str) -> None:
    image, text = (F.normalize(torch.randn(70, 24), dim=1) for _ in range(2))
    inputs = [x.requires_grad_() for x in (image, text, torch.tensor(20.0))]
    results = []
    for ids in (None, torch.randperm(70)):
        loss = LOSSES[name]()(*inputs, ids=ids)
        results.append([loss.detach(), *torch.autograd.grad(loss, inputs)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_perfect_features_with_duplicate_ids_have_zero_loss() -> None:
    features = torch.eye(6)[[0, 0, 1, 2, 3, 4]]
    assert ContrastiveLoss()(features, features, 100.0) == pytest.approx(math.log(2) / 3, rel=1e-5)
    assert (
        ContrastiveLoss()(features, features, 100.0, ids=torch.tensor([7, 7, 1, 2, 3, 4])) < 1e-30
    )


def test_batch_with_a_single_id_has_no_negatives() -> None:
    image = torch.randn(9, 4, requires_grad=True)
    loss = ContrastiveLoss()(image, torch.randn(9, 4), 5.0, ids=torch.zeros(9, dtype=torch.int32))
    loss.backward()
    assert loss == 0
    assert torch.equal(image.grad, torch.zeros(9, 4))


def _step(rank: int, sizes: list[int], seed: int, name: str, exchange: str) -> dict[str, Tensor]:
    model = nn.parallel.DistributedDataParallel(TwoTowers())
    image, text = (_ranks_own(x, sizes, rank) for x in _pairs(sum(sizes), seed))
    options: dict[str, Any] = dict(EXCHANGES[exchange])
    workspace_bytes = options.pop("workspace_bytes", None)
    loss_fn = LOSSES[name](**options)
    loss_fn.workspace_bytes = workspace_bytes
    loss = loss_fn(*model(image, text), ids=_ranks_own(few_ids(sum(sizes), seed), sizes, rank))
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.module.named_parameters()}}


def _steps(rank: int, sizes: list[int], seed: int) -> dict[tuple[str, str], dict[str, Tensor]]:
    cases = itertools.product(LOSSES, EXCHANGES)
    return {case: _step(rank, sizes, seed, *case) for case in cases}


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [[8, 8], [13, 6], [5, 7, 1, 11]])
def test_pairs_of_equal_ids_on_other_ranks_are_masked(sizes: list[int]) -> None:
    seed = torch.seed() % 2**31
    by_rank = run_ranks(_steps, len(sizes), sizes, seed)
    for name in LOSSES:
        formula = functools.partial(of_logits, name, few_ids(sum(sizes), seed))
        steps = [{e: cases[name, e] for e in EXCHANGES} for cases in by_rank]
        check_steps(formula, sizes, seed, steps)


def _message(rank: int) -> str:
    image, text = torch.randn(3, 4), torch.randn(3, 4)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        ContrastiveLoss()(image, text, 1.0, ids=torch.arange(3) if rank == 1 else None)
    return str(error.value)


@pytest.mark.distributed
def test_ids_on_some_ranks_only_raise_on_all_ranks() -> None:
    assert all(
        "Passed `ids` to `ContrastiveLoss` on ranks [1] of 2 only" in said
        for said in run_ranks(_message, 2)
    )


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (torch.zeros(4), r"dtype torch.float32 and shape \[4\].*integers of shape \[texts\]"),
        (torch.arange(3), r"shape \[3\] with texts of shape \[4, 2\]"),
        ([1, 2, 3, 4], r"type list.*Pass `torch.tensor\(ids\)`"),
    ],
)
def test_invalid_ids_raise(ids: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ContrastiveLoss()(torch.randn(4, 2), torch.randn(4, 2), 1.0, ids=ids)


@pytest.mark.slow
def test_ids_compile_without_graph_break() -> None:
    image, text = (torch.randn(20, 8, requires_grad=True) for _ in range(2))
    ids = few_ids(20, 1)
    compiled = torch.compile(ContrastiveLoss(), backend="aot_eager", fullgraph=True)
    results = []
    for function in (ContrastiveLoss(), compiled):
        loss = function(image, text, 3.0, ids=ids)
        results.append([loss.detach(), *torch.autograd.grad(loss, (image, text))])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
