"""`MatryoshkaLoss` equals the float64 sum over normalized prefixes, on one rank and several."""

import contextlib
import itertools
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp import ContrastiveLoss, MatryoshkaLoss, SigmoidContrastiveLoss
from tests.contrastive.test_candidates import data
from tests.contrastive.test_exchange import EXCHANGES, make_loss
from tests.contrastive.test_ids import few_ids
from tests.contrastive.test_torch_tiles import PeakBytes, _addmm_flops
from tests.contrastive.visible import visible
from tests.processes import run_ranks
from tests.reference.contrastive import relative_error

WIDTHS, WEIGHTS = (24, 7, 16), (1.0, 0.5, 2.0)


def dense(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    positives: Tensor,
    *,
    ids: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """Return the sum of both cross-entropies over prefixes, for autograd."""
    total, rows = scale * 0, torch.arange(len(image))
    for width, weight in zip(WIDTHS, WEIGHTS, strict=True):
        cut = [x[:, :width] for x in (image, text)]
        left, right = (F.normalize(x, dim=1) for x in cut) if normalize else cut
        logits = scale * left @ right.T
        if ids is not None:
            others = (ids[positives, None] == ids).index_put((rows, positives), torch.tensor(False))
            logits = logits.masked_fill(others, -torch.inf)
        terms = F.cross_entropy(logits, positives) + F.cross_entropy(logits[:, positives].T, rows)
        total = total + weight * terms / 2
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("workspace_bytes", [1, 2**25])
@pytest.mark.parametrize("normalize", [True, False])
def test_loss_equals_the_sum_over_prefixes(
    dtype: torch.dtype, workspace_bytes: int, normalize: bool
) -> None:
    inputs = data(193, 260, 24, 0, dtype)
    for ids in (None, few_ids(260, 0)):
        loss_fn = MatryoshkaLoss(widths=WIDTHS, weights=WEIGHTS, normalize=normalize)
        loss_fn.loss.workspace_bytes = workspace_bytes
        loss = loss_fn(*inputs, ids=ids)
        found = [loss.detach(), *torch.autograd.grad(loss, inputs)]
        doubles = [x.detach().double().requires_grad_() for x in inputs]
        right = dense(*doubles, torch.arange(193), ids=ids, normalize=normalize)
        expected = [right.detach(), *torch.autograd.grad(right, doubles)]
        # Normalized prefixes are rounded to bf16, so logits of 20 have an error of 20 eps, and the
        # softmax has this relative error.
        rounded = 20 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
        for value, other in zip(found, expected, strict=True):
            # The scale's gradient is rounded to fp32, and its terms cancel.
            bound = rounded + (1e-12 if value.dtype == torch.float64 else 4e-5)
            assert relative_error(value, other) < bound


@pytest.mark.parametrize("trained", ["image", "text", "scale", "text scale", "image text", ""])
def test_only_inputs_that_require_grad_get_a_gradient(trained: str) -> None:
    inputs = data(60, 60, 24, 1, torch.float32)
    for name, leaf in zip(("image", "text", "scale"), inputs, strict=True):
        leaf.requires_grad_(name in trained.split())
    loss = MatryoshkaLoss(widths=WIDTHS, weights=WEIGHTS)(*inputs)
    assert loss.requires_grad == bool(trained)
    doubles = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    right = dense(*doubles, torch.arange(60))
    if trained:
        loss.backward()
        right.backward()
    assert relative_error(loss, right) < 1e-6
    for leaf, double in zip(inputs, doubles, strict=True):
        assert (leaf.grad is None) == (double.grad is None)
        assert leaf.grad is None or relative_error(leaf.grad, double.grad) < 4e-5


def test_products_add_up_over_the_widths() -> None:
    b, inputs = 200, data(200, 200, 24, 1, torch.float32)
    counted = {torch.ops.aten.addmm_: _addmm_flops}
    for opened in (visible(), contextlib.nullcontext()):
        with opened, FlopCounterMode(display=False, custom_mapping=counted) as counter:
            MatryoshkaLoss(widths=WIDTHS)(*inputs).backward()
        # All tiles of all prefixes fit the workspace, so the second sweep multiplies no tile.
        assert counter.get_total_flops() == 3 * 2 * b * b * sum(WIDTHS)


@pytest.mark.slow
def test_memory_is_one_workspace_plus_a_linear_part() -> None:
    b, width, workspace = 2048, 24, 2**20
    image, text = (torch.randn(b, width, requires_grad=True) for _ in range(2))
    loss_fn = MatryoshkaLoss(loss=ContrastiveLoss(workspace_bytes=workspace), widths=WIDTHS)
    with visible(), PeakBytes() as made:
        loss_fn(image, text, 20.0).backward()
    # Prefixes of images and their gradients, prefixes of texts for one width, two gradients of full
    # width, a float64 copy of a chunk, and for each width six float64 vectors in two layouts.
    linear = 4 * b * (2 * sum(WIDTHS) + 8 * width) + 24 * len(WIDTHS) * b * 8
    assert made.peak < workspace + linear < len(WIDTHS) * workspace + linear < b * b * 4


def _step(rank: int, sizes: list[tuple[int, int]], exchange: str) -> list[Tensor]:
    image, text, scale = data(*sizes[rank], 24, rank, torch.float32)
    loss_fn = MatryoshkaLoss(loss=make_loss(exchange), widths=WIDTHS, weights=WEIGHTS)
    loss = loss_fn(image, text, scale)
    loss.backward()
    return [loss.detach(), image.grad, text.grad, scale.grad]


def _steps(rank: int, sizes: list[tuple[int, int]]) -> dict[str, list[Tensor]]:
    return {exchange: _step(rank, sizes, exchange) for exchange in EXCHANGES}


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [[(8, 8), (5, 17)], [(3, 9), (7, 7), (1, 20), (6, 8)]])
def test_loss_across_ranks_equals_one_process(sizes: list[tuple[int, int]]) -> None:
    by_rank = run_ranks(_steps, len(sizes), sizes)
    ranks = [data(*size, 24, rank, torch.float64) for rank, size in enumerate(sizes)]
    ends = [0, *itertools.accumulate(n for _, n in sizes)]
    positives = torch.cat([torch.arange(b) + at for (b, _), at in zip(sizes, ends, strict=False)])
    scale = torch.tensor(20.0, dtype=torch.float64, requires_grad=True)
    image, text = (torch.cat([one[index] for one in ranks]) for index in (0, 1))
    right = dense(image, text, scale, positives)
    d_scale, *expected = torch.autograd.grad(right, [scale, *(x for one in ranks for x in one[:2])])
    for rank, exchange in itertools.product(range(len(sizes)), EXCHANGES):
        loss, d_image, d_text, own_d_scale = by_rank[rank][exchange]
        d_features = [len(sizes) * x for x in expected[2 * rank : 2 * rank + 2]]
        found = [(loss, right.detach()), (own_d_scale, d_scale), (d_image, d_features[0])]
        for value, other in [*found, (d_text, d_features[1])]:
            assert relative_error(value, other) < 2e-5, (exchange, rank)


