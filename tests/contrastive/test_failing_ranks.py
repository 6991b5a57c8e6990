"""What ranks say when one of them fails, is gone, or asks for something else than the others."""

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import ClipLoss, ContrastiveLoss, MatryoshkaLoss, SigmoidContrastiveLoss
from lightning_mp.contrastive._exchange.failures import CollectiveError
from lightning_mp.contrastive._sums.agreement import device_problem
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
def test_collective_that_fails_names_loss_call_and_where_to_look(exchange: str) -> None:
    (said, cause), _ = run_ranks(_after_the_other_has_gone, 2, exchange)
    assert "A collective of `SigmoidContrastiveLoss` failed on rank 0" in said
    assert "look at the other ranks' logs first" in said
    assert "This was call 2 of the loss." in said
    assert cause.endswith("Error")


def test_errors_of_a_loss_that_are_of_no_collective_come_as_they_are(
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
    ContrastiveLoss()(*features(rank), torch.tensor(torch.nan))  # alike on all ranks
    return said


@pytest.mark.distributed
def test_scale_and_bias_that_differ_between_ranks_are_refused_on_all() -> None:
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
def test_class_that_was_called_is_named_on_all_ranks() -> None:
    _, others = run_ranks(_with_a_mistake_on_the_first, 2)
    names = ("SigmoidContrastiveLoss", "ClipLoss", "MatryoshkaLoss", "SigmoidContrastiveLoss")
    for name, said in zip(names, others, strict=True):
        assert f"Rank 0 of 2 passed arguments that `{name}` cannot use" in said


def test_features_on_the_cpu_are_no_matter_of_a_group_of_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lightning_mp.contrastive._call.request import Request
    from lightning_mp.contrastive._sums import agreement

    request = Request(*features(0), torch.tensor(1.0), owner="SigmoidContrastiveLoss")
    monkeypatch.setattr(agreement, "ranks_of", lambda *_: 2)
    for backends, is_refused in (
        ("cuda:nccl", True),
        ("cpu:gloo,cuda:nccl", False),
        ("cpu:gloo,cuda:gloo", False),
    ):
        monkeypatch.setattr(dist, "get_backend_config", lambda _, name=backends: name)
        problem = device_problem(request, None)
        assert (problem is not None) == is_refused
        if problem is not None:
            assert "to `SigmoidContrastiveLoss` of a process group of NCCL" in problem
