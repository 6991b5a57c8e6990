"""One training for each row of docs/precision/support-table.md."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from lightning_mp import SafeAdamW
from tests.precision.models import Regression, perceptron, rows


def data() -> DataLoader:
    """Return six batches; the last batch is smaller."""
    return DataLoader(rows(86), batch_size=16)


# --- optimizers ----------------------------------------------------------------------------------


class SharpnessAware(SGD):
    """SAM: evaluates the loss twice per step and uses the gradient at the worst nearby point."""

    def _shift(self, sign: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(self.state[p]["shift"], alpha=sign)

    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["shift"] = 0.01 * p.grad.sign()
        self._shift(1.0)

    def second_step(self) -> None:
        self._shift(-1.0)
        super().step()

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()
        return loss


class ScheduleFree(SGD):
    """Replaces weights by their average for evaluation."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.is_training = True

    @torch.no_grad()
    def _move(self, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "average" in self.state[p]:
                    p.lerp_(self.state[p]["average"], weight)

    def train(self) -> None:
        if not self.is_training:
            self._move(-1.0)
        self.is_training = True

    def eval(self) -> None:
        if self.is_training:
            self._move(0.5)
        self.is_training = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p, 0.1)
        return result


class Switching(Regression):
    """Evaluates with the averaged weights after every step."""

    def __init__(self) -> None:
        super().__init__(make_optimizer=ScheduleFree)

    def on_train_batch_start(self, *_: Any) -> None:
        self.optimizers().train()

    def on_train_batch_end(self, *_: Any) -> None:
        self.optimizers().eval()


class Lookahead(Optimizer):
    """Averages with the weights of two steps before, every second step of an inner optimizer."""

    def __init__(self, parameters: Any) -> None:
        self.inner = SGD(parameters, lr=0.1)
        self.count = 0
        super().__init__(self.inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = self.inner.step(closure)
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if self.count % 2 == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)
        return result


class OfItsOwn(Regression):
    """Steps an optimizer that `configure_optimizers` does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_fit_start(self) -> None:
        self.own = SGD(self.network.parameters(), lr=0.1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.own.step()
        self.own.zero_grad()

    def configure_optimizers(self) -> list[Optimizer]:
        return []


class InTheBackward(OfItsOwn):
    """Steps each parameter as soon as its gradient is accumulated."""

    def on_fit_start(self) -> None:
        self.own = {p: SGD([p], lr=0.1) for p in self.network.parameters()}
        for p in self.own:
            p.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: Tensor) -> None:
        self.own[parameter].step()
        parameter.grad = None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))


def stepped_by(make: Callable[..., Optimizer], **kwargs: Any) -> Callable[[], LightningModule]:
    return lambda: Regression(make_optimizer=lambda p: make(p, **kwargs))


# --- torch.compile -------------------------------------------------------------------------------


class Residual(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.linear(self.norm(x)))


class Stack(nn.Module):
    """Two equal blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for block in self.blocks:
            x = block(x)
        return self.down(x)


def compiled_in_place() -> nn.Module:
    network = Stack()
    network.compile(backend="aot_eager", fullgraph=True)
    return network


def compiled_regions() -> nn.Module:
    network = Stack()
    for block in network.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return network


def compiled_wrapper() -> nn.Module:
    return torch.compile(Stack(), backend="aot_eager")


class Compiled(Regression):
    """Records nothing in a step, because recording would break the graph."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)


def compiled_lightning_module() -> Any:
    return torch.compile(Compiled(), backend="aot_eager")


# --- threads -------------------------------------------------------------------------------------


class Meeting(nn.Linear):
    """A layer that lets another thread run during its forward."""

    amid: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        amid, self.amid = self.amid, None
        if amid is not None:
            amid()
        return super().forward(x)


class Watched(Regression):
    """Another thread evaluates the model or a copy during a forward in training."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__(lambda: nn.Sequential(Meeting(8, 16), nn.GELU(), nn.Linear(16, 1)))
        self.copies = copies

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        subject = copy.deepcopy(self.network) if self.copies else self.network
        errors: list[Exception] = []

        def look() -> None:
            try:
                dtype = next(self.parameters()).dtype
                half = self.trainer.precision_plugin.half_dtype
                with torch.no_grad(), torch.autocast("cpu", half, enabled=dtype != half):
                    subject(batch[0])
            except RuntimeError as error:
                errors.append(error)

        def meet() -> None:
            thread = threading.Thread(target=look)
            thread.start()
            thread.join(60)
            if errors:
                raise errors[0]

        if hasattr(self.trainer.precision_plugin, "half_dtype"):
            self.network[0].amid = meet
        return super().training_step(batch, batch_idx)


