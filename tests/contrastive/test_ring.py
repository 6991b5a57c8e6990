"""The ring against one process with the whole batch, after the mean that DDP takes."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mp import ContrastiveLoss
from lightning_mp.contrastive.ring import Exchange, FollowingSum, Ring
from lightning_mp.contrastive.torch_tiles import TorchTiles
from tests.processes import run_ranks
from tests.reference.contrastive import dense_loss, relative_error

BATCHES = {1: [[16]], 2: [[8, 8], [13, 6], [1, 9]], 4: [[5, 7, 3, 11], [1, 1, 1, 1], [2, 1, 30, 1]]}


class TwoTowers(nn.Module):
    """Small encoders with a scale and a bias, the same on every rank."""

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


def _train_step_under_ddp(rank: int, cases: list[list[int]], seed: int) -> list[dict[str, Tensor]]:
    results = []
    for sizes in cases:
        model = nn.parallel.DistributedDataParallel(TwoTowers())
        image, text = (_ranks_own(x, sizes, rank) for x in _pairs(sum(sizes), seed))
        loss = ContrastiveLoss()(*model(image, text))
        loss.backward()
        gradients = {name: p.grad for name, p in model.module.named_parameters()}
        results.append({"loss": loss.detach(), **gradients})
    return results


def _expected(sizes: list[int], seed: int) -> dict[str, Tensor]:
    model = TwoTowers().double()
    image, text = (x.double() for x in _pairs(sum(sizes), seed))
    loss = dense_loss(*model(image, text)[:3])
    loss.backward()
    model.bias.grad = torch.zeros_like(model.bias)
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ring_after_ddp_mean_equals_one_process(world_size: int) -> None:
    seed = torch.seed() % 2**31
    by_rank = run_ranks(_train_step_under_ddp, world_size, BATCHES[world_size], seed)
    for case, sizes in enumerate(BATCHES[world_size]):
        expected = _expected(sizes, seed)
        for rank in range(world_size):
            for name, value in by_rank[rank][case].items():
                error = relative_error(value, expected[name])
                assert error < 1e-5, f"{name} on rank {rank} of {sizes}, seed {seed}: {error:.1e}"


def _count_communication(rank: int) -> list[str]:
    calls: list[str] = []
    for name in ("all_gather", "all_reduce", "batch_isend_irecv"):
        original = getattr(dist, name)

        def counted(*args: object, _name: str = name, _original=original, **kwargs: object):
            calls.append(_name)
            return _original(*args, **kwargs)

        setattr(dist, name, counted)
    image, text = (x.requires_grad_() for x in _pairs(8, 0))
    ContrastiveLoss()(image, text, torch.tensor(10.0, requires_grad=True)).backward()
    return calls


@pytest.mark.distributed
def test_ring_of_one_rank_never_communicates() -> None:
    assert run_ranks(_count_communication, 1) == [[]]


@pytest.mark.distributed
def test_ring_of_two_ranks_is_seen_by_the_counter() -> None:
    calls = run_ranks(_count_communication, 2)[0]
    # Forward: a text shard and a column state, twice around. Backward: a text shard and dT twice.
    assert calls.count("batch_isend_irecv") == 6
    assert calls.count("all_gather") == 1
    assert calls.count("all_reduce") == 2


def _order_of_events(rank: int) -> list[str]:
    events: list[str] = []
    exchanges: list[Exchange] = []

    def noted(owner: type, method: str, note: Callable[[Any], str]) -> None:
        original = getattr(owner, method)

        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            events.append(note(self))
            return original(self, *args, **kwargs)

        setattr(owner, method, wrapper)

    noted(Exchange, "__init__", lambda self: exchanges.append(self) or f"send {len(exchanges)}")
    noted(Exchange, "wait", lambda self: f"wait {exchanges.index(self) + 1}")
    noted(TorchTiles, "lse_sweep", lambda self: "sweep")
    noted(TorchTiles, "grad_sweep", lambda self: "sweep")
    image, text = (x.requires_grad_() for x in _pairs(8, 0))
    ContrastiveLoss()(image, text, 10.0).backward()
    return events


@pytest.mark.distributed
def test_ring_sends_while_it_sweeps() -> None:
    forward = [
        *("send 1", "sweep", "send 2"),  # texts travel during the first sweep, column sums after
        *("wait 1", "sweep", "wait 2"),  # and during the second
        *("send 3", "wait 3"),  # home
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
def test_ring_in_a_process_group_takes_the_groups_batch_only() -> None:
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
    # Only rank 1 trains its texts, and nobody its images: the ranks must still meet.
    text = text.clone().requires_grad_(rank == 1)
    scale = torch.tensor(5.0, requires_grad=True)
    ContrastiveLoss()(image, text, scale).backward()
    return [text.grad, scale.grad]


@pytest.mark.distributed
def test_ring_with_gradients_wanted_on_some_ranks_only_gives_them_there() -> None:
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
    with pytest.raises(ValueError) as error:  # noqa: PT011
        ContrastiveLoss()(image, text, 1.0)
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
    ],
)
def test_ring_with_bad_input_on_one_rank_stops_all(case: str, rank_0: str, rank_1: str) -> None:
    messages = run_ranks(_message_of_bad_input, 2, case)
    assert rank_0 in messages[0]
    assert rank_1 in messages[1]


def test_following_sum_result_before_a_full_turn_raises() -> None:
    total = FollowingSum(Ring([4]), torch.add)
    with pytest.raises(RuntimeError, match=r"after 0 calls of `add`"):
        total.result()
