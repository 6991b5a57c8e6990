"""Errors of all ranks if one rank fails, exits or has other options."""

import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import ClipLoss, ContrastiveLoss, MatryoshkaLoss, SigmoidContrastiveLoss
from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._exchange.exchange import (
    CollectiveError,
    FollowingSum,
    Ring,
    collective_error,
)
from lightning_mp.contrastive._sums import agreement
from lightning_mp.contrastive._sums.sweep import agreed_plan
from tests.fake_cuda import FakeCuda
from tests.processes import run_ranks


def features(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [F.normalize(torch.randn(6, 8, generator=generator), dim=1) for _ in range(2)]


def _error(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match=".") as caught:  # noqa: PT011
        call()
    return str(caught.value)


def _after_the_other_has_gone(rank: int, exchange: Any) -> tuple[str, str]:
    group = dist.new_group(timeout=timedelta(seconds=2))
    loss_fn = SigmoidContrastiveLoss(exchange=exchange, process_group=group)
    loss_fn(*features(rank), 10.0, -10.0)
    if rank == 1:
        return "", ""
    with pytest.raises(CollectiveError) as caught:
        loss_fn(*features(rank), 10.0, -10.0)
    return str(caught.value), type(caught.value.__cause__).__name__


@pytest.mark.distributed
@pytest.mark.parametrize("exchange", ["slices", "ring"])
def test_error_of_a_collective_names_the_loss_and_the_call(exchange: str) -> None:
    (said, cause), _ = run_ranks(_after_the_other_has_gone, 2, exchange)
    assert "A collective of `SigmoidContrastiveLoss` failed on rank 0" in said
    assert "look at the other ranks' logs first" in said
    assert "This was call 2 of the loss." in said
    assert cause.endswith("Error")


def test_errors_of_a_single_process_are_no_errors_of_a_collective() -> None:
    with pytest.raises(RuntimeError, match="came after 0 calls") as caught:
        FollowingSum(Ring([2]), "sum").result()
    assert collective_error("ContrastiveLoss", caught.value) is None


def test_other_errors_are_not_wrapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no tiles today")

    monkeypatch.setattr("lightning_mp.contrastive._operator.softmax_loss", fail)
    with pytest.raises(RuntimeError, match="^no tiles today$"):
        ContrastiveLoss()(*features(0), 10.0)


def _with_own_scalars(rank: int) -> list[str]:
    scale, bias = torch.tensor(10.0 + rank), torch.tensor(-10.0 - rank / 2**20)
    said = [_error(lambda: ContrastiveLoss()(*features(rank), scale))]
    said.append(_error(lambda: SigmoidContrastiveLoss()(*features(rank), 10.0, bias)))
    ContrastiveLoss()(*features(rank), torch.tensor(torch.nan))  # equal on all ranks
    return said


@pytest.mark.distributed
def test_different_scales_or_biases_raise_on_all_ranks() -> None:
    for scale, bias in run_ranks(_with_own_scalars, 2):
        assert "Passed `logit_scale` of [10.0, 11.0] to `ContrastiveLoss` on ranks 0 to 1" in scale
        assert "Passed `logit_bias` of [-10.0, -10.0000" in bias
        assert "`SigmoidContrastiveLoss`" in bias


def _with_a_mistake_on_the_first(rank: int) -> list[str]:
    said = []
    losses = (SigmoidContrastiveLoss(), ClipLoss(), MatryoshkaLoss(widths=[4]))
    for loss_fn in (*losses, pickle.loads(pickle.dumps(losses[0]))):
        image, text = features(rank)
        text = text if rank else text[:, :3]
        said.append(_error(lambda: loss_fn(image, text, 10.0, -10.0)))  # noqa: B023
    return said


@pytest.mark.distributed
def test_error_names_the_called_class_on_all_ranks() -> None:
    _, others = run_ranks(_with_a_mistake_on_the_first, 2)
    names = ("SigmoidContrastiveLoss", "ClipLoss", "MatryoshkaLoss", "SigmoidContrastiveLoss")
    for name, said in zip(names, others, strict=True):
        assert f"Rank 0 of 2 passed arguments that `{name}` cannot use" in said


LOSSES = (ContrastiveLoss, ClipLoss, SigmoidContrastiveLoss, lambda: MatryoshkaLoss(widths=[4, 8]))


@pytest.fixture
def nccl(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Return the facts that ranks of a simulated NCCL group have sent; every rank receives them."""
    sent: list[Tensor] = []

    def all_gather(by_rank: Tensor, mine: Tensor, group: object) -> None:
        assert mine.is_cuda  # NCCL sends nothing else
        sent.append(mine.clone())
        by_rank.copy_(torch.cat([*sent, mine])[: len(by_rank)])

    agreement._stream_of.cache_clear()
    monkeypatch.setattr(agreement, "all_gather", all_gather)
    for name, value in (("world_size", 2), ("rank", 0), ("backend_config", "cuda:nccl")):
        monkeypatch.setattr(dist, f"get_{name}", lambda group=None, value=value: value)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    yield sent
    agreement._stream_of.cache_clear()


@pytest.mark.parametrize("make_loss", LOSSES)
@pytest.mark.parametrize("towers_on_cpu", [(True, True), (True, False), (False, True)])
def test_cpu_features_with_an_nccl_group_raise_on_all_ranks(
    make_loss: Callable[[], Any], towers_on_cpu: tuple[bool, bool], nccl: list[Tensor]
) -> None:
    on_gpu = [x.cuda() for x in features(0)]
    places = zip(features(0), on_gpu, towers_on_cpu, strict=True)
    mixed = [x if is_on_cpu else y for x, y, is_on_cpu in places]
    own = _error(lambda: make_loss()(*mixed, 10.0, -10.0))
    assert (
        "with an NCCL process group" if all(towers_on_cpu) else "Both must be on one device"
    ) in own
    assert [facts.tolist() for facts in nccl] == [[0] * len(agreement.Facts())]
    # Operators do not see the fake device, so the other rank calls the function inside.
    request = Request.of(ContrastiveLoss(), *on_gpu, 10.0, None).checked()
    other = _error(lambda: agreed_plan(request))
    assert "Rank 0 of 2 passed arguments that `ContrastiveLoss` cannot use" in other


@pytest.mark.parametrize("make_loss", LOSSES)
def test_features_are_checked_again_after_the_group_is_created(
    make_loss: Callable[[], Any], nccl: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_fn = make_loss()
    with monkeypatch.context() as alone:
        alone.setattr(dist, "is_initialized", lambda: False)
        loss_fn(*features(0), 10.0, -10.0)
    assert "with an NCCL process group" in _error(lambda: loss_fn(*features(0), 10.0, -10.0))
    assert len(nccl) == 1


@pytest.mark.parametrize("backends", ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
def test_cpu_features_are_accepted_by_groups_with_a_cpu_backend(
    backends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(*features(0), torch.tensor(1.0))
    monkeypatch.setattr(agreement, "ranks_of", lambda *_: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backends)
    assert agreement.device_problem(request, None) is None
