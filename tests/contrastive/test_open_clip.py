"""`ClipLoss`, created as in open_clip's `create_loss`, equals open_clip's formula.

`test_open_clip_classes.py` compares both losses with open_clip's own classes.
"""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import ClipLoss
from tests.processes import run_ranks

BATCH, WIDTH = 12, 16


def factory(rank: int, world_size: int, **changed: Any) -> ClipLoss:
    """Return the loss of open_clip's `create_loss` with the default command-line arguments."""
    arguments = {"local_loss": False, "gather_with_grad": False, "cache_labels": True}
    arguments |= {"rank": rank, "world_size": world_size, "use_horovod": False}
    return ClipLoss(**{**arguments, **changed})


def formula(image: Tensor, text: Tensor, scale: Tensor | float) -> Tensor:
    """Return open_clip's loss, the mean of two cross-entropies, in float64."""
    logits = scale * image.double() @ text.double().T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def features(count: int = BATCH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(count, WIDTH, generator=generator) for _ in range(2)]
    return [F.normalize(x, dim=1).requires_grad_() for x in rows]


def test_loss_and_gradients_equal_open_clips_formula() -> None:
    image, text = features()
    scale = torch.tensor(14.3, requires_grad=True)
    expected = formula(image, text, scale)
    gradients = torch.autograd.grad(expected, [image, text, scale])
    loss = factory(0, 1)(image, text, scale, output_dict=True)["contrastive_loss"]
    # In fp32, sums over a width of 16 and a batch of 12 have some tens of roundings of 6e-8.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for value, reference in zip(
        torch.autograd.grad(loss, [image, text, scale]), gradients, strict=True
    ):
        assert torch.allclose(value, reference.float(), rtol=1e-4, atol=1e-6)


def _on_rank(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    image, text = features(2 * BATCH)
    rows = slice(rank * BATCH, (rank + 1) * BATCH)
    for name, changed in {
        "default": {},
        "local": {"local_loss": True, "gather_with_grad": True},
    }.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss_fn = factory(rank, 2, **changed)
        image.grad = None
        loss = loss_fn(image[rows], text[rows], 14.3)
        loss.backward()
        dist.all_reduce(image.grad)  # each rank has its rows
        results[name] = loss.item(), image.grad / 2, [str(one.message) for one in caught]
    messages = []
    for said in ((rank, 3), (1 - rank, 2)):
        with pytest.raises(ValueError, match=r"the process group has rank \d of 2") as error:
            factory(*said, gather_with_grad=True)(image[rows], text[rows], 14.3)
        messages.append(str(error.value))
    return {**results, "messages": messages}


@pytest.mark.distributed
def test_ranks_return_loss_and_gradients_of_the_global_batch() -> None:
    image, text = features(2 * BATCH)
    expected = formula(image, text, 14.3)
    (gradient,) = torch.autograd.grad(expected, [image])
    for rank, results in enumerate(run_ranks(_on_rank, 2)):
        for name in ("default", "local"):
            loss, mean, told = results[name]
            assert loss == pytest.approx(expected.item(), rel=1e-5)
            assert torch.allclose(mean, gradient.float(), rtol=1e-4, atol=1e-6)
            assert len(told) == (name == "default" and rank == 0)
        assert (
            "Divide the learning rate of SGD by 2" in (results["default"][2] or ["", ""])[0] or rank
        )
        assert f"rank={rank}, world_size=3" in results["messages"][0]


def _with_the_rank_of_the_first(rank: int) -> str:
    with pytest.raises(ValueError, match=".") as error:  # noqa: PT011
        ClipLoss(rank=0, world_size=2)(*(torch.randn(4, 8) for _ in range(2)), 1.0)
    return str(error.value)


@pytest.mark.distributed
def test_wrong_rank_raises_on_all_ranks() -> None:
    first, second = run_ranks(_with_the_rank_of_the_first, 2)
    assert "Rank 1 of 2 passed arguments" in first
    assert "rank=0, world_size=2" in second


def test_world_size_without_process_group_raises() -> None:
    with pytest.raises(ValueError, match="Call `torch.distributed.init_process_group` first"):
        factory(0, 8, gather_with_grad=True)(*features(), 14.3)


def test_horovod_raises() -> None:
    with pytest.raises(ValueError, match="Start the run with `torchrun`"):
        factory(0, 1, use_horovod=True)
