"""Losses with pair options compile to one graph that is bitwise equal to eager mode."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import ContrastiveLoss, MatryoshkaLoss
from tests.contrastive.pair_cases import CASES, PairCase
from tests.contrastive.test_operator import opcheck
from tests.contrastive.test_targets_uses import leaves_of
from tests.reference.contrastive import relative_error

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo reads `.grad`
]

GATE = ["smoothed_negatives", "shared_texts", "relative_with_guide"]


@pytest.fixture(autouse=True)
def _no_graphs() -> None:
    torch._dynamo.reset()  # Dynamo compiles the same code at most eight times


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


def step_of(case: PairCase) -> Any:
    """Return a function from leaves to their loss; torch 2.10 creates no module in a graph."""
    loss_fn = ContrastiveLoss(**case.setup)

    def step(*leaves: Tensor) -> Tensor:
        image, text, *negatives, scale = leaves
        call = {**case.call, "negatives": negatives[0]} if negatives else case.call
        loss: Tensor = loss_fn(image, text, scale, **call)
        return 2 * loss

    return step


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in GATE else pytest.mark.sweep) for x in CASES]
)
def test_compiled_loss_is_one_graph_and_equals_eager(name: str) -> None:
    case = PairCase(name, [(31, 40)], 5)
    leaves = leaves_of(case)
    results = []
    for function in (step_of(case), compiled(step_of(case))):
        loss = function(*leaves)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_new_batch_size_does_not_recompile() -> None:
    loss_fn = ContrastiveLoss(label_smoothing=0.1)

    def step(image: Tensor, text: Tensor, negatives: Tensor, positives: Tensor) -> Tensor:
        loss: Tensor = loss_fn(image, text, 20.0, negatives=negatives, positives=positives)
        return 3 * loss

    torch._dynamo.utils.counters.clear()  # counts of other tests in this process
    compiled_step = compiled(step, dynamic=True)
    for b in (5, 12, 33):
        sizes = ((b, 24), (b + 3, 24), (b, 4, 24))
        leaves = [F.normalize(torch.randn(size), dim=-1).requires_grad_() for size in sizes]
        positives = torch.randint(-1, b + 3, (b, 2))
        results = []
        for function in (step, compiled_step):
            loss = function(*leaves, positives)
            results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert torch._dynamo.utils.counters["graph_break"] == {}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    "trained",
    [(0, 3), *(pytest.param(x, marks=pytest.mark.sweep) for x in [(0,), (1,), (2,), ()])],
    ids=str,
)
def test_inputs_without_grad_get_no_gradient(trained: tuple[int, ...]) -> None:
    case = PairCase("negatives_of_captions", [(31, 40)], 5)
    leaves = leaves_of(case)
    every = torch.autograd.grad(step_of(case)(*leaves), leaves)
    for place, leaf in enumerate(leaves):
        leaf.requires_grad_(place in trained)
    loss = compiled(step_of(case))(*leaves)
    assert loss.requires_grad == bool(trained)
    if trained:
        loss.backward()
    for place, (leaf, right) in enumerate(zip(leaves, every, strict=True)):
        assert (leaf.grad is not None) == (place in trained)
        # If one tower is locked, the scale's gradient comes from the products of the other tower.
        assert leaf.grad is None or relative_error(leaf.grad, right) < 1e-5


def test_compiled_statistics_and_errors_equal_eager() -> None:
    image, text = (torch.randn(b, 8) for b in (6, 9))
    weights, positives = torch.rand(6), torch.arange(6).flip(0)
    loss_fn = ContrastiveLoss()

    def step(positives: Tensor) -> Any:
        options = {"positives": positives, "weights": weights}
        return loss_fn(image, text, 5.0, -1.0, statistics=True, **options)

    (found, values), (right, expected) = compiled(step)(positives), step(positives)
    assert torch.equal(found, right)
    assert torch.equal(torch.stack(values), torch.stack(expected))
    with pytest.raises(ValueError, match="from 4 to 9 with 9 texts on this rank"):
        compiled(step)(positives + 4)
    with pytest.raises(ValueError, match="several positives of one image or text"):
        compiled(step)(torch.zeros(6, dtype=torch.long))


def test_compiled_matryoshka_is_one_graph() -> None:
    leaves = [torch.randn(20, 24, requires_grad=True) for _ in range(2)]
    loss_fn = MatryoshkaLoss(widths=[24, 8], weights=[1.0, 0.5])
    results = []
    for function in (loss_fn, compiled(loss_fn)):
        loss = function(*leaves, 10.0)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize(
    "name",
    [
        "absolute_of_swapped",
        *(pytest.param(x, marks=pytest.mark.sweep) for x in ("absolute", "negatives_of_absolute")),
    ],
)
@pytest.mark.parametrize("trains", [True, pytest.param(False, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.sweep)], ids=str
)
def test_operators_pass_opcheck(name: str, trains: bool, dtype: torch.dtype) -> None:
    case = PairCase(name, [(9, 14)], 5)
    image, text, *negatives = (x.to(dtype).requires_grad_(trains) for x in case.features)
    scale = torch.tensor(20.0, requires_grad=trains)
    call = {**case.call, **({"negatives": negatives[0]} if negatives else {})}
    bias = torch.tensor(-1.0, requires_grad=trains)
    loss_fn = ContrastiveLoss(**case.setup)
    what = "contrastive_loss" if call.get("positives") is None else "_on_host"
    opcheck(lambda: loss_fn(image, text, scale, bias, weights=torch.rand(9), **call), what)


def test_second_derivatives_raise() -> None:
    case = PairCase("weights", [(9, 12)], 5)
    image, text, scale = leaves_of(case)
    loss = ContrastiveLoss(**case.setup)(image, text, scale, **case.call)
    (d_image,) = torch.autograd.grad(loss, image, create_graph=True)
    with pytest.raises(RuntimeError, match="which has a first derivative only"):
        d_image.sum().backward()
