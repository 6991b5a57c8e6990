"""Both exchanges with DDP's mean equal one process with the global batch."""

import itertools
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp import ContrastiveLoss
from lightning_mp.contrastive._exchange.exchange import FollowingSum, Ring, Sending
from lightning_mp.contrastive._exchange.padding import Padding
from lightning_mp.contrastive._exchange.slices import SlicedSum, Slices, block_bytes, slice_count
from lightning_mp.contrastive._tiles.torch_tiles import TorchTiles
from tests.contrastive.visible import visible
from tests.processes import run_ranks
from tests.reference.contrastive import dense_loss, loss_of_logits, relative_error

BATCHES = {
    1: [[16]],
    2: [[8, 8], [13, 6], [1, 9]],
    3: [[1, 1, 2], [7, 12, 6]],
    4: [[5, 7, 3, 11], [1, 1, 1, 1], [2, 1, 30, 1]],
}


class TwoTowers(nn.Module):
    """Two small towers with a logit scale and bias, equal on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.visual = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 24))
        self.text = nn.Linear(12, 24)
        self.log_scale = nn.Parameter(torch.tensor(3.0))
        self.bias = nn.Parameter(torch.tensor(-10.0))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        features = (self.visual(image), self.text(text))
        return (*(F.normalize(x, dim=-1) for x in features), self.log_scale.exp(), self.bias)


def _pairs(batch: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(batch, 12, generator=generator)
    return image, 0.5 * image + torch.randn(batch, 12, generator=generator)


def _ranks_own(tensor: Tensor, sizes: list[int], rank: int) -> Tensor:
    start = [0, *accumulate(sizes)][rank]
    return tensor[start : start + sizes[rank]]


# A workspace of 9 kB cuts the shards of these tests into 2 to 6 slices.
EXCHANGES: dict[str, dict[str, Any]] = {
    "ring": {"exchange": "ring"},
    "one slice": {"exchange": "slices"},
    "many slices": {"exchange": "slices", "workspace_bytes": 9_000},
}


def make_loss(name: str, **options: Any) -> ContrastiveLoss:
    """Return a loss; its workspace may be smaller than the constructor accepts."""
    options = {**EXCHANGES[name], **options}
    workspace_bytes = options.pop("workspace_bytes", None)
    loss = ContrastiveLoss(**options)
    loss.workspace_bytes = workspace_bytes
    return loss


def _train_step_under_ddp(
    rank: int, cases: list[list[int]], seed: int
) -> list[dict[str, dict[str, Tensor]]]:
    return [
        {name: _one_step(rank, sizes, seed, make_loss(name)) for name in EXCHANGES}
        for sizes in cases
    ]


def _one_step(
    rank: int, sizes: list[int], seed: int, loss_fn: ContrastiveLoss
) -> dict[str, Tensor]:
    model = nn.parallel.DistributedDataParallel(TwoTowers())
    image, text = (_ranks_own(x, sizes, rank) for x in _pairs(sum(sizes), seed))
    loss = loss_fn(*model(image, text))
    loss.backward()
    gradients = {name: p.grad for name, p in model.module.named_parameters()}
    return {"loss": loss.detach(), **gradients}


def check_steps(
    formula: Callable[[Tensor], Tensor],
    sizes: list[int],
    seed: int,
    by_rank: list[dict[str, dict[str, Tensor]]],
) -> None:
    """Compare the steps of all ranks, by exchange, with one process that knows all logits.

    The gradients of scale and bias are sums over pairs of both signs that may cancel; their errors
    are judged against the sum of the magnitudes.
    """
    model = TwoTowers().double()
    image, text, scale, bias = model(*(x.double() for x in _pairs(sum(sizes), seed)))
    products = scale * image @ text.T
    logits = products + bias
    logits.retain_grad()
    loss = formula(logits)
    loss.backward()
    expected = {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}
    magnitudes = {name: value.norm() for name, value in expected.items()}
    magnitudes["log_scale"] = (logits.grad * products).abs().sum().detach()
    magnitudes["bias"] = logits.grad.abs().sum()
    for rank, exchange in itertools.product(range(len(sizes)), EXCHANGES):
        for name, value in by_rank[rank][exchange].items():
            error = ((value - expected[name]).norm() / magnitudes[name]).item()
            where = f"{name} on rank {rank} of {sizes} by {exchange}, seed {seed}"
            assert error < 1e-5, f"{where}: {error:.1e}"


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_exchanges_with_ddp_mean_equal_one_process(world_size: int) -> None:
    seed = torch.seed() % 2**31
    by_rank = run_ranks(_train_step_under_ddp, world_size, BATCHES[world_size], seed)
    for case, sizes in enumerate(BATCHES[world_size]):
        check_steps(loss_of_logits, sizes, seed, [cases[case] for cases in by_rank])


COLLECTIVES = {
    *("_allgather_base_", "allreduce_", "alltoall_base_", "_reduce_scatter_base_"),
    *("send", "recv_", "allgather_", "broadcast_", "barrier"),
}


class Collectives(TorchDispatchMode):
    """Records collectives by the names of the c10d operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: ANN001
        if function.namespace == "c10d":
            self.calls.append(function._opname)
        return function(*args, **(kwargs or {}))


