"""`PureFP16`: fp16 weights, activations and gradients that learn as fp32 does."""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp.precision.fp32_islands import outermost
from lightning_mp.precision.gradient_reduction import average_in_fp32
from lightning_mp.precision.half_module import HalfBuffers, cast_at_borders, cast_floats
from lightning_mp.precision.loss_scale_config import LossScaleConfig
from lightning_mp.precision.master_weights import MasterWeights
from lightning_mp.precision.module_selection import select_modules
from lightning_mp.precision.scaled_precision import ScaledPrecision, check_choice

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["PureFP16"]


class PureFP16(ScaledPrecision):
    r"""Trains in fp16 throughout: weights, activations, gradients; no fp32 copy of the weights.

    Lightning's `precision="16-true"` makes every weight non-finite in three steps of Adam: its
    states are in fp16, where `eps=1e-8` is 0, and there is no loss scale (Lightning#20619). A
    larger epsilon does not cure it: at 1e-6 one step is still up to 5300 times the learning rate.
    Here any torch optimizer steps in fp32, with fp32 states, weights of 22 bits (from 1.2e-4
    on), and gradients that are unscaled in fp32.

    .. math::
        m_{32} = w_{16} + 2^{-11} r_{16}, \quad
        g_{32} = \nabla_{w_{16}}(s \cdot L) / s, \quad
        (w_{16}, r_{16}) \leftarrow \mathrm{split}(\mathrm{step}(m_{32}, g_{32}))

    **Memory** per parameter, at rest: weight 2 bytes, residual 2, gradient 2, and the optimizer's
    fp32 states, 8 with Adam. During a step, when activations are gone, 8 bytes more for each
    parameter of the optimizer that steps: its weight and its gradient in fp32.

    **Nothing is cast on its way**: inputs and buffers become half (integers stay), losses are
    computed in half unless `training_step` calls `.float()`, which is better where they are large.
    Batch norms keep fp32 weights and statistics, which their kernels take beside half inputs.

    **Gradients**, **skipped steps** and **checkpoints** are as with `BalancedAMP`: what clipping,
    `on_before_optimizer_step` and the optimizer see is unscaled and in fp32; where a gradient is
    not finite nothing moves and the loss scale shrinks; checkpoints hold fp32 weights that load
    into a plain model, and a run resumes bit for bit.

    Args:
        half: `"fp16"`, or `"bf16"` for the same in bf16, without loss scale: weight and residual
            then carry 16 bits.
        loss_scale: `"dynamic"`, a constant, or a `LossScaleConfig`. `None` is dynamic for fp16,
            from 2^10, which fp16 gradients below 64 can hold, up to their limit.
        write_back: `"kahan"` keeps what rounding takes from a weight as its residual. Without it,
            weights are rounded at random (`"stochastic"`, right on average) or to `"nearest"`,
            which loses updates below 2^-12 of a weight; both save the residual's 2 bytes.
        inf_clamp: Modules whose fp16 outputs are kept from overflowing, as T5's are: `"auto"` for
            those that write to a residual stream, names of classes, or dotted names; see
            `InfClamp`. `[]` for none.
        fp32_modules: Modules that compute in fp32: `"norm"`, names of classes, or dotted names.
            Their weights are in fp32, their inputs and outputs are cast.
        reduce_dtype: DDP averages gradients of half weights in `"fp32"`, or in `"half"` with half
            the bytes.
        adam_epsilon: `"auto"` checks that every optimizer's epsilon survives where it is used,
            `"keep"` does not, a number replaces it.

    Raises:
        ValueError: An argument cannot be used, or a name is unknown.
        MisconfigurationException: An optimizer cannot be used; before training starts.
        FloatingPointError: Steps at the smallest loss scale were skipped again and again; names the
            first parameter whose gradient is not finite.

    References:
        - Kahan summation and stochastic rounding of weights, https://arxiv.org/abs/2010.06192
        - Training with `16-true`, Lightning#20619

    Example: `Trainer(plugins=PureFP16(), gradient_clip_val=1.0)`
    """

    precision: Literal["16-true", "bf16-true"] = "16-true"

    def __init__(
        self,
        *,
        half: Literal["fp16", "bf16"] = "fp16",
        loss_scale: float | str | LossScaleConfig | None = None,
        write_back: Literal["kahan", "stochastic", "nearest"] = "kahan",
        inf_clamp: Sequence[str] = ("auto",),
        fp32_modules: Sequence[str] = (),
        reduce_dtype: Literal["fp32", "half"] = "fp32",
        adam_epsilon: float | Literal["auto", "keep"] = "auto",
    ) -> None:
        check_choice(self, "write_back", write_back, ("kahan", "stochastic", "nearest"))
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
        self._masters = MasterWeights(self.half_dtype, write_back)
        self._buffers = HalfBuffers(self.half_dtype)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Turn the model's weights and buffers into half, in place."""
        super().convert_module(module)
        islands = select_modules(module, self.fp32_modules)
        statistics = [each for each in module.modules() if _has_statistics(each)]
        kept = [*islands.values(), *statistics]
        self._masters.convert(module, kept, take_half=True)
        self._buffers.convert(module, kept)
        self._handles += cast_at_borders(outermost(islands), self.half_dtype)
        self.inf_clamp.attach(module)
        return module

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Prepare optimizers, and give all ranks the same residuals."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._masters.broadcast()
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def _reduce(self, model: DistributedDataParallel) -> None:
        if self.reduce_dtype == "fp32":
            average_in_fp32(model)

    @override
    def _attach(self, optimizer: Optimizer) -> None:
        super()._attach(optimizer)
        self._masters.attach(optimizer)

    @override
    def _safe_halves(self) -> set[Tensor]:
        return set(self._masters.parameters())

    _steps_in_place = False

    @override
    @contextlib.contextmanager
    def _step_of(self, optimizer: Optimizer) -> Iterator[None]:
        with super()._step_of(optimizer), self._masters.standing_in(optimizer):
            self._masters.take_gradients(optimizer)
            yield
            self._masters.write_back(optimizer)

    @override
    def teardown(self) -> None:
        """Hand back an fp32 model."""
        super().teardown()
        self._masters.release()
        self._buffers.release()

    @override
    def convert_input(self, data: Any) -> Any:
        """Cast the floating-point tensors of a batch to half."""
        return cast_floats(data, self.half_dtype)

    @override
    @contextlib.contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Make half the dtype of new tensors, as `precision="16-true"` does."""
        with _default_dtype(self.half_dtype):
            yield

    @override
    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: "pl.LightningModule",
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Run the backward; forwards that it repeats, as in checkpointing, make halves too."""
        with _default_dtype(self.half_dtype):
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: "pl.LightningModule",
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Run the closure, then step in fp32 with unscaled gradients, or skip the step."""
        with _default_dtype(torch.float32):
            return super().optimizer_step(optimizer, model, closure, **kwargs)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale, and the number of writes that seeds rounding."""
        state = super().state_dict()
        writes = self._masters.storage.writes
        return {**state, "writes": writes} if writes else state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._masters.storage.writes = state_dict.get("writes", 0)
        super().load_state_dict(state_dict)


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.running_mean is not None


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