# --- parameter-efficient fine-tuning, and other modules ------------------------------------------


class Adapted(nn.Module):
    """A frozen layer plus a trainable low-rank layer (LoRA)."""

    def __init__(self, base: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(8, 16).to(base).requires_grad_(False)
        self.low, self.up, self.head = nn.Linear(8, 2), nn.Linear(2, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        base = self.base(x.to(self.base.weight.dtype))  # a half base takes half inputs
        return self.head(nn.functional.gelu(base.to(self.head.weight.dtype) + self.up(self.low(x))))


class LowRank(nn.Module):
    """A parametrization that adds a low-rank product to a frozen weight."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rows, 2) * 0.1)
        self.b = nn.Parameter(torch.randn(2, columns) * 0.1)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def low_rank() -> nn.Module:
    network = perceptron()
    parametrize.register_parametrization(network[0], "weight", LowRank(16, 8))
    network[0].parametrizations.weight.original.requires_grad_(False)
    return network


def biases_alone() -> nn.Module:
    network = perceptron()
    for name, p in network.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return network


def orthogonal() -> nn.Module:
    network = perceptron()
    network[0] = parametrizations.orthogonal(network[0])
    network[3] = parametrizations.weight_norm(network[3])
    return network


class Unfreezing(Regression):
    """Unfreezes its first layer at the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.network[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.network[0].requires_grad_(batch_idx >= 2)


class Replacing(Regression):
    """Replaces a layer in the model and in the optimizer."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            torch.manual_seed(1)
            self.network[3] = nn.Linear(16, 1)
            self.optimizers().param_groups[0]["params"] = list(self.network.parameters())


class Assigning(Regression):
    """Loads weights with `assign=True`, so the optimizer keeps the old parameters."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        state = {name: value.clone() for name, value in self.network.state_dict().items()}
        self.network.load_state_dict(state, assign=True)


class Following(Regression):
    """Writes its output bias through a tensor of `state_dict`."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.network.state_dict()["3.bias"].add_(2.0**-14)


CASES: dict[str, Callable[[], Any]] = {
    "`SGD` with momentum": stepped_by(SGD, lr=0.1, momentum=0.9),
    "`AdamW`": stepped_by(AdamW, lr=0.01),
    "`AdamW(fused=True)`": stepped_by(AdamW, lr=0.01, fused=True),
    "`SafeAdamW`": stepped_by(SafeAdamW, lr=0.01),
    "`LBFGS`": stepped_by(LBFGS, lr=0.1, max_iter=2),
    "sharpness-aware (SAM)": stepped_by(SharpnessAware, lr=0.1),
    "ScheduleFree": Switching,
    "an optimizer around another (Lookahead)": lambda: Regression(make_optimizer=Lookahead),
    "an optimizer made in `on_fit_start`, stepped by hand": OfItsOwn,
    "optimizers fused into the backward": InTheBackward,
    "`module.compile(fullgraph=True)`": lambda: Regression(compiled_in_place),
    "`block.compile(fullgraph=True)` for each block": lambda: Regression(compiled_regions),
    "`torch.compile(module)`": lambda: Regression(compiled_wrapper),
    "`torch.compile(LightningModule)`": compiled_lightning_module,
    "a second thread computes with the model": lambda: Watched(copies=False),
    "a second thread computes with a `copy.deepcopy`": lambda: Watched(copies=True),
    "LoRA on a frozen fp32 base": lambda: Regression(Adapted),
    "LoRA on a frozen fp16 base": lambda: Regression(lambda: Adapted(torch.float16)),
    "LoRA as a parametrization": lambda: Regression(low_rank),
    "biases alone (BitFit)": lambda: Regression(biases_alone),
    "a layer unfrozen while training": Unfreezing,
    "orthogonal and weight-norm parametrizations": lambda: Regression(orthogonal),
    "TorchScript": lambda: Regression(lambda: torch.jit.script(perceptron())),
    "a layer replaced in model and optimizer while training": Replacing,
    "`load_state_dict(assign=True)` while training": Assigning,
    "writes into the tensors of `state_dict()`": Following,
}