def _count_communication(rank: int) -> dict[str, list[str]]:
    counted = {}
    for name in EXCHANGES:
        image, text = (x.requires_grad_() for x in _pairs(8, 0))
        with visible(), Collectives() as collectives:
            loss = make_loss(name)(image, text, torch.tensor(10.0, requires_grad=True))
            loss.backward()
        counted[name] = collectives.calls
    return counted


def _gradient_on_one_rank(rank: int) -> list[Tensor]:
    image, text = (x.requires_grad_() for x in _pairs(8, rank))
    losses = [make_loss(name)(image, text, torch.tensor(10.0)) for name in EXCHANGES]
    return [torch.autograd.grad(loss, image)[0] for loss in losses] if rank else []


@pytest.mark.distributed
def test_backward_on_one_rank_does_not_wait_for_other_ranks() -> None:
    none, found = run_ranks(_gradient_on_one_rank, 2)
    assert none == []
    assert all(relative_error(gradient, found[0]) < 1e-6 for gradient in found)


@pytest.mark.distributed
def test_one_rank_does_not_communicate() -> None:
    assert run_ranks(_count_communication, 1) == [dict.fromkeys(EXCHANGES, [])]


@pytest.mark.distributed
def test_two_ranks_use_the_minimum_of_collectives() -> None:
    counted = {
        name: Counter(calls) for name, calls in run_ranks(_count_communication, 2)[0].items()
    }
    # One collective for the facts, and one for the sums of the loss and of the scale's gradient.
    always = Counter({"_allgather_base_": 1, "allreduce_": 1})
    # Texts, column sums to their ranks, log-sum-exps, gradients of texts to their ranks.
    a_slice = {"_allgather_base_": 2, "alltoall_base_": 1, "_reduce_scatter_base_": 1}
    assert counted["one slice"] == always + Counter(a_slice)
    # Texts and log-sum-exps of other ranks W - 1 times; column sums and gradients W times.
    assert counted["ring"] == always + Counter({"send": 7, "recv_": 7})


def _order_of_events(rank: int) -> list[str]:
    events: list[str] = []
    sent: list[Sending] = []

    def noted(owner: type, method: str, note: Callable[[Any], str]) -> None:
        original = getattr(owner, method)

        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            events.append(note(self))
            return original(self, *args, **kwargs)

        setattr(owner, method, wrapper)

    noted(Sending, "__init__", lambda self: sent.append(self) or f"send {len(sent)}")
    noted(Sending, "wait", lambda self: f"wait {sent.index(self) + 1}")
    noted(TorchTiles, "lse_sweep", lambda self: "sweep")
    noted(TorchTiles, "grad_sweep", lambda self: "sweep")
    image, text = (x.requires_grad_() for x in _pairs(8, 0))
    make_loss("ring")(image, text, 10.0).backward()
    return events


@pytest.mark.distributed
def test_ring_transfers_overlap_with_sweeps() -> None:
    forward = [
        *("send 1", "sweep", "send 2"),  # texts travel during the first step
        *("wait 1", "sweep", "wait 2"),  # column sums travel during the second step
        *("send 3", "wait 3"),  # column sums return to their rank
    ]
    backward = [
        *("send 4", "sweep", "send 5"),
        *("wait 4", "sweep", "wait 5"),
        *("send 6", "wait 6"),
    ]
    assert run_ranks(_order_of_events, 2) == [forward + backward] * 2


def _loss_in_subgroups(rank: int) -> tuple[float, Tensor]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    image, text = (x[rank * 4 : rank * 4 + 4].requires_grad_() for x in _pairs(16, 5))
    loss = ContrastiveLoss(process_group=groups[rank % 2])(image, text, 2.0)
    loss.backward()
    return loss.item(), text.grad


@pytest.mark.distributed
def test_process_group_limits_the_batch_to_its_ranks() -> None:
    by_rank = run_ranks(_loss_in_subgroups, 4)
    image, text = (x.double() for x in _pairs(16, 5))
    for members in ([0, 2], [1, 3]):
        rows = torch.cat([torch.arange(4 * rank, 4 * rank + 4) for rank in members])
        leaf = text[rows].requires_grad_()
        expected = dense_loss(image[rows], leaf, 2.0)
        expected.backward()
        for rank, part in zip(members, leaf.grad.split(4), strict=True):
            assert by_rank[rank][0] == pytest.approx(expected.item(), rel=1e-6)
            assert relative_error(by_rank[rank][1], 2 * part) < 1e-5


