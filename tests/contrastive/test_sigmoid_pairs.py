"""The sigmoid loss with `positives`, `negatives` and weights equals a float64 formula."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import MatryoshkaLoss, SigmoidContrastiveLoss
from tests.contrastive.test_exchange import EXCHANGES
from tests.processes import run_ranks

Sizes = list[tuple[int, int]]
NAMES = ("positives", "negatives", "weights", "all")


def batch(sizes: Sizes) -> dict[str, Tensor]:
    """Return the global batch; `positives` index the texts of each rank."""
    torch.manual_seed(0)
    b, n = (sum(size[side] for size in sizes) for side in (0, 1))
    kinds = {"image": (b, 6), "text": (n, 6), "negatives": (b, 3, 6)}
    features = {
        name: F.normalize(torch.randn(shape, dtype=torch.float64), dim=-1)
        for name, shape in kinds.items()
    }
    # Each image has up to three texts; some have none, some share one.
    positives = torch.cat([torch.randint(-1, n_r, (b_r, 3)) for b_r, n_r in sizes])
    positives[0] = -1
    scalars = {"scale": torch.tensor(7.0), "bias": torch.tensor(-3.0)}
    weights = torch.rand(b, dtype=torch.float64)
    weights[1] = 0
    features["weights"] = weights
    return {**features, "positives": positives, **{k: v.double() for k, v in scalars.items()}}


def dense(whole: dict[str, Tensor], sizes: Sizes, name: str, width: int = 6) -> Tensor:
    image, text, negatives = (
        whole[key][..., :width] if width == 6 else F.normalize(whole[key][..., :width], dim=-1)
        for key in ("image", "text", "negatives")
    )
    logits = whole["scale"] * image @ text.T + whole["bias"]
    belongs = torch.zeros_like(logits)
    row = start = 0
    for b, n in sizes:
        for own in range(b):
            named = whole["positives"][row] if name in ("positives", "all") else torch.tensor([own])
            belongs[row, start + named[named >= 0]] = 1
            row += 1
        start += n
    terms = F.softplus(torch.where(belongs == 1, -logits, logits)).sum(1)
    if name in ("negatives", "all"):
        products = (negatives * image[:, None]).sum(-1)
        terms = terms + F.softplus(whole["scale"] * products + whole["bias"]).sum(1)
    if name in ("weights", "all"):
        return (terms * whole["weights"]).sum() / whole["weights"].sum()
    return terms.mean()


def trained(name: str) -> list[str]:
    return ["image", "text", "scale", "bias"] + (
        ["negatives"] if name in ("negatives", "all") else []
    )


def expected(sizes: Sizes, name: str, width: int = 6) -> dict[str, Tensor]:
    whole = batch(sizes)
    leaves = [whole[key].requires_grad_() for key in trained(name)]
    loss = dense(whole, sizes, name, width)
    found = torch.autograd.grad(loss, leaves)
    return {"loss": loss.detach(), **dict(zip(trained(name), found, strict=True))}


def found(
    sizes: Sizes, name: str, loss_fn: Any, rank: int = 0, without: str = ""
) -> dict[str, Tensor]:
    whole = batch(sizes)
    starts = [sum(size[side] for size in sizes[:rank]) for side in (0, 1)]
    rows, columns = (slice(at, at + k) for at, k in zip(starts, sizes[rank], strict=True))
    mine = {key: x[columns if key == "text" else rows] if x.ndim else x for key, x in whole.items()}
    keys = [key for key in trained(name) if key != without]
    leaves = [mine[key].requires_grad_() for key in keys]
    given = ("positives", "negatives", "weights") if name == "all" else (name,)
    inputs = [mine[key] for key in ("image", "text", "scale", "bias")]
    loss = loss_fn(*inputs, **{key: mine[key] for key in given})
    grads = torch.autograd.grad(loss, leaves)
    return {"loss": loss.detach(), **dict(zip(keys, grads, strict=True))}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [[(9, 9)], [(9, 14)], [(9, 30)]], ids=str)
def test_loss_equals_the_dense_formula(sizes: Sizes, name: str) -> None:
    wanted = expected(sizes, name)
    for key, value in found(sizes, name, SigmoidContrastiveLoss()).items():
        assert torch.allclose(value, wanted[key], rtol=1e-12, atol=1e-14), key


@pytest.mark.parametrize("without", ["image", "text", "scale", "negatives"])
def test_skipped_gradients_leave_the_others_unchanged(without: str) -> None:
    wanted = expected([(9, 14)], "all")
    for key, value in found([(9, 14)], "all", SigmoidContrastiveLoss(), 0, without).items():
        assert torch.allclose(value, wanted[key], rtol=1e-12, atol=1e-14), key


RANKS: list[Sizes] = [[(8, 8), (5, 17)], [(3, 9), (7, 7), (1, 20)]]


def _steps(rank: int, sizes: Sizes) -> list[dict[str, Tensor]]:
    kinds = zip(NAMES, [*EXCHANGES.values()] * 2, strict=False)
    return [
        found(sizes, name, SigmoidContrastiveLoss(exchange=kind["exchange"]), rank)
        for name, kind in kinds
    ]


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", RANKS, ids=len)
def test_loss_across_ranks_equals_the_dense_formula(sizes: Sizes) -> None:
    by_rank = run_ranks(_steps, len(sizes), sizes)
    for place, name in enumerate(NAMES):
        wanted = expected(sizes, name)
        for rank, steps in enumerate(by_rank):
            for key, value in steps[place].items():
                one = wanted[key]
                if one.ndim:
                    side = int(key == "text")
                    one = len(sizes) * one.split([size[side] for size in sizes])[rank]
                assert torch.allclose(value, one, rtol=1e-11, atol=1e-13), (name, key, rank)


def test_matryoshka_applies_pair_arguments_to_each_width() -> None:
    sizes = [(9, 14)]
    loss_fn = MatryoshkaLoss(loss=SigmoidContrastiveLoss(), widths=[6, 2], weights=[1.0, 0.5])
    parts = [expected(sizes, "all", width)["loss"].item() for width in (6, 2)]
    value = found(sizes, "all", loss_fn)["loss"].item()
    assert value == pytest.approx(parts[0] + parts[1] / 2, rel=1e-13)


def test_empty_negatives_change_nothing() -> None:
    whole = batch([(9, 9)])
    inputs = [whole[key] for key in ("image", "text", "scale", "bias")]
    empty = torch.zeros(9, 0, 6, dtype=torch.float64, requires_grad=True)
    loss = SigmoidContrastiveLoss()(*inputs, negatives=empty)
    assert loss.item() == SigmoidContrastiveLoss()(*inputs).item()


def test_infinite_features_with_weight_zero_give_a_finite_loss() -> None:
    whole = batch([(9, 9)])
    inputs = [whole[key] for key in ("image", "text", "scale", "bias")]
    inputs[0][1] = 1e200  # its weight is 0, and its logits overflow
    loss = SigmoidContrastiveLoss()(*inputs[:2], 1e200, 0.0, weights=torch.eye(9)[1] * 0)
    assert loss.item() == 0
    assert SigmoidContrastiveLoss()(*inputs, weights=whole["weights"]).isfinite()


@pytest.mark.parametrize(
    ("setup", "call", "message"),
    [
        ({"backend": "triton"}, {"weights": torch.ones(9)}, "do not support weights"),
        ({}, {"guide_image": torch.ones(9, 2)}, "has no `false_negatives`"),
        ({}, {"weights": torch.ones(8)}, "Pass one weight for each image"),
    ],
)
def test_unsupported_arguments_raise(setup: Any, call: Any, message: str) -> None:
    whole = batch([(9, 9)])
    with pytest.raises(ValueError, match=message):
        SigmoidContrastiveLoss(**setup)(whole["image"], whole["text"], 1.0, **call)
