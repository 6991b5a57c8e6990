"""Planted numerical failures: NaN, inf, overflow, underflow, and corrupted state."""

import functools
import math
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from lightning_mp import BalancedAMP, LossScaleConfig
from lightning_mp.callbacks import SpikeGuard
from tests.monitors.planted import Fit, Planted, perceptron

STEP = 60  # step at which most planted failures begin


class Then(nn.Module):
    """A linear layer, an operation that can fail, and a head."""

    def __init__(self, operation: nn.Module) -> None:
        super().__init__()
        self.stem, self.operation = nn.Linear(8, 16), operation
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.operation(self.stem(x)))


class Operation(nn.Module):
    """A function as a module.

    Args:
        function: Maps inputs and epsilon to outputs.
        small: Epsilon that keeps outputs and gradients finite.
    """

    def __init__(self, function: Any, small: float = 0.0) -> None:
        super().__init__()
        self.function, self.small = function, small

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.small)


def root(x: Tensor, small: float) -> Tensor:
    """The derivative at 0 is inf * 0 by the chain rule, which is NaN."""
    return (x.square() + small).sqrt()


def logarithm(x: Tensor, small: float) -> Tensor:
    """The result is -inf for x below -104, where the sigmoid underflows."""
    return (x.sigmoid() + small).log()


def guarded_root(x: Tensor, small: float) -> Tensor:
    """Values are finite, but the gradient is NaN because of the unused branch of `torch.where`."""
    inside = x.clamp(min=small) if small else x
    return torch.where(x > 0, inside.sqrt(), 0.0)


def standardize(x: Tensor, small: float) -> Tensor:
    return (x - x.mean(dim=1, keepdim=True)) / (x.std(dim=1, keepdim=True) + small)


class Masked(nn.Module):
    """Attention over the nonzero numbers among the eight numbers of a sample.

    Args:
        fill: Value of masked logits.
    """

    def __init__(self, fill: float = -math.inf) -> None:
        super().__init__()
        self.fill = fill
        self.query, self.value = nn.Linear(1, 1), nn.Linear(1, 16)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.query(x[..., None])[..., 0].masked_fill(x == 0, self.fill)
        return (logits.softmax(dim=1)[..., None] * self.value(x[..., None])).sum(dim=1)


def attention(fill: float = -math.inf) -> nn.Module:
    return nn.Sequential(Masked(fill), nn.Tanh(), nn.Linear(16, 1))


def standardized(small: float = 0.0) -> nn.Module:
    return nn.Sequential(Operation(standardize, small), perceptron())


def at_step(change: Any, last: int = STEP) -> Any:
    """Return a `corrupt` that changes the inputs of batches from `STEP` to `last`."""

    def corrupt(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (change(x) if STEP <= index <= last else x), y

    return corrupt


def first_row(value: float) -> Any:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[0] = value
        return x

    return change


def repaired(change: Any, limit: float = 10.0, last: int = STEP) -> Any:
    """Return `at_step(change)` with non-finite values set to 0 and others clamped."""

    def corrupt(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = at_step(change, last)(index, x, y)
        return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-limit, limit), y

    return corrupt


def spoil_weight(model: Fit, index: int) -> None:
    if index == STEP:
        with torch.no_grad():
            model.network[2].weight[0, 0] = math.nan


def zero_bias(model: Fit, index: int) -> None:
    if index == STEP:
        with torch.no_grad():
            model.network.stem.bias.zero_()


def spoil_state(model: Fit, index: int) -> None:
    """Set all second moments to inf, as a gradient of 1e20 does, so that weights stop changing."""
    if index == STEP:
        for state in model.optimizers().optimizer.state.values():
            state["exp_avg_sq"].fill_(math.inf)


def spoil_and_reset_state(model: Fit, index: int) -> None:
    spoil_state(model, index)
    if index == STEP + 1:
        model.optimizers().optimizer.state.clear()


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1))


class WithBatchNorm(Fit):
    """Has learned if the loss with running statistics is at most 1.5 times the training loss."""

    def __init__(self, corrupt: Any, steps: int = 200) -> None:
        super().__init__(normalized, corrupt=corrupt, steps=steps)

    def progress(self) -> tuple[float, float]:
        measured = statistics.fmean(self.losses[-20:])
        with torch.no_grad():
            batches = [self.batch(1000 + i, torch.Generator().manual_seed(i)) for i in range(10)]
            self.eval()
            kept = statistics.fmean(self.loss(batch).item() for batch in batches)
        return kept, 1.5 * measured


