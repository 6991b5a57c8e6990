"""What all precision plugins with half weights share: the step, clipping and checkpoints."""

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_mp.optim.adam_epsilon import guard_adam_epsilon
from lightning_mp.precision.gradient_reduction import average_in_fp32
from lightning_mp.precision.inf_clamp import InfClamp
from lightning_mp.precision.loss_scaler import LossScaleConfig, LossScaler, all_reduce_found_inf
from lightning_mp.precision.master_storage import WriteBack
from lightning_mp.precision.master_weights import MasterWeights
from lightning_mp.precision.step_control import ReadyGradients, hold_global_step, hold_schedules

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["HALF_DTYPES", "MasterPrecision", "check_choice"]

HALF_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_GRAD_SCALER_KEY = "MixedPrecision"  # where Lightning's own plugin keeps torch's GradScaler


class MasterPrecision(Precision):
    """Steps fp32 masters of half weights with unscaled fp32 gradients, or skips the step.

    Args:
        half: `"fp16"` or `"bf16"`.
        weights: Whether weights are in half.
        loss_scale: What scales losses.
        reduce_dtype: What DDP averages gradients of half weights in.
        adam_epsilon: What happens to the epsilon of optimizers.
        masters: What keeps the masters.
    """

    def __init__(
        self,
        *,
        half: Literal["fp16", "bf16"],
        weights: Literal["half", "full"],
        loss_scale: str | float | LossScaleConfig | None,
        reduce_dtype: Literal["fp32", "half"],
        adam_epsilon: Literal["auto", "keep"] | float,
        inf_clamp: Sequence[str],
        write_back: WriteBack = "masters",
    ) -> None:
        super().__init__()
        check_choice(self, "half", half, tuple(HALF_DTYPES))
        check_choice(self, "reduce_dtype", reduce_dtype, ("fp32", "half"))
        if half == "bf16" and loss_scale is not None:
            raise ValueError(
                f"Passed `{type(self).__name__}(half='bf16', loss_scale={loss_scale!r})`. bf16 has "
                "fp32's range and takes no loss scale. Leave it out, or pass `half='fp16'`."
            )
        if adam_epsilon not in ("auto", "keep") and not _is_positive(adam_epsilon):
            raise ValueError(
                f"Passed `{type(self).__name__}(adam_epsilon={adam_epsilon!r})`. `adam_epsilon` "
                "must be 'auto', 'keep' or a positive number. Leave it out to have epsilon checked."
            )
        self.half = half
        self.weights = weights
        self.reduce_dtype = reduce_dtype
        self.adam_epsilon = adam_epsilon
        self.inf_clamp = InfClamp(inf_clamp)
        self.scaler: LossScaler | None = None
        if half == "fp16":
            gradients = torch.float16 if weights == "half" else torch.float32
            wanted = "dynamic" if loss_scale is None else loss_scale
            self.scaler = LossScaler(LossScaleConfig.parse(wanted, gradients))
        self._masters = MasterWeights(HALF_DTYPES[half], write_back)
        self._names: dict[int, str] = {}
        self._first: nn.Parameter | None = None  # tells where the model is
        self._optimizers: list[Optimizer] = []
        self._stepping: Optimizer | None = None
        self._ready: dict[Optimizer, ReadyGradients] = {}
        self._in_step = False
        self._stepped_manually = False
        self._skip_request: Tensor | None = None
        self._skipped_on_request = False
        self._handles: list[RemovableHandle] = []

    # --- the model -------------------------------------------------------------------------------

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Prepare optimizers, and hold step-wise schedules while steps are skipped."""
        self._optimizers = list(optimizers)
        self._names = {id(p): name for name, p in model.named_parameters()}
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._masters.broadcast()
        if isinstance(model, DistributedDataParallel):
            self._names = {id(p): name for name, p in model.module.named_parameters()}
            if self.weights == "half" and self.reduce_dtype == "fp32":
                average_in_fp32(model)
        for optimizer in optimizers:
            self._check_optimizer(optimizer)
            self._masters.attach(optimizer)
            if not self._is_plain:
                self._handles.append(optimizer.register_step_pre_hook(self._check_stepping))
        if not self._is_plain:
            lr_schedulers = hold_schedules(lr_schedulers, self._was_skipped)
        return model, optimizers, lr_schedulers

    @override
    def teardown(self) -> None:
        """Hand back an fp32 model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.inf_clamp.remove()
        self._masters.release()
        self._ready.clear()
        self._optimizers.clear()
        self._names.clear()
        self._first = None

    def _clamp(self, module: nn.Module) -> None:
        self.inf_clamp.attach(module)

    # --- the step --------------------------------------------------------------------------------

    @override
    @contextlib.contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """Run a training step; with manual optimization, move the loss scale at its end.

        Several optimizers that step in one batch so meet one loss scale.
        """
        is_inner, self._in_step = self._in_step, True  # `InfCLStrategy` replays towers in a step
        try:
            with super().train_step_context():
                yield
        finally:
            self._in_step = is_inner
        if self._stepped_manually and not is_inner:
            self._stepped_manually = False
            self._update_scale()

    @override
    def pre_backward(self, tensor: Tensor, module: "pl.LightningModule") -> Tensor:  # type: ignore[override]
        """Scale the loss."""
        if self.scaler is not None:
            tensor = self.scaler.scale_loss(tensor)
        return super().pre_backward(tensor, module)

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: "pl.LightningModule",
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Run the closure, then step the masters with unscaled gradients, or skip the step."""
        if self._is_plain:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization and not self._has_gradients(optimizer):
            return None  # `training_step` returned None, and no accumulated batch has gradients
        with self._standing_in(optimizer):
            found_inf = self._take_gradients(optimizer)
            self._after_closure(model, optimizer)
            is_skipped = not self._decide(optimizer, found_inf)
            if not is_skipped:
                optimizer.step(**kwargs)
                self._masters.write_back(optimizer)
        if is_skipped:
            hold_global_step(model)
        if model.automatic_optimization:
            self._update_scale()
        else:
            self._stepped_manually = True
        return result

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip unscaled fp32 gradients; in manual optimization they then wait for the step."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # out of a LightningOptimizer
        if self._is_plain or self._stepping is optimizer or clip_val <= 0:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
            return
        at_rest = list(self.main_params(optimizer))
        scaled = [p.grad for p in at_rest]
        for p in at_rest:  # fp32 gradients would be unscaled in place
            if p.grad is not None and p not in self._masters:
                p.grad = p.grad.clone()
        with self._standing_in(optimizer):
            found_inf = self._take_gradients(optimizer)
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
            clipped = [p.grad for p in self.main_params(optimizer)]
        for p, gradient in zip(at_rest, scaled, strict=True):
            p.grad = gradient
        self._ready[optimizer] = ReadyGradients(at_rest, clipped, found_inf)

    @property
    def can_skip(self) -> bool:
        """Whether `request_skip` works: not with `half="bf16", weights="full"`."""
        return not self._is_plain

    @property
    def masters(self) -> MasterWeights:
        """The masters of the model's half weights."""
        return self._masters

    def request_skip(self, is_wanted: Tensor) -> None:
        """Ask, in `on_before_optimizer_step`, that the step to come be skipped.

        It then counts as skipped, but the loss scale does not move for it. Where there is a loss
        scale, this costs no host sync beside the one that looks for overflows.

        Args:
            is_wanted: Of shape [], on any device; 0 is for stepping.
        """
        self._skip_request = is_wanted

    def _decide(self, optimizer: Optimizer, found_inf: Tensor | None) -> bool:
        """Return whether to step."""
        request, self._skip_request = self._skip_request, None
        is_unwanted = self._skipped_on_request = False
        if request is not None and found_inf is not None:
            found_inf, request = torch.stack([found_inf, request.to(found_inf)]).cpu()
        if request is not None:
            is_unwanted = request.item() != 0
        if self.scaler is not None and found_inf is not None:
            named = functools.partial(self.named_gradients, optimizer)
            if not self.scaler.record(found_inf, named_gradients=named):
                return False
        self._skipped_on_request = is_unwanted
        return not is_unwanted

    @contextlib.contextmanager
    def _standing_in(self, optimizer: Optimizer) -> Iterator[None]:
        self._stepping = optimizer
        try:
            with self._masters.standing_in(optimizer):
                yield
        finally:
            self._stepping = None

    def _take_gradients(self, optimizer: Optimizer) -> Tensor | None:
        """Give what stands in unscaled fp32 gradients; return what unscaling found."""
        ready = self._ready.pop(optimizer, None)
        if ready is not None:
            ready.check_fresh()
            for p, gradient in zip(self.main_params(optimizer), ready.gradients, strict=True):
                p.grad = gradient
            return ready.found_inf
        self._masters.take_gradients(optimizer)
        if self.scaler is None:
            return None
        gradients = [p.grad for p in self.main_params(optimizer) if p.grad is not None]
        return all_reduce_found_inf(self.scaler.unscale_(gradients, device=self._first_device()))

    def _update_scale(self) -> None:
        """Move the loss scale, and with it the gradients that wait for a later step."""
        if self.scaler is None:
            return
        ratio = self.scaler.update()
        if ratio != 1:
            for p in {p for each in self._optimizers for p in self.main_params(each)}:
                if p.grad is not None:
                    p.grad.mul_(ratio)

    def _has_gradients(self, optimizer: Optimizer) -> bool:
        return any(p.grad is not None for p in self.main_params(optimizer))

    def _was_skipped(self) -> bool:
        has_overflowed = self.scaler is not None and self.scaler.last_step_skipped
        return has_overflowed or self._skipped_on_request

    @property
    def _is_plain(self) -> bool:
        return self.scaler is None and self.weights == "full"

    def _check_stepping(self, optimizer: Optimizer, *_: object) -> None:
        # Outside of a training step, torch initialises states by a step on gradients of zero.
        if self._in_step and self._stepping is not optimizer:
            raise RuntimeError(
                f"`{type(optimizer).__name__}.step()` was called past `{type(self).__name__}`, "
                "with gradients that are still scaled and weights without their masters. Take the "
                "optimizer from `self.optimizers()`, without `use_pl_optimizer=False`."
            )

    def named_gradients(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """Yield gradients under the names of the model's parameters.

        From `on_before_optimizer_step` on they are those of what stands in: unscaled, in fp32.
        """
        for p in self.main_params(optimizer):
            if p.grad is not None:
                yield self._name_of(self._masters.working_of(p)), p.grad

    # --- checks and checkpoints ------------------------------------------------------------------

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, LBFGS) and (self.scaler is not None or self.weights == "half"):
            raise MisconfigurationException(
                f"Passed the optimizer `LBFGS` with `{type(self).__name__}`. It evaluates the loss "
                "several times a step, at weights that are not the model's half weights. Use a "
                "first-order optimizer, or `BalancedAMP(half='bf16', weights='full')`."
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._masters:
                    self._check_half(parameter)
        guard = functools.partial(guard_adam_epsilon, ignore=self._masters, name_of=self._name_of)
        try:
            self._handles += guard(optimizer, self.adam_epsilon)
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error

    def _check_half(self, parameter: Tensor) -> None:
        """Refuse a parameter without master whose gradients would be unscaled in half."""
        if self.scaler is not None and parameter.dtype in HALF_DTYPES.values():
            raise MisconfigurationException(
                f"{self._name_of(parameter)!r} is in {parameter.dtype} from the start: of its "
                "gradients the small ones would vanish when unscaled. Create the parameter in "
                f"fp32, for which {type(self).__name__} keeps an fp32 master."
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale."""
        return {} if self.scaler is None else self.scaler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a loss scale."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the loss scale of a `16-mixed` run over."""
        scaler_state = checkpoint.get(_GRAD_SCALER_KEY)
        if type(self).__qualname__ not in checkpoint and scaler_state and self.scaler is not None:
            self.scaler.load_state_dict(scaler_state)

    def _name_of(self, parameter: Tensor) -> str:
        return self._names.get(id(parameter), "an unnamed parameter")

    def _first_device(self) -> torch.device:
        return torch.device("cpu") if self._first is None else self._first.device


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < torch.inf


def check_choice(plugin: object, name: str, value: object, known: tuple[str, ...]) -> None:
    """Refuse an argument of a plugin that is none of those known."""
    if value not in known:
        raise ValueError(
            f"Passed `{type(plugin).__name__}({name}={value!r})`. `{name}` must be one of "
            f"{', '.join(map(repr, known))}."
        )
