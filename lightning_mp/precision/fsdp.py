"""`FSDPBalancedAMP`: `BalancedAMP` for FSDPStrategy, on fp32 shards."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.precision._choice.module_selection import as_written
from lightning_mp.precision._scaling.scaled_precision import ScaledPrecision
from lightning_mp.precision.balanced_amp import BalancedAMP, widen
from lightning_mp.precision.loss_scale_config import LossScaleConfig
from lightning_mp.precision.loss_scaler import all_reduce_found_inf

__all__ = ["FSDPBalancedAMP"]


class ShardedBalancedAMP(BalancedAMP):
    """Base class of the plugins for sharded parameters, which keep fp32 shards.

    Sharding gathers working weights in half precision, so no half copies are kept.

    Args:
        half: Half-precision dtype, `"fp16"` or `"bf16"`.
        loss_scale: `"dynamic"`, a number for a static scale, or a `LossScaleConfig`. `None` is
            dynamic for fp16 and no loss scale for bf16.
        fp32_modules: Modules that keep fp32 weights and compute in fp32: `"norm"` for all
            normalization layers, class names, or dotted names.
        fp32_ops: Names of torch functions to run in fp32 in addition to those of the policy.
        half_ops: Names of torch functions to run in half precision.
        reduce_dtype: Dtype in which gradients are averaged, `"fp32"` or `"half"`.
    """

    def __init__(
        self,
        *,
        half: Literal["fp16", "bf16"] = "fp16",
        loss_scale: Literal["dynamic"] | float | LossScaleConfig | None = None,
        fp32_modules: Sequence[str] = ("norm",),
        fp32_ops: Sequence[str] = (),
        half_ops: Sequence[str] = (),
        reduce_dtype: Literal["fp32", "half"] = "fp32",
    ) -> None:
        super().__init__(
            half=half,
            weights="half",
            loss_scale=loss_scale,
            fp32_modules=fp32_modules,
            fp32_ops=fp32_ops,
            half_ops=half_ops,
            reduce_dtype=reduce_dtype,
            adam_epsilon="keep",  # shards and optimizer states are in fp32
        )

    @override
    def _prepare(self) -> None:
        """Do nothing: every all-gather rounds the fp32 shards to half precision."""

    @override
    def connect(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Not at the first backward, when the root module holds gathered weights instead of shards.
        self._parameters = list(model.parameters())
        return super().connect(model, *args, **kwargs)

    # All ranks must take the same decision, because a step contains collectives.
    @override
    def _has_gradient_values(self, optimizer: Optimizer) -> bool:
        # A rank without a shard of an optimizer's parameters follows the other ranks.
        has = float(super()._has_gradient_values(optimizer))
        return all_reduce_found_inf(torch.tensor(has, device=self._first_device())).item() != 0

    def _fp32_modules_of(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the modules with weights that must be sharded separately in fp32, by name."""
        kept = self._keep_fp32(module)
        # Attention reads the weight of its output projection without calling the projection.
        attentions = [m for m in kept.values() if isinstance(m, nn.MultiheadAttention)]
        read = {child for attention in attentions for child in attention.children()}
        own = {name: m for name, m in kept.items() if m not in read}
        return {name: m for name, m in own.items() if list(m.parameters(recurse=False))}

    @property
    def _wire_dtype(self) -> torch.dtype:
        return torch.float32 if self.reduce_dtype == "fp32" else self.half_dtype


class _KeepsFP32(type):
    """Makes `isinstance` true for modules that a plugin marked, because FSDP expects classes."""

    def __instancecheck__(cls, instance: object) -> bool:
        # Not `hasattr`: an FSDP module forwards attribute access to the module that it wraps.
        return "_keeps_fp32" in getattr(instance, "__dict__", ())


class _FP32Module(nn.Module, metaclass=_KeepsFP32):
    """Stand-in class of all modules whose weights stay in fp32."""