def _locked_tower_on_one_rank(rank: int) -> list[Tensor | None]:
    image, text = (x[rank * 4 : rank * 4 + 4] for x in _pairs(8, 3))
    # Only rank 1 trains its texts and no rank its images; all ranks must still call collectives.
    text = text.clone().requires_grad_(rank == 1)
    scale = torch.tensor(5.0, requires_grad=True)
    make_loss("many slices")(image, text, scale).backward()
    return [text.grad, scale.grad]


@pytest.mark.distributed
def test_gradients_needed_on_some_ranks_only() -> None:
    by_rank = run_ranks(_locked_tower_on_one_rank, 2)
    image, text = (x.double() for x in _pairs(8, 3))
    scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    text.requires_grad_()
    dense_loss(image, text, scale).backward()
    assert by_rank[0][0] is None
    assert relative_error(by_rank[1][0], 2 * text.grad[4:]) < 1e-5
    for rank in (0, 1):
        assert relative_error(by_rank[rank][1], scale.grad) < 1e-5


def _message_of_bad_input(rank: int, case: str) -> str:
    image, text = torch.randn(3, 4), torch.randn(3, 4)
    if case == "one rank not 2-D" and rank == 1:
        image = image[None]
    if case == "empty on one rank" and rank == 1:
        image, text = image[:0], text[:0]
    if case == "width" and rank == 1:
        image, text = image[:, :2], text[:, :2]
    loss_fn = make_loss("ring" if case == "exchange" and rank == 1 else "one slice")
    with pytest.raises(ValueError) as error:  # noqa: PT011
        loss_fn(image, text, 1.0)
    # The group still works after the error.
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == 2
    return str(error.value)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "rank_0", "rank_1"),
    [
        ("one rank not 2-D", "Rank 1 of 2 passed", "shape [1, 3, 4]"),
        ("empty on one rank", "Rank 1 of 2 passed", "empty batch"),
        ("width", "All ranks must have the same", "All ranks must have the same"),
        ("exchange", "of ['slices', 'ring'] on", "of ['slices', 'ring'] on"),
    ],
)
def test_invalid_input_on_one_rank_raises_on_all_ranks(case: str, rank_0: str, rank_1: str) -> None:
    messages = run_ranks(_message_of_bad_input, 2, case)
    assert rank_0 in messages[0]
    assert rank_1 in messages[1]


def test_following_sum_result_before_the_last_step_raises() -> None:
    total = FollowingSum(Ring([4]), "sum")
    with pytest.raises(RuntimeError, match=r"after 0 calls of `add`"):
        total.result()


def test_sliced_sum_result_before_the_last_slice_raises() -> None:
    with pytest.raises(RuntimeError, match=r"after 0 calls of `add`.* 3 slices"):
        SlicedSum(Slices([4, 4], count=3), "sum").result()


@pytest.mark.parametrize("sizes", [[3], [4, 4], [1, 9], [9, 1], [7, 12, 6], [2, 1, 30, 1], [0, 7]])
def test_padding_compact_and_spread_are_inverse_and_in_place(sizes: list[int]) -> None:
    for rank, size in enumerate(sizes):
        padding = Padding(sizes, rank)
        numbers = [torch.arange(10 * rank, 10 * rank + size) for rank, size in enumerate(sizes)]
        padded = torch.stack([F.pad(x, (0, max(sizes) - len(x)), value=-1) for x in numbers])
        buffer = padded.flatten().clone()
        block = padding.compact(buffer)
        assert block.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert block.sort().values.equal(torch.cat(numbers).sort().values)
        assert block[padding.own_start :][:size].equal(numbers[rank])
        # `spread` must not need the rows outside of the compact block.
        buffer[: padding.window.start], buffer[padding.window.stop :] = -2, -2
        spread = padding.spread(buffer).view_as(padded)
        assert all(x[: len(y)].equal(y) for x, y in zip(spread, numbers, strict=True))


@pytest.mark.parametrize("sizes", [[8, 8], [13, 6], [1, 9], [65_536 // 64] * 64])
@pytest.mark.parametrize("row_bytes", [192, 6_144])
def test_slice_count_is_the_smallest_that_fits_the_budget(sizes: list[int], row_bytes: int) -> None:
    for rows in (1, 2, 5, 40, 10**6):
        budget = rows * len(sizes) * row_bytes
        count = slice_count(sizes, row_bytes, budget)
        assert 1 <= count <= max(sizes)
        assert block_bytes(sizes, row_bytes, count) <= budget or count == max(sizes)
        assert count == 1 or block_bytes(sizes, row_bytes, count - 1) > budget
