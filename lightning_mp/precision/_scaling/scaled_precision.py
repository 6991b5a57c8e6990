"""Base class of the precision plugins: loss scaling, unscaled fp32 gradients, skipped steps."""

import contextlib
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import refuse_values
from lightning_mp._foreign import ForLightning
from lightning_mp.numerics.tensor_stats import local_shard
from lightning_mp.optim._found_inf import found_inf_of, skips_on_gpu
from lightning_mp.precision._scaling.step_control import held, hold_global_step, stop_rate_finder
from lightning_mp.precision._scaling.unscaled_gradients import UnscaledGradients
from lightning_mp.precision._weights.ledger import Ledger, check_optimizer
from lightning_mp.precision.inf_clamp import InfClamp
from lightning_mp.precision.loss_scale_config import LossScaleConfig
from lightning_mp.precision.loss_scaler import LossScaler, all_reduce_found_inf

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["HALVES", "Closure", "ScaledPrecision"]

Closure: TypeAlias = Callable[[], Any]
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Checkpoint keys of the scaler state in Lightning's and in our plugins.
_KEYS = (
    *("MixedPrecision", "FSDPPrecision"),
    *("BalancedAMP", "PureFP16", "FSDPBalancedAMP", "ModelParallelBalancedAMP"),
)
# With these settings, cuBLAS may split a long sum of half products and add partial sums in half. In
# fp16 a partial sum above 65504 is inf, and each is rounded to 11 bits (arXiv:1710.03740, 3.3).
_SUMS_IN_HALF = [f"allow_{half}_reduced_precision_reduction" for half in HALVES]


class _SkipStep(Exception):
    """Raised in a closure to leave `optimizer.step` before any parameter changes."""


