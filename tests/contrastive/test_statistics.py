"""`LossStatistics` of both losses equal those of all pairs in float64, also across ranks."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import ContrastiveLoss, LossStatistics, SigmoidContrastiveLoss
from lightning_mp.numerics.floats import accumulation_dtype
from tests.contrastive.test_candidates import data
from tests.contrastive.test_exchange import EXCHANGES
from tests.contrastive.test_ids import few_ids
from tests.processes import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Passed .*negative scale")

LOSSES: dict[str, Any] = {"softmax": ContrastiveLoss, "sigmoid": SigmoidContrastiveLoss}
BIAS = -3.0


def tie(width: int, dtype: torch.dtype, size: Tensor | float) -> Tensor | float:
    """Return `tau` of the docstring of `LossStatistics`, for logits of at most `size`."""
    return (2 + math.sqrt(width) / 2) * torch.finfo(accumulation_dtype(dtype)).eps * size


def check(
    found: LossStatistics,
    name: str,
    image: Tensor,
    text: Tensor,
    scale: float,
    ids: Tensor | None = None,
    *,
    positives: Tensor | None = None,
    slack: float = 0.0,
) -> None:
    """Compare statistics with float64; `slack` is an additional error of logits of the tiles."""
    b, dtype = len(image), image.dtype
    image, text = image.detach().double(), text.detach().double()
    rows = torch.arange(b)
    positives = rows if positives is None else positives
    logits = scale * image @ text.T + BIAS
    rivals = logits.clone()
    rivals[rows, positives] = -torch.inf
    if ids is not None:
        rivals.masked_fill_(ids[positives, None] == ids, -torch.inf)
    pos = logits[rows, positives]
    gaps = pos - torch.stack([rivals.amax(1), rivals.amax(0)[positives]])
    size = abs(scale) * image.norm(dim=1) * text[positives].norm(dim=1) + abs(BIAS)
    unsure = tie(image.shape[1], dtype, size) + slack
    for hits, value in zip(gaps, found[:2], strict=True):
        # If the gap is within the rounding error, a hit and a miss are both right.
        least, most = ((hits > 2 * unsure + sign * unsure).double().mean() for sign in (1, -1))
        assert least <= value.double() * (1 + 1e-6) + 1e-9
        assert value.double() * (1 - 1e-6) - 1e-9 <= most
    if name == "softmax":
        right = [(pos - torch.logaddexp(pos, rivals.logsumexp(dim)[at])).exp().mean()
                 for dim, at in ((1, rows), (0, positives))]  # fmt: skip
    else:
        right = [pos.sigmoid().mean()] * 2
    largest = torch.maximum(pos.amax(), rivals.amax())
    error = 4 * unsure.amax()  # error of a logit and of the logarithm of a probability
    for value, other in zip(found[2:], [*right, largest], strict=True):
        assert value.dtype == accumulation_dtype(dtype)
        assert (value - other).abs() <= error * other.abs().clamp_min(1.0)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("b", "n"), [(193, 193), (65, 200)])
@pytest.mark.parametrize("workspace_bytes", [1, 2**25])
def test_statistics_equal_float64_and_leave_the_loss_unchanged(
    name: str, b: int, n: int, dtype: torch.dtype, workspace_bytes: int
) -> None:
    image, text, scale = data(b, n, 24, 0, dtype)
    for ids in (None, few_ids(n, 0)):
        loss_fn = LOSSES[name]()
        loss_fn.workspace_bytes = workspace_bytes
        results = []
        for statistics in (False, True):
            loss = loss_fn(image, text, scale, BIAS, ids=ids, statistics=statistics)
            loss, found = loss if statistics else (loss, None)
            gradients = torch.autograd.grad(loss, (image, text, scale))
            results.append([loss.detach(), *gradients])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        assert all(value.ndim == 0 and not value.requires_grad for value in found)
        check(found, name, image, text, scale.item(), ids)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0, -100.0])
def test_collapsed_model_has_accuracy_zero(name: str, scale: float) -> None:
    feature = F.normalize(torch.randn(1, 70), dim=1)
    loss_fn = LOSSES[name]()
    _, found = loss_fn(feature.expand(90, -1), feature.expand(90, -1), scale, statistics=True)
    assert found[:2] == (0, 0)
    _, found = loss_fn(feature, feature, scale, statistics=True)
    assert found[:2] == (1, 1), "a pair without rivals is ahead of them"


@pytest.mark.parametrize("name", LOSSES)
def test_nan_is_not_a_hit(name: str) -> None:
    features = torch.eye(8)
    texts = features.clone()
    texts[5, 0] = torch.nan
    loss_fn = LOSSES[name]()
    assert loss_fn(features, features, 10.0, statistics=True)[1][:2] == (1, 1)
    _, found = loss_fn(features, texts, 10.0, statistics=True)
    assert found.image_to_text_top1 == 0
    assert found.text_to_image_top1 <= 7 / 8
    assert found.largest_logit.isnan()


def test_statistics_with_one_direction_and_with_output_dict() -> None:
    image, text, scale = data(40, 60, 16, 1, torch.float32)
    for directions in ("both", "image_to_text", "text_to_image"):
        _, found = ContrastiveLoss(directions=directions)(image, text, scale, BIAS, statistics=True)
        check(found, "softmax", image, text, scale.item())
    result, found = ContrastiveLoss()(image, text, scale, output_dict=True, statistics=True)
    assert list(result) == ["contrastive_loss"]
    assert list(found._asdict()) == list(LossStatistics._fields)


def test_statistics_are_weighted_and_independent_of_text_order() -> None:
    image, text, scale = data(40, 60, 16, 3, torch.float32)
    weights = torch.rand(40)
    weights[:7] = 0
    order = torch.randperm(60)
    loss_fn = ContrastiveLoss(label_smoothing=0.1)
    _, found = loss_fn(
        image, text[order], scale, positives=order.argsort()[:40], weights=weights, statistics=True
    )
    logits = 20 * image.double() @ text.double().T
    negatives = logits.masked_fill(torch.eye(40, 60, dtype=torch.bool), -torch.inf)
    for dim, name in ((1, "image_to_text"), (0, "text_to_image")):
        rivals = negatives[:, : 60 if dim else 40].amax(dim)
        hits = (logits.diagonal() > rivals).double()
        share = logits.softmax(dim).diagonal()
        for kind, each in (("top1", hits), ("probability", share)):
            right = (each * weights).sum() / weights.sum()
            assert getattr(found, f"{name}_{kind}").item() == pytest.approx(right.item(), rel=1e-5)


def test_statistics_without_unique_pairs_raise() -> None:
    image, text, scale = data(4, 4, 8, 3, torch.float32)
    with pytest.raises(ValueError, match="with `negatives` of an image alone"):
        ContrastiveLoss()(image, text, scale, negatives=image[:, None].detach(), statistics=True)
    with pytest.raises(ValueError, match="one positive per image"):
        ContrastiveLoss(duplicates="multi_positive")(
            image, text, scale, ids=torch.arange(4), statistics=True
        )
    with pytest.raises(ValueError, match="several positives of one image or text"):
        ContrastiveLoss()(image, text, scale, positives=torch.zeros(4).long(), statistics=True)


def _found(rank: int, sizes: list[tuple[int, int]]) -> dict[tuple[str, str], LossStatistics]:
    image, text, scale = data(*sizes[rank], 12, rank, torch.float32)
    results = {}
    for name, exchange in itertools.product(LOSSES, EXCHANGES):
        options: dict[str, Any] = dict(EXCHANGES[exchange])
        workspace_bytes = options.pop("workspace_bytes", None)
        loss_fn = LOSSES[name](**options)
        loss_fn.workspace_bytes = workspace_bytes
        result = loss_fn(image, text, scale, BIAS, statistics=rank != 1)
        loss, found = (result, None) if rank == 1 else result
        (d_image,) = torch.autograd.grad(loss, image)
        expected = torch.autograd.grad(loss_fn(image, text, scale, BIAS), image)[0]
        assert torch.equal(d_image, expected)
        results[name, exchange] = found
    return results


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [[(8, 8), (5, 17)], [(3, 9), (7, 7), (1, 20), (6, 8)]])
def test_statistics_cover_all_ranks(sizes: list[tuple[int, int]]) -> None:
    by_rank = run_ranks(_found, len(sizes), sizes)
    ranks = [data(*size, 12, rank, torch.float32) for rank, size in enumerate(sizes)]
    image, text = (torch.cat([one[index] for one in ranks]) for index in (0, 1))
    ends = [0, *itertools.accumulate(n for _, n in sizes)]
    positives = torch.cat([torch.arange(b) + at for (b, _), at in zip(sizes, ends, strict=False)])
    for name, exchange in itertools.product(LOSSES, EXCHANGES):
        found = [results[name, exchange] for results in by_rank]
        assert found[1] is None, "a rank that did not ask gets the loss alone"
        assert all(other == found[0] for other in found[2:])
        check(found[0], name, image, text, 20.0, positives=positives)


def _with_positives(rank: int) -> str:
    image, text, scale = data(4, 4, 12, rank, torch.float32)
    positives = torch.zeros(4).long() if rank else torch.arange(4)
    with pytest.raises(ValueError, match="several positives of one image or text") as caught:
        ContrastiveLoss()(image, text, scale, positives=positives, statistics=rank == 0)
    return str(caught.value)


@pytest.mark.distributed
def test_several_positives_on_a_rank_that_did_not_ask_raise_on_all_ranks() -> None:
    assert len(set(run_ranks(_with_positives, 2))) == 1


@pytest.mark.slow
def test_statistics_compile_without_graph_break() -> None:
    image, text, scale = data(30, 50, 16, 2, torch.float32)
    compiled = torch.compile(ContrastiveLoss(), backend="aot_eager", fullgraph=True)
    results = []
    for function in (ContrastiveLoss(), compiled):
        loss, found = function(image, text, scale, BIAS, statistics=True)
        results.append([*found, *torch.autograd.grad(loss, (image, text, scale))])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
