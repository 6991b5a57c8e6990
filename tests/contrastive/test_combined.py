"""`partition`, `within` and `hardness` equal a dense formula and sentence-transformers' loss."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import ContrastiveLoss, MatryoshkaLoss
from tests.contrastive.test_exchange import EXCHANGES, make_loss
from tests.processes import run_ranks
from tests.reference.contrastive import relative_error

DIRECTIONS = ("image_to_text", "both")
CASES: dict[str, dict[str, Any]] = {
    f"{partition} {directions} {within} {hardness:g}": {
        "partition": partition,
        "directions": directions,
        "within": within,
        "hardness": hardness,
    }
    for partition in ("joint", "each")
    for directions in DIRECTIONS
    for within in ("none", "image", "text", "both")
    for hardness in (0.0, 5.0)
    if partition == "joint" or (within == "none" and hardness)
}
CASES["joint text_to_image both 0"] = {
    "partition": "joint",
    "directions": "text_to_image",
    "within": "both",
}
SCALE = 13.0
Sizes = list[tuple[int, int]]


def dense(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    own: Tensor,
    ids: Tensor | None,
    *,
    partition: str,
    directions: str,
    within: str = "none",
    hardness: float = 0.0,
) -> Tensor:
    """Return the loss by its definition; `own` are the rows of the positives of the images."""
    rows = torch.arange(len(image))
    is_own = F.one_hot(own, len(text)).bool()

    def without(scores: Tensor, is_self: Tensor, row_ids: Any, column_ids: Any) -> Tensor:
        if ids is not None:
            is_self = is_self | (row_ids[:, None] == column_ids)
        return scores.masked_fill(is_self, -torch.inf)

    of = (None, None) if ids is None else (ids[own], ids)
    similarity = image @ text.T
    positive = scale * similarity[rows, own]
    negatives = []
    if directions != "text_to_image":
        scores = scale * similarity + hardness * similarity.detach()
        negatives.append(without(scores, is_own, of[0], of[1]))
    if directions != "image_to_text":
        scores = scale * (text[own] @ image.T)
        negatives.append(without(scores, torch.eye(len(image)).bool(), of[0], of[0]))
    ways = len(negatives)
    if within in ("image", "both"):
        scores = scale * (image @ image.T)
        negatives.append(without(scores, torch.eye(len(image)).bool(), of[0], of[0]))
    if within in ("text", "both"):
        negatives.append(without(scale * (text[own] @ text.T), is_own, of[0], of[1]))
    if partition == "joint":
        everything = torch.cat([positive[:, None]] * ways + negatives, 1)
        return (everything.logsumexp(1) - positive).mean()
    terms = [torch.cat([positive[:, None], x], 1).logsumexp(1) - positive for x in negatives]
    return torch.stack(terms).mean()


def batch(sizes: Sizes, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return features and ids of all ranks, and the rows of the positives."""
    generator = torch.Generator().manual_seed(seed)
    b, n = (sum(size[side] for size in sizes) for side in (0, 1))
    image, text = (
        F.normalize(torch.randn(rows, 6, dtype=torch.float64, generator=generator), dim=1)
        for rows in (b, n)
    )
    starts = [sum(size[1] for size in sizes[:rank]) for rank in range(len(sizes))]
    own = torch.cat([torch.arange(size[0]) + at for size, at in zip(sizes, starts, strict=True)])
    return image, text, torch.randint(0, n, (n,), generator=generator), own