class ScaledPrecision(MixedPrecision, ForLightning):  # `ThroughputMonitor` takes others for fp32
    """Steps with unscaled fp32 gradients, or skips the step.

    Between a backward and the step, `p.grad` is scaled, as in Lightning's `16-mixed`. Gradients are
    unscaled once, before `on_before_optimizer_step`, or by `self.clip_gradients` in manual
    optimization; the next backward scales remaining gradients again.
    """

    def __init__(
        self,
        *,
        half: Literal["fp16", "bf16"],
        loss_scale: Literal["dynamic"] | float | LossScaleConfig | None,
        gradients_dtype: torch.dtype,
        reduce_dtype: Literal["fp32", "half"],
        adam_epsilon: float | Literal["auto", "keep"],
        inf_clamp: Sequence[str],
    ) -> None:
        super().__init__("bf16-mixed", "auto")  # "16-mixed" would create torch's scaler
        if half == "bf16" and loss_scale is not None:
            reason = "bf16 has the range of fp32 and needs no loss scale. Remove `loss_scale`."
            refuse_values(self, reason, half=half, loss_scale=loss_scale)
        self.half = half
        self.reduce_dtype = reduce_dtype
        self.adam_epsilon = adam_epsilon
        self.inf_clamp = InfClamp(inf_clamp)
        self.scaler: LossScaler | None = None  # type: ignore[assignment]
        if half == "fp16":
            wanted = "dynamic" if loss_scale is None else loss_scale
            self.scaler = LossScaler(LossScaleConfig.parse(wanted, gradients_dtype))
        self._ledger = Ledger()
        self._first: nn.Parameter | None = None  # for the device of the model
        self._parameters: list[nn.Parameter] | None = None  # the model's, since the first backward
        self._unscaled = UnscaledGradients(self.scaler)
        self._in_step = False
        self._in_backward = False
        self._is_inside = False  # whether a forward is running
        self._skip_request: Tensor | None = None
        self._skipped_on_request = False
        self._undo = contextlib.ExitStack()  # run by `teardown`, last callback first

    @property
    def half_dtype(self) -> torch.dtype:
        """The dtype that modules compute in."""
        return HALVES[self.half]

    # --- the model -------------------------------------------------------------------------------

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if getattr(module, "_trainer", None) is None:
            raise MisconfigurationException(
                f"`{type(self).__name__}` requires a `lightning.pytorch` Trainer and does not "
                "support `Fabric(plugins=...)`. Pass it to `Trainer(plugins=...)`."
            )
        self._ledger.check_unused(type(self).__name__)
        self._first = next(module.parameters(), None)
        return module

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        for name in _SUMS_IN_HALF:
            was_allowed = getattr(torch.backends.cuda.matmul, name)
            self._undo.callback(setattr, torch.backends.cuda.matmul, name, was_allowed)
            setattr(torch.backends.cuda.matmul, name, False)
        bare = model.module if isinstance(model, DistributedDataParallel) else model
        self._ledger.watch(self, bare, optimizers, self._undo)
        if isinstance(model, DistributedDataParallel):
            self._reduce(model)
        for optimizer in optimizers:
            self._take_optimizer(optimizer)
        return model, optimizers, held(lr_schedulers, self._was_skipped)

    def _take_optimizer(self, optimizer: Optimizer) -> None:
        """Check and prepare an optimizer before its first step."""
        runs_closures = self.scaler is None and self._steps_in_place
        check_optimizer(self, optimizer, runs_closures=runs_closures)
        self._ledger.guard_epsilon(self, optimizer, self._undo)

    def _follow_strategy(self) -> None:
        """Prepare optimizers and schedules that have replaced others, as by `setup_optimizers`."""
        root: Any = self._ledger.root
        if root is not None:
            strategy = root.trainer.strategy
            for optimizer in self._ledger.follow(strategy.optimizers):
                self._take_optimizer(optimizer)
            strategy.lr_scheduler_configs = held(strategy.lr_scheduler_configs, self._was_skipped)

    def _reduce(self, model: DistributedDataParallel) -> None:
        """Register a DDP hook that averages gradients in `reduce_dtype`, unless DDP has a hook."""
        if self.reduce_dtype == "half" and not model._comm_hooks:
            compress = getattr(default_hooks, f"{self.half}_compress_hook")
            model.register_comm_hook(model.process_group, compress)

    _half_weights: Container[Tensor] = ()
    """Half parameters that the plugin steps in fp32; optimizers must not step them directly."""

    @override
    def teardown(self) -> None:
        if self._ledger.ends_refused():
            return
        self._undo.close()
        self._unscaled.clear()
        self._first = self._parameters = self._skip_request = None

    # --- the step --------------------------------------------------------------------------------

    @override
    @contextlib.contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        # A tower replayed in a backward must not change weights that the graph may hold.
        is_inner, self._is_inside = self._is_inside, True
        try:
            if not is_inner and not self._in_backward:
                self._prepare()
            with self._compute_context():
                yield
        finally:
            # Restored, because contexts are nested if a tower is called inside a step.
            self._is_inside = is_inner

    def _prepare(self) -> None:
        """Update the state for all writes to weights since the last step."""
        if (changed := self._ledger.look_for_replaced()) is not None:
            self._parameters = None
            self._take_new(changed)

    def _take_new(self, root: nn.Module) -> None:
        """Prepare modules and parameters that were added since."""

    def _compute_context(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a forward."""
        return contextlib.nullcontext()

    @override
    @contextlib.contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        is_inner, self._in_step = self._in_step, True  # `InfCLStrategy` replays towers in a step
        try:
            if not is_inner:
                self._follow_strategy()
            with super().train_step_context():
                yield
        finally:
            self._in_step = is_inner
        # At the end, so that all optimizers of a batch use the same loss scale.
        if not is_inner:
            self._update_scale()

    @override
    def pre_backward(self, tensor: Tensor, module: "pl.LightningModule") -> Tensor:  # type: ignore[override]
        self._unscaled.scale_again()
        if self.scaler is not None:
            tensor = self.scaler.scale_loss(tensor)
        return Precision.pre_backward(self, tensor, module)

    @override
    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        with self.backward_context(model):
            super().backward(tensor, model, *args, **kwargs)

    @contextlib.contextmanager
    def backward_context(self, model: nn.Module) -> Iterator[None]:
        """Return the context of a backward of the scaled loss, or of a part of it."""
        if self._parameters is None:  # collected late, because `on_fit_start` may add parameters
            self._parameters = list(model.parameters())
        # Outside the function mode, which would intercept every access to `p.grad`.
        with self._unscaled.arriving(self._parameters), self._recompute_context():
            self._in_backward = True
            try:
                yield
            finally:
                self._in_backward = False

    def _recompute_context(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of forwards that a backward recomputes (activation checkpointing)."""
        return self._compute_context()

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: "pl.LightningModule", closure: Closure, **kwargs: Any
    ) -> Any:
        self._skipped_on_request = False
        # With a scaler the gradients must be unscaled between closure and step.
        if self.scaler is None and self._steps_in_place:
            return self._step_with_closure(optimizer, model, closure, **kwargs)
        result = closure()
        # Before `on_before_optimizer_step` and clipping, which `_after_closure` runs.
        found_inf = self._unscaled.unscale(self.main_params(optimizer), self._first_device())
        if found_inf is not None:
            all_reduce_found_inf(found_inf)
        self._after_closure(model, optimizer)
        steps_first = skips_on_gpu(optimizer)
        if steps_first:  # before the host waits for the flags
            with self._step_of(optimizer), found_inf_of(optimizer, found_inf, self._skip_request):
                optimizer.step(**kwargs)
        if not self._decide(optimizer, found_inf):
            hold_global_step(model)
        elif not steps_first:
            with self._step_of(optimizer):
                optimizer.step(**kwargs)
        if model.automatic_optimization:  # else other optimizers may step in this training step
            self._update_scale()
        return result

    def _step_with_closure(
        self, optimizer: Optimizer, model: "pl.LightningModule", closure: Closure, **kwargs: Any
    ) -> Any:
        """Step without a scaler: the optimizer calls the closure, possibly several times."""
        results: list[Any] = []

        def run() -> Any:  # in manual optimization, the closure computes a forward
            with self._compute_context() if self._is_inside else contextlib.nullcontext():
                results.append(self._wrap_closure(model, optimizer, closure))
            if len(results) > 1:  # a skip would not undo what LBFGS has changed since the first
                self._skip_request = None
            elif not self._decide(optimizer, None):
                raise _SkipStep
            return results[-1]

        try:
            with self._step_of(optimizer):
                return optimizer.step(closure=run, **kwargs)
        except _SkipStep:
            hold_global_step(model)
            return results[-1]

    _steps_in_place = True
    """Whether optimizers step the parameters of the model directly."""

    @contextlib.contextmanager
    def _step_of(self, optimizer: Optimizer) -> Iterator[None]:
        """Return the context of an optimizer step."""
        self._ledger.stepping = optimizer
        try:
            yield
        finally:
            self._ledger.stepping = None

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        optimizer = getattr(optimizer, "optimizer", optimizer)  # out of a LightningOptimizer
        scaled = [p for p in self.main_params(optimizer) if p not in self._unscaled]
        if clip_val > 0 and scaled:  # in manual optimization, before the step
            self._unscaled.unscale(scaled, self._first_device())
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        for _, gradient in self.named_gradients(optimizer):
            self._unscaled.clip_(gradient, clip_val)

    def request_skip(self, is_wanted: Tensor) -> None:
        """Request in `on_before_optimizer_step` that the following step be skipped.

        The step counts as skipped but does not change the loss scale. `is_wanted` is a 0-d tensor,
        nonzero to skip; it is copied to the host with the overflow flag, without another host sync.
        """
        self._skip_request = is_wanted

    def _decide(self, optimizer: Optimizer, found_inf: Tensor | None) -> bool:
        """Return whether to step."""
        request, self._skip_request = self._skip_request, None
        if request is not None and found_inf is not None:  # one host sync for both
            found_inf, request = torch.stack([found_inf, request.to(found_inf)]).cpu()
        if self.scaler is not None and found_inf is not None:
            try:
                if not self.scaler.record(
                    found_inf,
                    named_gradients=lambda: self.named_gradients(optimizer),
                    has_gradient=lambda: self._has_gradient_values(optimizer),
                ):
                    return False
            except FloatingPointError:
                if not stop_rate_finder(self._ledger.root):  # rates rise until steps fail
                    raise
                return False
        self._skipped_on_request = request is not None and request.item() != 0
        return not self._skipped_on_request

    def _update_scale(self) -> None:
        """Update the loss scale, and rescale gradients that are kept for a later step."""
        if self.scaler is not None:
            # Optimizers that did not step now (GANs) hold gradients in the old scale.
            parameters = (p for each in self._ledger.optimizers for p in self.main_params(each))
            self._unscaled.follow(self.scaler.update(), parameters)

    def _has_gradient_values(self, optimizer: Optimizer) -> bool:
        return any(g.any().item() for _, g in self.named_gradients(optimizer))

    def _was_skipped(self) -> bool:
        return self._skipped_on_request or bool(self.scaler and self.scaler.last_step_skipped)

    def misses_plugin(self, optimizer: Optimizer) -> bool:
        """Return whether a step of the optimizer would use scaled gradients or half weights."""
        parameters = list(self.main_params(optimizer))
        if any(p in self._half_weights for p in parameters):
            return True
        # Outside a training step, torch initializes states by a step with zero gradients.
        if self._in_step and any(each is optimizer for each in self._ledger.optimizers):
            return self.scaler is not None
        # Fused optimizers with a `grad_scale` unscale gradients themselves.
        has_scale = getattr(optimizer, "grad_scale", None) is not None
        has_bad = self._unscaled.has_scaled(parameters) or self._unscaled.has_inf(parameters)
        return not has_scale and has_bad

    def after_step(self, optimizer: Optimizer) -> None:
        """React to an optimizer step that was not called through this plugin."""

    def named_gradients(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients of an optimizer with their parameter names."""
        for p in self.main_params(optimizer):
            if p.grad is not None:
                yield self._ledger.name_of(p), local_shard(p.grad)

    # --- checkpoints -----------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and "scale" in state_dict:  # a bf16 run has no scale
            self.scaler.load_state_dict(state_dict)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if type(self).__qualname__ not in checkpoint:
            self.load_state_dict(next((checkpoint[k] for k in _KEYS if checkpoint.get(k)), {}))

    def _first_device(self) -> torch.device:
        return torch.device("cpu") if self._first is None else self._first.device