@explains_arguments()
class FSDPBalancedAMP(ShardedBalancedAMP, FSDPPrecision):  # type: ignore[misc]
    r"""FSDP training with half-precision working weights, fp32 shards and fp32 norms.

    Lightning's `FSDPPrecision("16-mixed")` gathers norms in fp16, reduces gradients in fp16, counts
    skipped steps as steps, and raises on gradient clipping by norm. The arguments are those of
    `BalancedAMP`.

    .. math::
        w_{16} = \mathrm{round}(\mathrm{gather}(w_{32})), \quad
        g_{32} = \mathrm{scatter}(\mathrm{mean}(\nabla_{w_{16}}(s \cdot L))) / s, \quad
        w_{32} \leftarrow \mathrm{step}(w_{32}, g_{32})

    Raises:
        ValueError: An argument is invalid or a name is unknown.
        MisconfigurationException: The strategy is not FSDP or gathers `fp32_modules` in half.
        FloatingPointError: `patience` consecutive steps were skipped at the smallest loss scale.

    References:
        PyTorch FSDP, https://arxiv.org/abs/2304.11277; Lightning#19803, #19235

    Example: `Trainer(strategy=FSDPStrategy(auto_wrap_policy={Block}), plugins=FSDPBalancedAMP())`
    """

    _desired_input_dtype = torch.float32  # of `FSDPPrecision`
    _model: nn.Module | None = None

    @property
    @override
    def mixed_precision_config(self) -> MixedPrecision:
        return MixedPrecision(
            param_dtype=self.half_dtype,
            reduce_dtype=self._wire_dtype,
            buffer_dtype=None,  # running statistics and rotary angles need more than 11 bits
            cast_forward_inputs=False,
            cast_root_forward_inputs=False,
            _module_classes_to_ignore=(_FP32Module,),
        )

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        # Not `BalancedAMP`'s, which would attach half copies; FSDP gathers in half.
        ScaledPrecision.convert_module(self, module)
        for other in module.modules():
            other.__dict__.pop("_keeps_fp32", None)  # set by an earlier run
        widen(module.parameters(), "the model's", module.modules())
        for kept in self._fp32_modules_of(module).values():
            kept.__dict__["_keeps_fp32"] = True
        return module

    @override
    def connect(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Checked here because FSDPStrategy wraps the model after `convert_module`.
        if not any(True for _ in _roots(model)):
            raise MisconfigurationException(
                f"Passed `{type(self).__name__}`, but no module is wrapped in FSDP. The plugin "
                "requires `Trainer(strategy=FSDPStrategy(...))`. Use `BalancedAMP` with other "
                "strategies."
            )
        rounded = list(_rounded(model, "", False))
        if rounded:
            raise MisconfigurationException(
                f"Passed `{type(self).__name__}(fp32_modules={self.fp32_modules!r})`, but FSDP "
                f"gathers {rounded[0]!r} in half. Pass `FSDPStrategy(auto_wrap_policy={{Block}})` "
                "without `mixed_precision`, wrap the module by "
                "`wrap(module, mixed_precision=None)`, or pass `fp32_modules=[]`."
            )
        self._model = model
        self._undo.callback(setattr, self, "_model", None)
        return super().connect(model, *args, **kwargs)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:  # type: ignore[override]
        own = {id(p) for p in self.main_params(optimizer)}
        roots = [] if self._model is None else list(_roots(self._model))
        if len(roots) != 1 or not own <= {id(p) for p in roots[0].parameters()}:
            raise MisconfigurationException(
                "Clipping by norm requires all parameters of an optimizer in one root FSDP module. "
                f"The model has {len(roots)} root FSDP modules, or parameters outside of them. "
                "Wrap the whole model in one FSDP module, or clip by value."
            )
        # FSDP clips all parameters of a root by their common norm, so hide the gradients of other
        # optimizers.
        others = [p for p in roots[0].parameters() if id(p) not in own]
        hidden = [p.grad for p in others]
        for p in others:
            p.grad = None
        try:
            roots[0].clip_grad_norm_(clip_val)
        finally:
            for p, gradient in zip(others, hidden, strict=True):
                p.grad = gradient

    @override
    def _first_device(self) -> torch.device:
        # Not the device of the parameters, which are on the CPU with `cpu_offload`.
        for root in () if self._model is None else _roots(self._model):
            if root.compute_device is not None:
                return root.compute_device
        return torch.device("cpu")


def _roots(module: nn.Module) -> Iterator[FullyShardedDataParallel]:
    """Yield the outermost FSDP modules."""
    if isinstance(module, FullyShardedDataParallel):
        yield module
        return
    for child in module.children():
        yield from _roots(child)


def _rounded(module: nn.Module, path: str, is_half: bool) -> Iterator[str]:
    """Yield the names of `fp32_modules` that FSDP gathers in half."""
    if isinstance(module, FullyShardedDataParallel):
        # The innermost FSDP unit around a module decides its dtype.
        is_half = module.mixed_precision.param_dtype not in (None, torch.float32)
    elif is_half and isinstance(module, _FP32Module):
        yield as_written(path).rstrip(".")
    for name, child in module.named_children():
        yield from _rounded(child, f"{path}{name}.", is_half)
