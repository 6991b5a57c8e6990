"""Both losses replace those of open_clip on several ranks; arguments of `SigLipLoss`.

The requirements are those of open_clip's own tests (version 4.2, `test_siglip_chunked_loss.py` and
the tests of its tasks): the chunk size changes neither value nor gradients, also if the last chunk
is shorter; a task calls the loss by keywords for a dictionary, and adds up the entries that end in
`_loss`. Their calls of `SigLipLoss._loss`, the part of one rank, are left out, because the losses
here are those of all ranks. The losses are compared with open_clip's classes if they can be
imported, otherwise with their formulas.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import ClipLoss, SigLipLoss, SigmoidContrastiveLoss
from tests.processes import run_ranks
from tests.reference.contrastive import dense_loss, dense_sigmoid_loss

try:
    from open_clip import loss as theirs
except ImportError:  # open_clip or torchvision is not installed
    theirs = None

EXCHANGES = ("bidir", "shift", "reduce", "gather")
BATCH, WIDTH = 10, 16
SCALE, BIAS = 10.0, -10.0
# In fp32, a logit of 20 has a rounding error of 1e-6, which loss and gradients inherit.
RTOL = 1e-5


def leaves(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    rows = [torch.randn(count, WIDTH, generator=generator) for _ in range(2)]
    return [F.normalize(x, dim=1).requires_grad_() for x in rows]


def with_gradients(loss: Tensor, features: list[Tensor]) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, features)]


@pytest.mark.parametrize("b", [64, 70])
@pytest.mark.parametrize("options", [{}, {"cache_labels": True, "rank": 0, "world_size": 1}])
def test_chunk_size_and_dist_impl_change_no_bit_on_one_process(
    b: int, options: dict[str, Any]
) -> None:
    features = leaves(b)
    plain = with_gradients(SigmoidContrastiveLoss()(*features, SCALE, BIAS), features)
    doubles = [x.detach().double().requires_grad_() for x in features]
    scalars = [torch.tensor(value, dtype=torch.float64) for value in (SCALE, BIAS)]
    expected = with_gradients(dense_sigmoid_loss(*doubles, *scalars), doubles)
    assert all((x - y).norm() < RTOL * y.norm() for x, y in zip(plain, expected, strict=True))
    for chunk_size, dist_impl in itertools.product((0, 1, 8, 64), (None, *EXCHANGES)):
        loss_fn = SigLipLoss(chunk_size=chunk_size, dist_impl=dist_impl, **options)
        found = with_gradients(loss_fn(*features, SCALE, BIAS), features)
        assert all(torch.equal(*pair) for pair in zip(plain, found, strict=True))
        if theirs is not None:
            loss = theirs.SigLipLoss(chunk_size=chunk_size)(*features, SCALE, BIAS)
            parts = with_gradients(loss, features)
            assert all((x - y).norm() < RTOL * y.norm() for x, y in zip(plain, parts, strict=True))


@pytest.mark.parametrize("loss_fn", [ClipLoss(), SigLipLoss()])
def test_output_dict_has_one_entry_that_ends_in_loss(
    loss_fn: ClipLoss | SigLipLoss,
) -> None:
    image, text = leaves(BATCH)
    scalars = {"logit_scale": torch.tensor(SCALE), "logit_bias": torch.tensor(BIAS)}
    features = {"image_features": image, "text_features": text}
    losses = loss_fn(**features, **scalars, output_dict=True)
    assert [name for name in losses if name.endswith("_loss")] == ["contrastive_loss"]
    assert torch.equal(losses["contrastive_loss"], loss_fn(image, text, *scalars.values()))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"dist_impl": "ring"},
            "one of 'bidir', 'shift', 'reduce', 'gather' or None.*it has no effect",
        ),
        (
            {"chunk_size": -1},
            "`chunk_size` must be an integer of at least 0.*the workspace limits the tiles",
        ),
    ],
)
def test_values_unknown_to_open_clip_raise(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SigLipLoss(**arguments)


def test_world_size_without_process_group_raises() -> None:
    with pytest.raises(ValueError, match=r"`SigLipLoss\(rank=1, world_size=2\)`"):
        SigLipLoss(rank=1, world_size=2)(*leaves(BATCH), SCALE, BIAS)


def _mean_over_ranks(loss: Tensor, features: list[Tensor]) -> list[Tensor]:
    """Return loss and gradients of all pairs, averaged over ranks as in DDP."""
    found = [x.clone() for x in with_gradients(loss, features)]
    for x in found:
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return found


def _on_rank(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    features = leaves(world_size * BATCH)
    own = [x[rank * BATCH : (rank + 1) * BATCH] for x in features]
    who = {"rank": rank, "world_size": world_size}
    scalars = [torch.tensor(value) for value in (SCALE, BIAS)]
    found = {}
    for dist_impl, chunk_size in itertools.product(EXCHANGES, (0, 3)):
        options: Any = {"dist_impl": dist_impl, "chunk_size": chunk_size, **who}
        loss = SigLipLoss(**options)(*own, *scalars)
        found[f"sigmoid {dist_impl} {chunk_size}"] = _mean_over_ranks(loss, features)
        if theirs is not None:
            loss = theirs.SigLipLoss(**options)(*own, *scalars)
            found[f"sigmoid of open_clip {dist_impl} {chunk_size}"] = _mean_over_ranks(
                loss, features
            )
    for local_loss in (False, True):
        options = {"local_loss": local_loss, "gather_with_grad": True, **who}
        loss = ClipLoss(**options)(*own, SCALE)
        found[f"softmax {local_loss}"] = _mean_over_ranks(loss, features)
        if theirs is not None:
            loss = theirs.ClipLoss(**options)(*own, SCALE)
            found[f"softmax of open_clip {local_loss}"] = _mean_over_ranks(loss, features)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_mean_over_ranks_equals_open_clip(world_size: int) -> None:
    features = [x.detach().double().requires_grad_() for x in leaves(world_size * BATCH)]
    scale, bias = (torch.tensor(value, dtype=torch.float64) for value in (SCALE, BIAS))
    expected = {
        "sigmoid": with_gradients(dense_sigmoid_loss(*features, scale, bias), features),
        "softmax": with_gradients(dense_loss(*features, scale), features),
    }
    for results in run_ranks(_on_rank, world_size, world_size):
        for name, found in results.items():
            for value, right in zip(found, expected[name.split()[0]], strict=True):
                assert (value - right).norm() < RTOL * right.norm(), name
