"""`BalancedAMP`: half working weights and fp32 norms for an fp32 model, with a loss scale (O2)."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import Check, explains_arguments, keeps_arguments
from lightning_mp.numerics.floats import HALF_DTYPES
from lightning_mp.precision._choice.module_selection import select_modules, select_norms
from lightning_mp.precision._scaling.scaled_precision import ScaledPrecision
from lightning_mp.precision._weights.half_module import compute_in_fp32, outermost, to_fp32
from lightning_mp.precision._weights.working_copies import WorkingCopies
from lightning_mp.precision.loss_scale_config import SCALES, LossScaleConfig
from lightning_mp.precision.op_policy import OPS, OpPolicy, check_ops, serve_norms

__all__ = ["BalancedAMP", "widen"]


@explains_arguments(
    checks={
        "loss_scale": SCALES,
        "fp32_ops half_ops": OPS,
        "adam_epsilon": "(0, inf)",
        "device": Check(
            test=lambda name: name == "auto" or torch.device(name).type == name,
            words="'auto' or a type without an index, such as 'cuda' or 'cpu'",
            fix="Remove `device` to use the device of the model.",
        ),
    }
)
class BalancedAMP(ScaledPrecision):
    r"""Mixed precision with fp32 master weights, half working weights and fp32 norms (O2).

    Lightning's `16-mixed` (O1) casts all weights at every use. `BalancedAMP` keeps a half-precision
    copy of each weight, which is refreshed once per step, and computes normalization layers in
    fp32. Half weights without masters, as in `16-true`, lose updates below 2^-12 of a weight.

    .. math::
        w_{16} = \mathrm{round}(w_{32}), \quad
        g_{32} = \nabla_{w_{16}}(s \cdot L) / s, \quad
        w_{32} \leftarrow \mathrm{step}(w_{32}, g_{32})

    Args:
        half: Half-precision dtype, `"fp16"` or `"bf16"`.
        weights: `"half"` keeps half copies (O2); `"full"` casts weights at every use (O1).
        loss_scale: `"dynamic"`, a number for a static scale, or a `LossScaleConfig`. `None` is
            dynamic for fp16 and no loss scale for bf16, which has the range of fp32.
        fp32_modules: Modules that compute in fp32 with their fp32 weights: `"norm"` for all
            normalization layers and a submodule `norm`, class names, or dotted names.
        fp32_ops: Names of torch functions to run in fp32 in addition to those of `OpPolicy`.
        half_ops: Names of torch functions to run in half precision.
        inf_clamp: Modules whose fp16 outputs are clamped, see `InfClamp`.
        reduce_dtype: Dtype in which DDP averages gradients, `"fp32"` or `"half"`.
        adam_epsilon: `"auto"` checks that the epsilon of every optimizer survives in its dtype,
            `"keep"` disables the check, a number replaces epsilon.
        device: Device type for autocast; `"auto"` is the device of the model.

    Raises:
        ValueError: An argument is invalid or a name is unknown.
        MisconfigurationException: An optimizer is not supported, or there is no Trainer.
        FloatingPointError: `patience` consecutive steps were skipped at the smallest loss scale.

    References:
        - Mixed Precision Training, https://arxiv.org/abs/1710.03740
        - Scaling Vision Model Training Platforms, PyTorch blog and ai.meta.com, May 2022

    Example: `Trainer(plugins=BalancedAMP(half="fp16"), gradient_clip_val=1.0)`
    """

    precision: Literal["16-mixed", "bf16-mixed"] = "16-mixed"

    @keeps_arguments
    def __init__(
        self,
        *,
        half: Literal["fp16", "bf16"] = "fp16",
        weights: Literal["half", "full"] = "half",
        loss_scale: Literal["dynamic"] | float | LossScaleConfig | None = None,
        fp32_modules: Sequence[str] = ("norm",),
        fp32_ops: Sequence[str] = (),
        half_ops: Sequence[str] = (),
        inf_clamp: Sequence[str] = (),
        reduce_dtype: Literal["fp32", "half"] = "fp32",
        adam_epsilon: float | Literal["auto", "keep"] = "auto",
        device: str = "auto",
    ) -> None:
        # Gradients of half weights, and gradients averaged in half, pass through fp16.
        passes_half = weights == "half" or reduce_dtype == "half"
        super().__init__(
            half=half,
            loss_scale=loss_scale,
            gradients_dtype=torch.float16 if passes_half else torch.float32,
            reduce_dtype=reduce_dtype,
            adam_epsilon=adam_epsilon,
            inf_clamp=inf_clamp,
        )
        self.precision = "16-mixed" if half == "fp16" else "bf16-mixed"
        self.weights = weights
        self.fp32_modules = fp32_modules
        self.device = device
        check_ops(self, fp32_ops, half_ops)
        self.policy = OpPolicy(fp32_ops=fp32_ops, half_ops=half_ops)
        self._working = WorkingCopies(self.half_dtype, self._ledger)
        self._compiled: nn.Module | None = None

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        super().convert_module(module)
        widen(module.parameters(), "the model's", module.modules())
        kept = self._keep_fp32(module)
        if self.weights == "half":
            self._working.attach(module, kept.values())
            self._undo.callback(self._working.release)
        serve_norms(kept.values(), self._undo)
        # Lightning compiles the step methods of a compiled LightningModule and unwraps the module.
        self._compiled = module if getattr(module, "_compiler_ctx", None) is not None else None
        self._undo.callback(setattr, self, "_compiled", None)
        self.inf_clamp.attach(module)
        self._undo.callback(self.inf_clamp.remove)
        return module

    @override
    def _take_new(self, root: nn.Module) -> None:
        # The new modules may replace one of `fp32_modules`, or the last one of its name.
        self._working.keep(self._keep_fp32(root, strict=False).values())

    def _keep_fp32(self, module: nn.Module, *, strict: bool = True) -> dict[str, nn.Module]:
        """Return the modules that keep fp32 weights, and make all but norms compute in fp32."""
        kept = select_modules(module, self.fp32_modules, strict=strict)
        # Norms are handled by the op policy and return the dtype of their input.
        norms = set(select_norms(module).values())
        islands = outermost(module, {*kept.values()} - norms)
        # A tower frozen in half must match its fp32 inputs.
        to_fp32(inner for island in islands for inner in island.modules())
        compute_in_fp32(islands, self._undo)
        if strict:  # the first time
            # Compiled backwards would apply the forward's autocast, which rounds their gradients.
            self._undo.enter_context(functorch.patch(backward_pass_autocast="off"))
        return kept

    @override
    @contextlib.contextmanager
    def _compute_context(self) -> Iterator[None]:
        modules = () if self._compiled is None else self._compiled.modules()
        with (
            _without_fast_path(),
            self.policy.context(self._device_type, self.half_dtype),
            self._working.in_place(*modules),
        ):
            yield

    @override
    def _prepare(self) -> None:
        super()._prepare()
        root: Any = self._ledger.root
        for optimizer in self._ledger.optimizers:  # a callback may have unfrozen half weights
            widen(self.main_params(optimizer), "unfrozen", root.modules())
        # After widening, because only fp32 weights have copies.
        self._working.start_step(is_training=self._in_step)

    @override
    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        super().backward(tensor, model, *args, **kwargs)
        self._working.is_stale = True  # optimizers and adversarial training now write to weights

    @override
    def after_step(self, optimizer: Optimizer) -> None:
        self._working.refresh(self.main_params(optimizer))

    @override
    @contextlib.contextmanager
    def _step_of(self, optimizer: Optimizer) -> Iterator[None]:
        # In manual optimization a step runs inside the autocast of the training step, which would
        # round products in optimizers, as of Adafactor's factors, to half.
        with super()._step_of(optimizer), torch.autocast(self._device_type, enabled=False):
            yield
        if self._is_inside:  # a forward may follow in this step, as in manual optimization
            self._working.refresh(self.main_params(optimizer))

    @override
    @contextlib.contextmanager
    def _recompute_context(self) -> Iterator[None]:
        # In manual optimization a backward runs inside the context of the step, and its autocast
        # would round gradients of fp32 modules to half. Recomputed forwards restore autocast.
        autocast = torch.autocast(self._device_type, enabled=False)
        policy = self.policy.recompute_context(self._device_type)
        with self._working.recomputing(), autocast, policy:
            yield

    @override
    def state_dict(self) -> dict[str, Any]:
        writing = self._working.writing  # their first write would be rounded once more
        return super().state_dict() | ({"writing": writing} if writing else {})

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._working.restore(state_dict.get("writing", ()))
        super().load_state_dict(state_dict)

    @property
    def _device_type(self) -> str:
        return self._first_device().type if self.device == "auto" else self.device


def widen(parameters: Iterable[Tensor], whose: str, owners: Iterable[nn.Module]) -> None:
    """Cast trainable half parameters and half buffers of their owners to fp32, in place."""
    half = {p for p in parameters if p.requires_grad and p.dtype in HALF_DTYPES}
    for owner in owners if half else ():
        if not half.isdisjoint(owner.parameters(recurse=False)):
            for name, buffer in owner.named_buffers(recurse=False):
                if buffer.dtype in HALF_DTYPES:
                    # Batch norm kernels require weights and statistics in one dtype.
                    owner._buffers[name] = buffer.float()
    for parameter in half:
        # Otherwise torch would keep accumulating into the half gradient.
        parameter.grad = None
        # In place, because optimizers and tied modules hold this parameter object.
        parameter.data = parameter.data.float()
    if half:
        rank_zero_info(
            f"BalancedAMP: cast {len(half)} of {whose} trainable parameters from half precision to "
            "fp32, without loss."
        )


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """Disable the inference fast path of `nn.TransformerEncoder`, which ignores autocast."""
    was_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_on)
