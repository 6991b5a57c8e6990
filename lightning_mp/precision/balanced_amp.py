"""`BalancedAMP`: half working weights, fp32 masters and norms, and an honest loss scale (O2)."""

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
from typing_extensions import override

from lightning_mp.precision.gradient_reduction import average_in_fp32
from lightning_mp.precision.loss_scaler import LossScaleConfig, LossScaler, all_reduce_found_inf
from lightning_mp.precision.master_weights import MasterWeights
from lightning_mp.precision.module_selection import select_modules
from lightning_mp.precision.op_policy import OpPolicy
from lightning_mp.precision.step_control import ReadyGradients, hold_global_step, hold_schedules

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["BalancedAMP"]

_HALF_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_GRAD_SCALER_KEY = "MixedPrecision"  # where Lightning's own plugin keeps torch's GradScaler


class BalancedAMP(Precision):
    r"""Trains with half working weights, fp32 master weights and fp32 norms: Apex' O2, balanced.

    Lightning's `16-mixed` (O1) keeps all weights in fp32 and casts them at every use. Here the
    model holds fp16 weights and gradients, the optimizer steps fp32 masters, and normalisation
    layers stay in fp32. Meta trained ViTs so: the fastest setting without loss of accuracy.
    Without masters, an update below 2^-12 of a weight is lost, and learning stops unnoticed.

    .. math::
        w_{16} = \mathrm{round}(m_{32}), \quad
        g_{32} = \nabla_{w_{16}}(s \cdot L) / s, \quad
        m_{32} \leftarrow \mathrm{step}(m_{32}, g_{32})

    **Gradients** reach clipping, `on_before_optimizer_step` and the optimizer unscaled and in fp32,
    through `optimizer.param_groups`; `parameter.grad` of the model stays half and scaled.

    **Skipped steps**: where a gradient is not finite, no weight, optimizer state, `global_step`,
    average of weights or step-wise LR schedule moves, and the loss scale shrinks.

    **Checkpoints** hold fp32 weights for a plain model; those of fp32 and `16-mixed` runs load, and
    a run resumes bit for bit. After training the model is an fp32 model again.

    Args:
        half: `"fp16"` or `"bf16"`.
        weights: `"half"` is O2. `"full"` is O1: fp32 weights, cast at every use.
        loss_scale: `"dynamic"`, a constant, or a `LossScaleConfig`. `None` is dynamic for fp16;
            bf16 has the range of fp32 and takes no loss scale.
        fp32_modules: Modules that keep fp32 weights: `"norm"` for all normalisation layers, names
            of classes, or dotted names.
        fp32_ops: Names of torch functions to run in fp32 beside those of the policy, such as
            `"gelu"`; `OpPolicy().describe()` lists the policy.
        half_ops: Names of torch functions to run in half.
        reduce_dtype: DDP averages gradients of half weights in `"fp32"`, or in `"half"` with half
            the bytes.
        adam_epsilon: `"auto"` checks that every optimizer's epsilon survives where it is used,
            `"keep"` does not, a number replaces it.
        device: Device type for autocast; `"auto"` is where the model is.

    Raises:
        ValueError: An argument cannot be used, or a name is unknown.
        MisconfigurationException: An optimizer cannot be used; before training starts.
        FloatingPointError: Steps at the smallest loss scale were skipped again and again; names the
            first parameter whose gradient is not finite.

    References:
        - Mixed Precision Training, https://arxiv.org/abs/1710.03740
        - Scaling Vision Model Training Platforms, PyTorch blog and ai.meta.com, May 2022
        - O2 on native AMP, https://github.com/NVIDIA/apex/issues/818
        - Skipped steps and schedules, Lightning#5558, #16228, #21339; clipping of scaled gradients
          in manual optimization, Lightning#18089; clipping with fused optimizers, Lightning#21435

    Example: `Trainer(plugins=BalancedAMP(half="fp16"), gradient_clip_val=1.0)`
    """

    precision: Literal["16-mixed", "bf16-mixed"] = "16-mixed"

    def __init__(
        self,
        *,
        half: Literal["fp16", "bf16"] = "fp16",
        weights: Literal["half", "full"] = "half",
        loss_scale: str | float | LossScaleConfig | None = None,
        fp32_modules: Sequence[str] = ("norm",),
        fp32_ops: Sequence[str] = (),
        half_ops: Sequence[str] = (),
        reduce_dtype: Literal["fp32", "half"] = "fp32",
        adam_epsilon: Literal["auto", "keep"] | float = "auto",
        device: str = "auto",
    ) -> None:
        super().__init__()
        _check_choice(self, "half", half, tuple(_HALF_DTYPES))
        _check_choice(self, "weights", weights, ("half", "full"))
        _check_choice(self, "reduce_dtype", reduce_dtype, ("fp32", "half"))
        if half == "bf16" and loss_scale is not None:
            raise ValueError(
                f"Passed `{type(self).__name__}(half='bf16', loss_scale={loss_scale!r})`. bf16 has "
                "fp32's range and takes no loss scale. Leave it out, or pass `half='fp16'`."
            )
        if adam_epsilon not in ("auto", "keep") and not _is_positive(adam_epsilon):
            raise ValueError(
                f"Passed `BalancedAMP(adam_epsilon={adam_epsilon!r})`. `adam_epsilon` must be "
                "'auto', 'keep' or a positive number. Leave it out to have epsilon checked."
            )
        self.precision = "16-mixed" if half == "fp16" else "bf16-mixed"
        self.half = half
        self.weights = weights
        self.fp32_modules = fp32_modules
        self.reduce_dtype = reduce_dtype
        self.adam_epsilon = adam_epsilon
        self.device = device
        self.policy = OpPolicy(fp32_ops=fp32_ops, half_ops=half_ops)
        self.scaler: LossScaler | None = None
        if half == "fp16":
            gradients = torch.float16 if weights == "half" else torch.float32
            wanted = "dynamic" if loss_scale is None else loss_scale
            self.scaler = LossScaler(LossScaleConfig.parse(wanted, gradients))
        self._masters = MasterWeights(_HALF_DTYPES[half])
        self._names: dict[int, str] = {}
        self._first: nn.Parameter | None = None  # tells where the model is
        self._optimizers: list[Optimizer] = []
        self._stepping: Optimizer | None = None
        self._ready: dict[Optimizer, ReadyGradients] = {}
        self._in_step = False
        self._stepped_manually = False

    # --- the model -------------------------------------------------------------------------------

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Turn the model's weights into working weights, in place."""
        kept = select_modules(module, self.fp32_modules)
        self._first = next(module.parameters(), None)
        if self.weights == "half":
            self._masters.convert(module, kept.values())
        return module

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
        if self.scaler is not None:
            lr_schedulers = hold_schedules(lr_schedulers, self._was_skipped)
        return model, optimizers, lr_schedulers

    @override
    def teardown(self) -> None:
        """Hand back an fp32 model."""
        self._masters.release()
        self._ready.clear()
        self._optimizers.clear()
        self._names.clear()
        self._first = None

    @override
    @contextlib.contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Run operations in the dtypes of the policy."""
        with self.policy.context(self._device_type, _HALF_DTYPES[self.half]):
            yield

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
    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: "pl.LightningModule",
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Run the backward; forwards that it repeats, as in checkpointing, meet the policy too."""
        with self.policy.recompute_context(self._device_type):
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: "pl.LightningModule",
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Run the closure, then step the masters with unscaled gradients, or skip the step."""
        if self.scaler is None and self.weights == "full":
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization and not self._has_gradients(optimizer):
            return None  # `training_step` returned None, and no accumulated batch has gradients
        with self._standing_in(optimizer):
            found_inf = self._take_gradients(optimizer)
            self._after_closure(model, optimizer)
            is_skipped = False
            if self.scaler is not None and found_inf is not None:
                named = functools.partial(self._gradients, optimizer)
                is_skipped = not self.scaler.record(found_inf, named_gradients=named)
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
        is_plain = self.scaler is None and self.weights == "full"
        if is_plain or self._stepping is optimizer or clip_val <= 0:
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
        return self.scaler is not None and self.scaler.last_step_skipped

    def _gradients(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients of what stands in, under the names of the model's parameters."""
        for p in self.main_params(optimizer):
            if p.grad is not None:
                yield self._name_of(self._masters.working_of(p)), p.grad

    # --- checks and checkpoints ------------------------------------------------------------------

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, LBFGS) and (self.scaler is not None or self.weights == "half"):
            raise MisconfigurationException(
                "Passed the optimizer `LBFGS` with `BalancedAMP`. It evaluates the loss several "
                "times a step, at weights that are not the model's half weights. Use a "
                "first-order optimizer, or `BalancedAMP(half='bf16', weights='full')`."
            )
        for group in optimizer.param_groups:
            if "eps" in group and isinstance(self.adam_epsilon, float | int):
                group["eps"] = float(self.adam_epsilon)
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._masters:
                    self._check_half(parameter, optimizer, group)

    def _check_half(self, parameter: Tensor, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Refuse what a parameter without master, half before training, would silently lose."""
        eps, dtype = group.get("eps"), parameter.dtype
        if self.scaler is not None and dtype in _HALF_DTYPES.values():
            loss, way_out = "of its gradients the small ones would vanish when unscaled", ""
        elif eps and dtype == torch.float16 and self.adam_epsilon != "keep":
            loss = (
                f"`{type(optimizer).__name__}(eps={eps!r})` would keep its state in it, where eps "
                f"is {torch.tensor(eps).half():g} and the square of a gradient below 2e-4 vanishes"
            )
            way_out = ", or pass `adam_epsilon='keep'`"
        else:
            return
        raise MisconfigurationException(
            f"{self._name_of(parameter)!r} is in {dtype} from the start: {loss}. Create the "
            f"parameter in fp32, for which BalancedAMP keeps an fp32 master{way_out}."
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

    @property
    def _device_type(self) -> str:
        return self._first_device().type if self.device == "auto" else self.device

    def _name_of(self, parameter: Tensor) -> str:
        return self._names.get(id(parameter), "an unnamed parameter")

    def _first_device(self) -> torch.device:
        return torch.device("cpu") if self._first is None else self._first.device


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < torch.inf


def _check_choice(plugin: object, name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(
            f"Passed `{type(plugin).__name__}({name}={value!r})`. `{name}` must be one of "
            f"{', '.join(map(repr, known))}."
        )
