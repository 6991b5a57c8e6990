"""`PureFP16`: training in fp16 weights, activations and gradients with the accuracy of fp32."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin as _HasDtype
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import explains_arguments, keeps_arguments
from lightning_mp.precision._choice.module_selection import select_modules
from lightning_mp.precision._scaling.scaled_precision import Closure, ScaledPrecision
from lightning_mp.precision._weights.half_module import (
    cast_at_borders,
    cast_castable,
    compute_in_fp32,
    is_compiled,
    outermost,
    to_fp32,
)
from lightning_mp.precision._weights.half_weights import HalfWeights
from lightning_mp.precision._weights.ledger import check_callbacks, check_modules, check_steps_alone
from lightning_mp.precision.loss_scale_config import SCALES, LossScaleConfig
from lightning_mp.precision.op_policy import MixedInputs

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["PureFP16"]


@explains_arguments(checks={"loss_scale": SCALES, "adam_epsilon": "(0, inf)"})
class PureFP16(ScaledPrecision):
    r"""Training with fp16 weights, activations and gradients, without an fp32 copy of the weights.

    With Lightning's `precision="16-true"` and Adam, every weight is non-finite after three steps,
    because `eps=1e-8` is 0 in fp16 states. With `PureFP16`, any plain torch optimizer steps in fp32
    with fp32 states. A half-precision residual stores the rounding error of each weight, so that
    weights carry 22 bits.

    .. math::
        m_{32} = w_{16} + 2^{-11} r_{16}, \quad
        g_{32} = \nabla_{w_{16}}(s \cdot L) / s, \quad
        (w_{16}, r_{16}) \leftarrow \mathrm{split}(\mathrm{step}(m_{32}, g_{32}))

    Args:
        half: Half-precision dtype, `"fp16"` or `"bf16"`. bf16 needs no loss scale, and weights then
            carry 16 bits.
        loss_scale: `"dynamic"`, a number for a static scale, or a `LossScaleConfig`. `None` is
            dynamic for fp16.
        write_back: `"kahan"` keeps residuals. `"stochastic"` rounds weights stochastically, without
            bias. `"nearest"` loses updates below 2^-12 of a weight. Overrides the `write_back` of a
            `SafeAdamW`.
        inf_clamp: Modules whose fp16 outputs are clamped, see `InfClamp`; `[]` for none.
        fp32_modules: Modules that compute in fp32 with fp32 weights: `"norm"`, class names, or
            dotted names.
        reduce_dtype: Dtype in which DDP averages gradients of half weights, `"fp32"` or `"half"`.
        adam_epsilon: `"auto"` checks that the epsilon of every optimizer survives in its dtype,
            `"keep"` disables the check, a number replaces epsilon.

    Raises:
        ValueError: An argument is invalid or a name is unknown.
        MisconfigurationException: An optimizer, module or callback does not support half weights.
        FloatingPointError: `patience` consecutive steps were skipped at the smallest loss scale.

    References:
        - Kahan summation and stochastic rounding of weights, https://arxiv.org/abs/2010.06192
        - Training with `16-true`, Lightning#20619

    Example: `Trainer(plugins=PureFP16(), gradient_clip_val=1.0)`
    """

    precision: Literal["16-true", "bf16-true"] = "16-true"

    @keeps_arguments
    def __init__(
        self,
        *,
        half: Literal["fp16", "bf16"] = "fp16",
        loss_scale: Literal["dynamic"] | float | LossScaleConfig | None = None,
        write_back: Literal["kahan", "stochastic", "nearest"] = "kahan",
        inf_clamp: Sequence[str] = ("auto",),
        fp32_modules: Sequence[str] = (),
        reduce_dtype: Literal["fp32", "half"] = "fp32",
        adam_epsilon: float | Literal["auto", "keep"] = "auto",
    ) -> None:
        super().__init__(
            half=half,
            loss_scale=loss_scale,
            gradients_dtype=torch.float16,
            reduce_dtype=reduce_dtype,
            adam_epsilon=adam_epsilon,
            inf_clamp=inf_clamp,
        )
        self.precision = "16-true" if half == "fp16" else "bf16-true"
        self.write_back = write_back
        self.fp32_modules = fp32_modules
        self._weights = self._half_weights = HalfWeights(self.half_dtype, write_back, self._ledger)
        self._kept: set[nn.Module] = set()
        self._recurrent: set[nn.Module] = set()  # those whose inputs are cast
        self._has_fp32_inside = False
        self._is_compiled = False
        self._is_reduced_in_half = False

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        super().convert_module(module)
        self._kept, self._recurrent = set(), set()
        self._keep_fp32(module)
        model: Any = module
        # Evaluation changes no weight, so modules that cannot be trained are allowed.
        is_trained = model._trainer.state.fn == "fit"
        check_modules(module, self._kept, is_trained=is_trained)
        if is_trained:
            check_callbacks(model._trainer.callbacks)
        self._weights.convert(module, self._kept)
        self._undo.callback(self._weights.release)
        # The model summary runs the model on it.
        self._undo.callback(setattr, model, "_example_input_array", model._example_input_array)
        model._example_input_array = self.convert_input(model._example_input_array)
        for each in module.modules():
            if isinstance(each, _HasDtype):  # the `dtype` property of Lightning modules
                self._undo.callback(setattr, each, "_dtype", each._dtype)
                each._dtype = self.half_dtype
        self.inf_clamp.attach(module)
        self._undo.callback(self.inf_clamp.remove)
        return module

    def _keep_fp32(self, module: nn.Module, *, strict: bool = True) -> None:
        """Select the modules that stay in fp32, and cast inputs and outputs of `fp32_modules`."""
        islands = {*select_modules(module, self.fp32_modules, strict=strict).values()}
        # Layers that share a weight with them, such as an embedding with a head.
        own = {p for island in islands for p in island.parameters(recurse=False)}
        islands |= {
            each
            for each in module.modules()
            if not each._modules and not own.isdisjoint(each.parameters(recurse=False))
        }
        norms = (m for m in module.modules() if isinstance(m, _NormBase))
        # Half parametrizations would round twice, and orthogonal parametrizations diverge.
        lists = (m for m in module.modules() if isinstance(m, ParametrizationList))
        made = {inner for each in lists for inner in each.modules()}
        new = [each for each in outermost(module, islands) if each not in self._kept]
        compute_in_fp32(new, self._undo)
        cast_at_borders(new, torch.float32, self.half_dtype, self._undo)
        self._kept |= {*islands, *(m for m in norms if m.running_mean is not None), *made}
        # Recurrent layers compare the dtypes of inputs and weights before they call torch.
        recurrent = {m for m in module.modules() if isinstance(m, nn.RNNBase)} - self._kept
        cast_at_borders(recurrent - self._recurrent, self.half_dtype, self.half_dtype, self._undo)
        self._recurrent |= recurrent
        # A weight that is half already, such as one that is parametrized later, stays half.
        to_fp32(
            each
            for each in self._kept
            if not any(p in self._weights for p in each.parameters(recurse=False))
        )
        # If no activation can become fp32, the mode that casts to half is not needed.
        self._has_fp32_inside = bool(made) or any(
            buffer.dtype == torch.float32 and buffer.dim() > 0  # 0-d tensors do not promote
            for owner in module.modules()
            if owner not in self._kept
            for buffer in owner.buffers(recurse=False)
        )

    @override
    def connect(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # DDP broadcasts only weights; the residuals must match the weights of rank 0.
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._weights.broadcast()
        return super().connect(model, *args, **kwargs)

    @override
    def _take_optimizer(self, optimizer: Optimizer) -> None:
        check_steps_alone(optimizer)
        super()._take_optimizer(optimizer)
        self._weights.attach(optimizer)

    def exposed(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Temporarily replace half weights by fp32 weights that can be read and written.

        Inside the context, the `parameters()` of `module` (the model or a submodule) are fp32
        parameters with 22 bits; on exit, written values are split into weights and residuals. Do
        not run a forward inside. Use it for a teacher that follows its student at a small rate.
        """
        return self._weights.exposed(module)

    @override
    def _reduce(self, model: DistributedDataParallel) -> None:
        self._is_reduced_in_half = True
        if self.reduce_dtype == "fp32" and not model._comm_hooks:
            model.register_comm_hook(model.process_group, _mean_in_fp32)

    # Stand-ins receive gradients before the step, so a closure inside the step would be too late.
    _steps_in_place = False

    @override
    @contextlib.contextmanager
    def _step_of(self, optimizer: Optimizer) -> Iterator[None]:
        with (
            super()._step_of(optimizer),
            self._weights.stepping(optimizer),
            # Dynamo refuses half weights with fp32 gradients, and would compile every new stand-in.
            torch.compiler.set_stance("force_eager"),
        ):
            yield

    @override
    def convert_input(self, data: Any) -> Any:
        return cast_castable(data, self.half_dtype)

    @override
    @contextlib.contextmanager
    def _compute_context(self) -> Iterator[None]:
        # New tensors are half by default, as in `precision="16-true"`.
        mixed = MixedInputs(self.half_dtype) if self._has_fp32_inside else contextlib.nullcontext()
        with _DtypeContextManager(self.half_dtype), mixed:
            yield

    @override
    def _prepare(self) -> None:
        super()._prepare()
        self._weights.settle()
        # Compiled functions are not found in the model, but Dynamo counts the graphs of a process.
        is_compiled = self._is_compiled or bool(counters["stats"]["unique_graphs"])
        if self._in_step and is_compiled:
            # Dynamo refuses half weights with the fp32 gradients of the last step.
            self._unscaled.scale_again()
            self._weights.narrow_gradients()

    @override
    def _take_new(self, root: nn.Module) -> None:
        self._keep_fp32(root, strict=False)
        self._weights.convert(root, self._kept)
        self._is_compiled = any(is_compiled(each) for each in root.modules())

    @override
    @contextlib.contextmanager
    def backward_context(self, model: nn.Module) -> Iterator[None]:
        none = contextlib.nullcontext()
        narrowing = self._weights.narrowing() if self._is_reduced_in_half else none
        with narrowing, super().backward_context(model):
            yield

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: "pl.LightningModule", closure: Closure, **kwargs: Any
    ) -> Any:
        dtype = torch.get_default_dtype()  # half with manual optimization, inside `forward_context`

        def compute() -> Any:
            with _DtypeContextManager(dtype):
                return closure()

        with _DtypeContextManager(torch.float32):
            return super().optimizer_step(optimizer, model, compute, **kwargs)

    @override
    def state_dict(self) -> dict[str, Any]:
        writes = self._weights.writes  # seeds stochastic rounding and is 0 otherwise
        return super().state_dict() | ({"writes": writes} if writes else {})

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._weights.writes = state_dict.get("writes", 0)
        super().load_state_dict(state_dict)


# DDP checks the annotations of its hooks.
def _mean_in_fp32(
    process_group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Average a bucket in fp32 and round it once, which doubles the communicated bytes."""
    # DDP divides fp16 gradients by the W ranks before the sum, which loses values below 6e-8 W.
    buffer: Tensor = bucket.buffer()
    mean = buffer.to(torch.promote_types(buffer.dtype, torch.float32))
    mean = mean.div(dist.get_world_size(process_group))
    work = dist.all_reduce(mean, group=process_group, async_op=True)

    def rounded(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return buffer.copy_(future.value()[0])

    result: torch.futures.Future[Tensor] = work.get_future().then(rounded)
    return result