class SentFeatures(TorchDispatchMode):
    """Counts the fp32 values that this rank sends in all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: ANN001
        if function.namespace == "c10d" and "allgather" in function._opname:
            _, piece, *_ = args
            self.count += piece.numel() * (piece.dtype == torch.float32)
        return function(*args, **(kwargs or {}))


def _gathers(rank: int) -> list[int]:
    """Return the number of feature values that a rank sends for one width and for three."""
    image, text, scale = data(8, 8, 24, rank, torch.float32)
    counts = []
    for widths in ([24], [24, 16, 8]):
        with visible(), SentFeatures() as sent:
            MatryoshkaLoss(widths=widths)(image, text, scale).backward()
        counts.append(sent.count)
    return counts


@pytest.mark.distributed
def test_texts_are_exchanged_once_for_all_widths() -> None:
    for one, three in run_ranks(_gathers, 2):
        assert one == three == 8 * 24  # for both sweeps


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (SigmoidContrastiveLoss(), {}),
        (ContrastiveLoss(label_smoothing=0.1), {}),
        (ContrastiveLoss(), {"weights": torch.rand(30)}),
    ],
)
def test_other_losses_are_called_for_each_width(loss: Any, options: dict[str, Tensor]) -> None:
    image, text, scale = data(30, 30, 24, 2, torch.float32)
    found = MatryoshkaLoss(loss=loss, widths=WIDTHS, weights=WEIGHTS)(
        image, text, scale, -3.0, **options
    )
    right = sum(
        weight
        * loss(*(F.normalize(x[:, :d], dim=1) for x in (image, text)), scale, -3.0, **options)
        for d, weight in zip(WIDTHS, WEIGHTS, strict=True)
    )
    assert torch.equal(found, right)


@pytest.mark.parametrize("loss", [ContrastiveLoss(), SigmoidContrastiveLoss()])
def test_prefix_of_zeros_in_fp16_has_the_loss_of_fp32(loss: ContrastiveLoss) -> None:
    image, text = torch.randn(2, 6, 8).half()
    image[0, :4] = 0
    loss_fn = MatryoshkaLoss(widths=[8, 4], loss=loss)
    expected = loss_fn(image.float(), text.float(), 10.0)
    torch.testing.assert_close(loss_fn(image, text, 10.0), expected, rtol=5e-3, atol=0)


def test_output_dict_second_derivatives_and_repr() -> None:
    image, text, scale = data(10, 10, 24, 2, torch.float32)
    loss_fn = MatryoshkaLoss(widths=[24, 8])
    assert list(loss_fn(image, text, scale, output_dict=True)) == ["contrastive_loss"]
    loss = loss_fn(image, text, scale)
    (gradient,) = torch.autograd.grad(loss, image, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        gradient.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(loss + gradient.square().sum(), image)
    assert "widths=(24, 8), weights=(1.0, 1.0), normalize=True" in repr(loss_fn)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"widths": []}, "a non-empty list of integers of at least 1"),
        ({"widths": [8, 0]}, r"widths=\[8, 0\].*integers of at least 1"),
        ({"widths": "8"}, "widths='8'.*integers of at least 1"),
        ({"widths": [8, 4], "weights": [1.0]}, "one number for each width"),
        ({"widths": [8, 4], "weights": [1.0, -1.0]}, "finite numbers of at least 0"),
        ({"widths": [8, 4], "weights": [1.0, math.inf]}, "finite numbers of at least 0"),
        ({"widths": [8], "loss": "ContrastiveLoss"}, r"`loss` must be a `ContrastiveLoss` or"),
    ],
)
def test_invalid_widths_raise(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MatryoshkaLoss(**arguments)


def test_widths_beyond_the_features_raise() -> None:
    with pytest.raises(ValueError, match=r"width 6 to `MatryoshkaLoss\(widths=\[8, 4\]\)`"):
        MatryoshkaLoss(widths=[8, 4])(torch.randn(3, 6), torch.randn(3, 6), 1.0)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "list": ({"image_features": [1.0]}, "`image_features` of type list"),
    "vector": ({"image_features": torch.ones(8)}, r"`image_features` of shape \[8\]"),
    "width": ({"image_features": torch.ones(3, 6), "text_features": torch.ones(3, 6)}, "width 6"),
    "negatives": ({"negatives": torch.ones(3, 2, 9)}, r"`negatives` of shape \[3, 2, 9\]"),
}


@pytest.mark.parametrize("loss", [ContrastiveLoss(), ContrastiveLoss(label_smoothing=0.1)])
@pytest.mark.parametrize("name", WRONG)
def test_error_shows_the_shapes_before_prefixes_are_taken(name: str, loss: ContrastiveLoss) -> None:
    wrong, said = WRONG[name]
    call: dict[str, Any] = {x: torch.ones(3, 8) for x in ("image_features", "text_features")}
    with pytest.raises(ValueError, match=said):
        MatryoshkaLoss(widths=[8, 4], loss=loss)(logit_scale=1.0, **{**call, **wrong})


def _with_one_that_is_wrong(rank: int) -> list[str]:
    """Return the error on each of two ranks if the second passes an invalid argument."""
    said = []
    for wrong, _ in WRONG.values():
        call: dict[str, Any] = {x: torch.ones(3, 8) for x in ("image_features", "text_features")}
        if "negatives" in wrong:
            call["negatives"] = torch.ones(3, 2, 8)
        try:
            MatryoshkaLoss(widths=[8, 4])(logit_scale=1.0, **{**call, **(wrong if rank else {})})
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.distributed
def test_invalid_argument_on_one_rank_raises_on_all_ranks() -> None:
    first, second = run_ranks(_with_one_that_is_wrong, 2)
    assert len(first) == len(WRONG)
    assert all("Rank 1 of 2 passed arguments that" in one for one in first)
    assert all(re.search(said, one) for one, (_, said) in zip(second, WRONG.values(), strict=True))


@pytest.mark.parametrize("name", ["duplicates", "hard_negatives"])
def test_unknown_argument_of_a_call_raises(name: str) -> None:
    features = torch.randn(3, 8)
    options: Any = {name: True}
    with pytest.raises(TypeError, match=f"Passed `{name}` to a call of `MatryoshkaLoss`.*`ids`"):
        MatryoshkaLoss(widths=[8, 4])(features, features, 1.0, **options)


def test_loss_can_be_configured_in_yaml() -> None:
    parser = ArgumentParser()
    parser.add_argument("--loss", type=nn.Module)
    inner = {"class_path": "lightning_mp.ContrastiveLoss", "init_args": {"exchange": "ring"}}
    options = {"widths": [768, 64], "weights": [1.0, 0.5], "loss": inner}
    config = {"class_path": "lightning_mp.MatryoshkaLoss", "init_args": options}
    # jsonargparse has renamed it, and warns of the old name.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    loss = instantiate(parser.parse_object({"loss": config})).loss
    assert (loss.widths, loss.weights, loss.loss.exchange) == ((768, 64), (1.0, 0.5), "ring")


@pytest.mark.parametrize("kind", [ContrastiveLoss, SigmoidContrastiveLoss])
def test_statistics_describe_the_largest_width(kind: Any) -> None:
    torch.manual_seed(0)
    image, text = (torch.randn(20, 16, dtype=torch.float64) for _ in range(2))
    loss_fn = MatryoshkaLoss(loss=kind(), widths=[4, 8], weights=[1.0, 2.0])
    loss, found = loss_fn(image, text, 5.0, statistics=True)
    eight = (F.normalize(x[:, :8], dim=1) for x in (image, text))
    _, expected = kind()(*eight, 5.0, statistics=True)
    assert found == expected
    assert loss.item() == pytest.approx(loss_fn(image, text, 5.0).item(), rel=1e-13)
    both, _ = loss_fn(image, text, 5.0, output_dict=True, statistics=True)
    assert both["contrastive_loss"].item() == loss.item()