def differentiated(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def expected(
    sizes: Sizes, case: str, has_ids: bool, scale: float = SCALE, seed: int = 0
) -> list[Tensor]:
    image, text, ids, own = batch(sizes, seed)
    scale_ = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    inputs = [image.requires_grad_(), text.requires_grad_()]
    loss = dense(*inputs, scale_, own, ids if has_ids else None, **CASES[case])
    return differentiated(loss, *inputs, scale_)


def found(
    sizes: Sizes, loss_fn: Any, has_ids: bool, rank: int = 0, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    image, text, ids, _ = batch(sizes)
    starts = [[sum(size[side] for size in sizes[:rank]) for side in (0, 1)]][0]
    mine = [slice(at, at + size) for at, size in zip(starts, sizes[rank], strict=True)]
    inputs = [
        x[rows].to(dtype).requires_grad_() for x, rows in zip((image, text), mine, strict=True)
    ]
    scale = torch.tensor(SCALE, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    call = {"ids": ids[mine[1]]} if has_ids else {}
    return differentiated(loss_fn(*inputs, scale, **call), *inputs, scale)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", [[(9, 9)], [(9, 14)], [(1, 1)]], ids=str)
@pytest.mark.parametrize("has_ids", [False, True])
def test_loss_equals_the_dense_formula(case: str, sizes: Sizes, has_ids: bool) -> None:
    values = found(sizes, ContrastiveLoss(**CASES[case]), has_ids)
    for value, wanted in zip(values, expected(sizes, case, has_ids), strict=True):
        assert torch.allclose(value, wanted, rtol=1e-12, atol=1e-14)


def test_small_hardness_is_not_rounded_with_a_half_scale() -> None:
    image, text, *_ = batch([(9, 9)])
    loss_fn, scale = ContrastiveLoss(hardness=0.1), torch.tensor(100.0)
    # In bf16, 100 and 100.1 are equal.
    assert torch.equal(loss_fn(image, text, scale.bfloat16()), loss_fn(image, text, scale))


@pytest.mark.parametrize("case", ["joint both both 5", "each both none 5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp32_and_bf16_are_close_to_the_dense_formula(case: str, dtype: torch.dtype) -> None:
    sizes = [(70, 81)]
    loss_fn = ContrastiveLoss(**CASES[case], workspace_bytes=2**20)
    wanted = expected(sizes, case, True)
    eps = torch.finfo(dtype).eps
    for value, one in zip(found(sizes, loss_fn, True, dtype=dtype), wanted, strict=True):
        # Rounding the features of both towers changes logits of 13 by up to 13 eps each.
        assert relative_error(value, one) < 26 * eps


RANKS: list[Sizes] = [[(8, 8), (5, 17)], [(3, 9), (7, 7), (1, 20)]]


def _steps(rank: int, sizes: Sizes) -> dict[str, list[Tensor]]:
    names = list(EXCHANGES)
    return {
        case: found(sizes, make_loss(names[k % len(names)], **CASES[case]), True, rank)
        for k, case in enumerate(CASES)
    }


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", RANKS, ids=len)
def test_loss_across_ranks_equals_the_dense_formula(sizes: Sizes) -> None:
    by_rank = run_ranks(_steps, len(sizes), sizes)
    for case in CASES:
        loss, *of_features, of_scale = expected(sizes, case, True)
        for rank in range(len(sizes)):
            parts = [
                len(sizes) * x.split([size[side] for size in sizes])[rank]
                for side, x in enumerate(of_features)
            ]
            for value, wanted in zip(by_rank[rank][case], [loss, *parts, of_scale], strict=True):
                assert torch.allclose(value, wanted, rtol=1e-11, atol=1e-13), (case, rank)


@pytest.mark.parametrize(
    ("needs", "case"),
    [
        ((True, False, False), "joint both both 5"),
        ((False, True, False), "joint both both 5"),
        ((False, False, True), "joint image_to_text text 0"),
        ((False, False, False), "joint both image 0"),
    ],
)
def test_skipped_gradients_leave_the_others_unchanged(needs: Any, case: str) -> None:
    image, text, _, own = batch([(9, 9)])
    inputs = [image, text, torch.tensor(SCALE, dtype=torch.float64)]
    for x, need in zip(inputs, needs, strict=True):
        x.requires_grad_(need)
    loss = ContrastiveLoss(**CASES[case])(*inputs)
    wanted = dense(*inputs, own, None, **CASES[case])
    assert torch.allclose(loss, wanted, rtol=1e-13)
    trained = [x for x in inputs if x.requires_grad]
    if trained:
        grads = torch.autograd.grad(loss, trained), torch.autograd.grad(wanted, trained)
        for value, one in zip(*grads, strict=True):
            assert torch.allclose(value, one, rtol=1e-12, atol=1e-14)


def test_matryoshka_applies_the_loss_to_each_width() -> None:
    case = CASES["joint both both 5"]
    image, text, _, own = batch([(9, 9)])
    loss = MatryoshkaLoss(loss=ContrastiveLoss(**case), widths=[6, 2])(image, text, SCALE)
    scale = torch.tensor(SCALE, dtype=torch.float64)
    parts = [
        dense(*(F.normalize(x[:, :width], dim=1) for x in (image, text)), scale, own, None, **case)
        for width in (6, 2)
    ]
    assert loss.item() == pytest.approx(sum(parts).item(), rel=1e-13)


@pytest.mark.parametrize(
    ("setup", "call", "message"),
    [
        ({"within": "image"}, {}, "Only a softmax over all directions has a positive"),
        ({"hardness": 1.0, "directions": "text_to_image"}, {}, "weights the negatives of images"),
        ({"partition": "joint", "label_smoothing": 0.1}, {}, "a pair has one positive"),
        ({"hardness": 2.0, "false_negatives": "absolute"}, {}, "all negatives count"),
        ({"partition": "joint"}, {"weights": torch.ones(9)}, "Passed `weights` to"),
        ({"hardness": 1.0}, {"statistics": True}, "Passed `statistics` to"),
    ],
)
def test_contradicting_arguments_raise(setup: Any, call: Any, message: str) -> None:
    image, text, *_ = batch([(9, 9)])
    with pytest.raises(ValueError, match=message):
        ContrastiveLoss(**setup)(image, text, 1.0, **call)


PEER = {
    "none": (),
    "image": ("query_to_query",),
    "text": ("doc_to_doc",),
    "both": ("query_to_query", "doc_to_doc"),
}


@pytest.mark.parametrize("case", [case for case in CASES if "text_to_image both" not in case])
@pytest.mark.parametrize("texts", [9, 18])
def test_loss_equals_sentence_transformers(case: str, texts: int) -> None:
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    setup = CASES[case]
    if texts > 9 and setup["within"] in ("text", "both"):
        return  # the peer masks the hard negatives of a text's own pair
    back = ("doc_to_query",) if setup["directions"] == "both" else ()
    peer = losses.MultipleNegativesRankingLoss(
        None,
        scale=SCALE,
        directions=("query_to_doc", *back, *PEER[setup["within"]]),
        partition_mode="joint" if setup["partition"] == "joint" else "per_direction",
        hardness_mode="all_negatives" if setup["hardness"] else None,
        hardness_strength=setup["hardness"],
    )
    image, text, *_ = batch([(9, texts)])
    inputs = [image.requires_grad_(), text.requires_grad_()]
    theirs = peer.compute_loss_from_embeddings([image, *text.split(9)], None)
    scale = torch.tensor(SCALE, dtype=torch.float64)
    # The peer normalizes inside, which removes the component of a gradient along its row.
    ours = ContrastiveLoss(**setup)(*(F.normalize(x, dim=1) for x in inputs), scale)
    for value, wanted in zip(
        differentiated(ours, *inputs), differentiated(theirs, *inputs), strict=True
    ):
        assert torch.allclose(value, wanted, rtol=1e-12, atol=1e-14)