def grow(name: str, factor: float) -> Any:
    """Return a `before` that multiplies a weight by `factor` before each batch."""

    def before(model: Fit, index: int) -> None:
        with torch.no_grad():
            model.get_parameter(name).mul_(factor)

    return before


class Wide(nn.Module):
    """A layer whose outputs may grow, because the norm after it removes their scale."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.up(x)).relu())


class Stream(nn.Module):
    """Sixteen blocks that add to a residual stream."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x))))

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(self.Block() for _ in range(16))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def swell(model: Fit, index: int) -> None:
    """Make each of 16 blocks add 24 more to one channel: the stream grows by 384 in each step."""
    with torch.no_grad():
        for block in model.network.blocks:
            block.down.bias[0] = 24.0 * index


class Attention(nn.Module):
    """Attention among the eight numbers of a sample.

    Args:
        has_norm: Whether queries and keys are normalized, which bounds the logits.
    """

    def __init__(self, has_norm: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.has_norm, self.largest = has_norm, 0.0

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.query(x), self.key(x)
        if self.has_norm:
            query, key = 4 * F.normalize(query, dim=-1), 4 * F.normalize(key, dim=-1)
        self.largest = float((query.detach() @ key.detach().mT).abs().max() / 4)
        return F.scaled_dot_product_attention(query, key, self.value(x))


class Attends(nn.Module):
    """Embeds eight numbers, applies attention, and sums the result."""

    def __init__(self, has_norm: bool = False) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(1, 16), nn.Parameter(torch.randn(8, 16))
        self.attention, self.head = Attention(has_norm), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x[..., None]) + self.position
        return self.head((x + self.attention(x)).tanh().mean(dim=1))


class Sharpened(Fit):
    """Has learned if the largest logit is below 1000, where the softmax is one-hot."""

    def __init__(self, has_norm: bool = False) -> None:
        super().__init__(functools.partial(Attends, has_norm), steps=400, before=sharpen)

    def progress(self) -> tuple[float, float]:
        return self.network.attention.largest, 1000.0


def sharpen(model: Fit, index: int) -> None:
    with torch.no_grad():
        for layer in (model.network.attention.query, model.network.attention.key):
            layer.weight.mul_(1.015)


