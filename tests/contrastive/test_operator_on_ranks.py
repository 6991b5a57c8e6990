"""Losses across ranks compile to one graph that is bitwise equal to eager mode."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import ContrastiveLoss, MatryoshkaLoss, SigmoidContrastiveLoss
from tests.processes import run_ranks

pytestmark = pytest.mark.distributed

SIZES = ([9, 9], [12, 5])  # equal sizes on both ranks, different sizes in the next call
LOSSES = {"softmax": ContrastiveLoss, "sigmoid": SigmoidContrastiveLoss}
POSITIVES = torch.tensor([[1, 3], [0, -1], [2, -1]])


def leaves(b: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    features = [torch.randn(size, 24).to(dtype) for size in (b, n)]
    return [x.requires_grad_() for x in (*features, torch.tensor(2.0), torch.tensor(-3.0))]


def _results(function: Any, inputs: list[Tensor], trained: list[Tensor]) -> list[Tensor]:
    loss, statistics = function(*inputs)
    gradients = torch.autograd.grad(loss, trained) if trained else ()
    return [loss.detach(), *gradients, *statistics]


def _compare(rank: int, name: str, options: dict[str, Any], locked: tuple[int, ...]) -> None:
    group = dist.new_group([0, 1]) if options.pop("own_group", False) else None
    dtype = options.pop("dtype", torch.float32)
    loss_fn = LOSSES[name](process_group=group, **options)

    def step(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Any:
        image, text = F.normalize(image, dim=1), F.normalize(text, dim=1)
        ids = torch.arange(len(text), device=text.device) % 4
        loss, statistics = loss_fn(image, text, scale.exp(), bias, ids=ids, statistics=True)
        return 3 * loss, statistics

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for sizes in SIZES:
        b = sizes[rank]
        inputs = leaves(b, b + 2, dtype)
        for place in locked:
            inputs[place].requires_grad_(False)
        trained = [x for x in inputs if x.requires_grad]
        pairs = zip(*(_results(f, inputs, trained) for f in (step, compiled)), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs), (name, options, locked, sizes)


def _others(rank: int) -> None:
    """Compare compiled and eager losses if ranks have different locked towers."""
    text, scale = torch.randn(5, 24, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    image = torch.randn(3, 24, requires_grad=rank == 1)
    losses: dict[str, Any] = {
        "smoothing": (ContrastiveLoss(label_smoothing=0.1), {"weights": torch.rand(3)}),
        "positives": (ContrastiveLoss(), {"positives": POSITIVES}),
        "matryoshka": (MatryoshkaLoss(widths=[24, 8]), {}),
    }
    for name, (loss_fn, pairs) in losses.items():
        torch._dynamo.reset()
        compiled = torch.compile(loss_fn, backend="aot_eager", fullgraph=True)
        trained = [x for x in (image, text, scale) if x.requires_grad]
        results = []
        for function in (loss_fn, compiled):
            loss = function(image, text, scale, **pairs)
            results.append([loss.detach(), *torch.autograd.grad(loss, trained)])
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True)), name


def _compare_all(rank: int, cases: list[Any], others: bool) -> None:
    torch.manual_seed(rank)
    for name, options, locked in cases:
        torch._dynamo.reset()  # Dynamo compiles the code of `step`, shared by all cases, few times
        _compare(rank, name, dict(options), locked)
    if others:
        _others(rank)


LOCKED_IMAGES: Any = ({"own_group": True, "dtype": torch.bfloat16}, (0,))
GATE: list[Any] = [("softmax", {}, ()), ("sigmoid", *LOCKED_IMAGES)]
REST = [
    ("softmax", *LOCKED_IMAGES),
    ("softmax", {"directions": "image_to_text", "workspace_bytes": 2**20}, (1,)),
    ("sigmoid", {}, ()),
    *((name, {"exchange": "ring"}, ()) for name in LOSSES),
    *((name, {}, locked) for name in LOSSES for locked in ((0, 1, 3), (0, 1, 2, 3))),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "others"), [(GATE, True), pytest.param(REST, False, marks=pytest.mark.sweep)]
)
def test_compiled_loss_across_ranks_is_one_graph_and_equals_eager(
    cases: list[Any], others: bool
) -> None:
    """Each new process imports the compiler, so one case covers several losses."""
    run_ranks(_compare_all, 2, cases, others)


def _refused(rank: int, differs: str) -> str:
    image, text, *_ = leaves(6, 6, torch.float32)
    options = {}
    if differs == "width":
        image, text = image[:, : 24 - rank], text[:, : 24 - rank]
    else:
        options = {"directions": ("both", "image_to_text")[rank]}
    compiled = torch.compile(ContrastiveLoss(**options), backend="aot_eager")
    with pytest.raises(ValueError, match="All ranks must have") as error:
        compiled(image, text, 7.0)
    return str(error.value)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ("width", "features of (width, dtype)"),
        ("rules", "whose class or directions or"),
    ],
)
def test_different_options_of_compiled_losses_raise_on_all_ranks(differs: str, said: str) -> None:
    first, second = run_ranks(_refused, 2, differs)
    assert first == second
    assert said in first
