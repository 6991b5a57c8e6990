"""Extra texts and single directions, compared with a float64 ranking loss."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jsonargparse import ArgumentParser
from torch import Tensor, nn

from lightning_mp import ContrastiveLoss, SigmoidContrastiveLoss
from tests.contrastive.test_exchange import make_loss
from tests.processes import run_ranks
from tests.reference.contrastive import relative_error

DIRECTIONS = ("both", "image_to_text", "text_to_image")


def ranking_loss(
    image: Tensor, text: Tensor, scale: Tensor, direction: str, positives: Tensor
) -> Tensor:
    """`MultipleNegativesRankingLoss`: from anchors to all candidates, and from positives back.

    Args:
        image: The anchors, (B, D).
        text: The candidates, (N, D).
        scale: One value.
        direction: The direction of the loss.
        positives: The candidate of each anchor.
    """
    scores = scale * image @ text.T
    forwards = F.cross_entropy(scores, positives)
    backwards = F.cross_entropy(scores[:, positives].T, torch.arange(len(image)))
    return {
        "both": (forwards + backwards) / 2,
        "image_to_text": forwards,
        "text_to_image": backwards,
    }[direction]


def data(b: int, n: int, width: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image, text = (torch.randn(size, width, generator=generator) for size in (b, n))
    text[:b] += image
    features = [F.normalize(x, dim=1).to(dtype).requires_grad_() for x in (image, text)]
    return [*features, torch.tensor(20.0, requires_grad=True)]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("b", "n"), [(193, 457), (65, 65), (1, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("workspace_bytes", [1, 2**25])
def test_loss_equals_the_ranking_loss(
    b: int, n: int, direction: str, dtype: torch.dtype, workspace_bytes: int
) -> None:
    inputs = data(b, n, 24, 0, dtype)
    loss_fn = ContrastiveLoss(directions=direction)
    loss_fn.workspace_bytes = workspace_bytes
    loss = loss_fn(*inputs)
    found = [loss.detach(), *torch.autograd.grad(loss, inputs)]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    right = ranking_loss(*doubles, direction, torch.arange(b))
    expected = [right.detach(), *torch.autograd.grad(right, doubles)]
    for value, other in zip(found, expected, strict=True):
        # Logits near 20 are multiples of 2e-6 in fp32, and terms of the scale's gradient cancel.
        bound = 4e-5 if value.dtype == torch.float32 else max(torch.finfo(dtype).eps, 1e-12)
        assert (value - other).norm() <= bound * other.norm() + 1e-12


def test_extra_texts_are_negatives_of_the_sigmoid_loss() -> None:
    image, text, scale = data(50, 120, 24, 1, torch.float32)
    loss = SigmoidContrastiveLoss()(image, text, scale, -5.0)
    found = [loss.detach(), *torch.autograd.grad(loss, (image, text))]
    doubles = [x.detach().double().requires_grad_() for x in (image, text)]
    labels = 2 * torch.eye(50, 120) - 1
    logits = 20 * doubles[0] @ doubles[1].T - 5
    right = -F.logsigmoid(labels * logits).sum() / 50
    expected = [right.detach(), *torch.autograd.grad(right, doubles)]
    assert all(relative_error(*pair) < 1e-5 for pair in zip(found, expected, strict=True))


def _step(rank: int, sizes: list[tuple[int, int]], exchange: str, direction: str) -> Any:
    image, text, scale = data(*sizes[rank], 12, rank, torch.float32)
    loss = make_loss(exchange, directions=direction)(image, text, scale)
    loss.backward()
    return [loss.detach(), image.grad, text.grad, scale.grad]


def _steps(rank: int, sizes: list[tuple[int, int]]) -> dict[tuple[str, str], Any]:
    cases = itertools.product(("ring", "one slice", "many slices"), DIRECTIONS)
    return {case: _step(rank, sizes, *case) for case in cases}


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [[(8, 8), (5, 17)], [(3, 9), (7, 7), (1, 20), (6, 8)]])
def test_loss_across_ranks_equals_the_ranking_loss(sizes: list[tuple[int, int]]) -> None:
    by_rank = run_ranks(_steps, len(sizes), sizes)
    ranks = [data(*size, 12, rank, torch.float64) for rank, size in enumerate(sizes)]
    ends = [0, *itertools.accumulate(n for _, n in sizes)]
    positives = torch.cat([torch.arange(b) + at for (b, _), at in zip(sizes, ends, strict=False)])
    scale = torch.tensor(20.0, dtype=torch.float64, requires_grad=True)
    for direction in DIRECTIONS:
        image, text = (torch.cat([one[index] for one in ranks]) for index in (0, 1))
        right = ranking_loss(image, text, scale, direction, positives)
        leaves = [x for one in ranks for x in one[:2]]
        d_scale, *expected = torch.autograd.grad(right, [scale, *leaves])
        for rank, exchange in itertools.product(
            range(len(sizes)), ("ring", "one slice", "many slices")
        ):
            loss, d_image, d_text, own_d_scale = by_rank[rank][exchange, direction]
            d_features = [len(sizes) * x for x in expected[2 * rank : 2 * rank + 2]]
            pairs = [(loss, right.detach()), (own_d_scale, d_scale)]
            pairs += zip((d_image, d_text), d_features, strict=True)
            for value, other in pairs:
                assert relative_error(value, other) < 2e-5, (direction, exchange, rank)


def test_error_for_unknown_direction_lists_known_values() -> None:
    with pytest.raises(ValueError, match=r"directions='rows'.*'both', 'image_to_text'"):
        ContrastiveLoss(directions="rows")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one term per pair, without a direction"):
        SigmoidContrastiveLoss(directions="both")  # type: ignore[call-arg]


def test_fewer_texts_than_images_raise() -> None:
    with pytest.raises(ValueError, match=r"a text for each image.*the same value in `ids`"):
        ContrastiveLoss()(torch.randn(4, 2), torch.randn(3, 2), 1.0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ContrastiveLoss", {"exchange": "ring", "directions": "image_to_text"}),
        ("ContrastiveLoss", {"duplicates": "multi_positive", "label_smoothing": 0.1}),
        ("ContrastiveLoss", {"false_negatives": "relative", "margin": 0.05}),
        ("SigmoidContrastiveLoss", {"exchange": "ring", "workspace_bytes": 2**21}),
    ],
)
def test_losses_can_be_configured_in_yaml(name: str, options: dict[str, Any]) -> None:
    parser = ArgumentParser()
    parser.add_argument("--loss", type=nn.Module)
    config = {"class_path": f"lightning_mp.{name}", "init_args": options}
    # jsonargparse has renamed this method and warns about the old name.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    loss = instantiate(parser.parse_object({"loss": config})).loss
    assert type(loss).__name__ == name
    assert {key: getattr(loss, key) for key in options} == options