FAILURES = [
    Planted(
        name="square root at 0",
        settings={
            "network": lambda: Then(Operation(root)), "corrupt": at_step(first_row(0.0)),
            "before": zero_bias,
        },
        monitor="NonFiniteLocator", kind="non_finite", tensors=("network.operation",),
        from_step=STEP, step=STEP,
        advises="torch.sqrt(x + 1e-6)",
        cure="an epsilon inside the square root",
        remedy={"network": lambda: Then(Operation(root, 1e-6))},
    ),
    Planted(
        name="NaN in the backward of the unused branch of torch.where",
        settings={"network": lambda: Then(Operation(guarded_root))},
        monitor="NonFiniteLocator", kind="non_finite", tensors=("network.operation",), step=0,
        advises="add a small number inside",
        cure="an input that is safe for both branches",
        remedy={"network": lambda: Then(Operation(guarded_root, 1e-6))},
    ),
    Planted(
        name="logarithm of 0",
        settings={
            "network": lambda: Then(Operation(logarithm)), "corrupt": at_step(lambda x: 1e4 * x),
        },
        monitor="NonFiniteLocator", kind="non_finite", tensors=("network.operation",),
        from_step=STEP, step=STEP,
        advises="logarithm",
        cure="an epsilon inside the logarithm",
        remedy={"network": lambda: Then(Operation(logarithm, 1e-6))},
    ),
    Planted(
        name="softmax of a fully masked row",
        settings={"network": attention, "corrupt": at_step(first_row(0.0)), "share": 0.95},
        monitor="NonFiniteLocator", kind="non_finite", tensors=("network.0",),
        from_step=STEP, step=STEP,
        advises="a softmax over a fully masked row",
        cure="a finite value for masked logits",
        remedy={"network": functools.partial(attention, -1e4)},
    ),
    Planted(
        name="division by the standard deviation of a constant",
        settings={"network": standardized, "corrupt": at_step(first_row(1.0))},
        monitor="NonFiniteLocator", kind="non_finite", tensors=("network.0",),
        from_step=STEP, step=STEP,
        advises="division by 0",
        cure="an epsilon added to the standard deviation",
        remedy={"network": functools.partial(standardized, 1e-6)},
    ),
    Planted(
        name="inf in a batch",
        settings={"corrupt": at_step(first_row(math.inf))},
        monitor="NonFiniteLocator", kind="non_finite", tensors=("batch[0]",),
        from_step=STEP, step=STEP,
        advises="nan_to_num",
        cure="data without inf", remedy={"corrupt": repaired(first_row(math.inf))},
    ),
    Planted(
        name="NaN in a weight",
        settings={"before": spoil_weight, "steps": 300},
        monitor="NonFiniteLocator", kind="non_finite", tensors=("network.2.weight",),
        from_step=STEP, step=STEP,
        advises="SpikeGuard(action='rewind')",
        cure="SpikeGuard(action='rewind')",
        callbacks=lambda: [
            SpikeGuard(action="rewind", rewind_steps=10, skip_batches=20,
                       checkpoint_every_n_steps=20)
        ],
    ),
    Planted(
        name="inf in Adam's second moment",
        settings={"before": spoil_state, "steps": 400, "lr": 1e-3, "share": 0.6},
        monitor="AdamStateMonitor", kind="optimizer_state_non_finite",
        tensors=("network.2.weight",), from_step=STEP, step=STEP,
        advises="reset these states",
        cure="a reset of the optimizer's state", remedy={"before": spoil_and_reset_state},
    ),
    Planted(
        name="inf in BatchNorm's running variance",
        model=WithBatchNorm, settings={"corrupt": at_step(lambda x: 1e20 * x)},
        monitor="ActivationRangeMonitor", kind="buffer_non_finite",
        tensors=("network.1.running_var",), from_step=STEP, step=STEP,
        advises="far out of range",
        cure="clamped inputs", remedy={"corrupt": repaired(lambda x: 1e20 * x)},
    ),
    Planted(
        name="overflow of an activation",
        settings={"network": Wide, "steps": 400, "before": grow("network.up.weight", 1.03)},
        precision=BalancedAMP,
        monitor="ActivationRangeMonitor", kind="activation_headroom", tensors=("network.up",),
        step=300,
        advises="fp32_modules=['norm', 'network.up']",
        cure="fp32 for this module",
        cured_precision=lambda: BalancedAMP(fp32_modules=["norm", "network.up"]),
    ),
    Planted(
        name="slow growth of the residual stream",
        settings={"network": Stream, "steps": 210, "before": swell},
        precision=BalancedAMP,
        monitor="ActivationRangeMonitor",
        kind="activation_headroom", tensors=("network.blocks.11",), step=60,
        advises="half='bf16'",
        cure="bf16", cured_precision=lambda: BalancedAMP(half="bf16"),
    ),
    Planted(
        name="growth of attention logits",
        model=Sharpened,
        monitor="ActivationRangeMonitor", kind="attention_logit",
        tensors=("network.attention",), step=160,
        advises="Normalize queries and keys",
        cure="normalized queries and keys", remedy={"has_norm": True},
    ),
    Planted(
        name="underflow of gradients from the first step",
        settings={"factor": 3e-6, "optimizer": SGD, "lr": 3e3, "steps": 300, "share": 0.56},
        precision=lambda: BalancedAMP(loss_scale=1.0),
        monitor="GradientUnderflowMonitor", kind="gradient_underflow",
        tensors=("network.0.weight",), step=0,
        advises="Raise the loss scale by `BalancedAMP(loss_scale=LossScaleConfig(init_scale=64))`",
        cure="the recommended loss scale",
        cured_precision=lambda: BalancedAMP(loss_scale=LossScaleConfig(init_scale=64.0)),
    ),
    Planted(
        name="loss scale at its floor",
        settings={"corrupt": at_step(lambda x: 1e6 * x, last=200)},
        precision=BalancedAMP,
        monitor="LossScaleMonitor", kind="loss_scale_floor", from_step=STEP, step=73,
        advises="values far out of range",
        cure="clamped inputs", remedy={"corrupt": repaired(lambda x: 1e6 * x, last=200)},
    ),
]  # fmt: skip
