"""`BalancedAMP`: half working weights and fp32 norms over an fp32 model, with a loss scale (O2)."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import Check, explains_arguments
from lightning_mp.numerics.floats import HALF_DTYPES
from lightning_mp.precision._choice.module_selection import select_modules
from lightning_mp.precision._scaling.scaled_precision import ScaledPrecision
from lightning_mp.precision._weights.half_module import compute_in_fp32, outermost
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
            fix="Leave it out to compute where the model is.",
        ),
    }
)
class BalancedAMP(ScaledPrecision):
    r"""Trains an fp32 model with half working weights and fp32 norms: Apex' O2, balanced.

    Lightning's `16-mixed` (O1) casts all weights at every use. Here each weight has a half copy
    that modules compute with, cast once a step, and normalisation layers compute in fp32. In half
    weights alone, as in `16-true`, an update below 2^-12 of a weight is lost.

    .. math::
        w_{16} = \mathrm{round}(w_{32}), \quad
        g_{32} = \nabla_{w_{16}}(s \cdot L) / s, \quad
        w_{32} \leftarrow \mathrm{step}(w_{32}, g_{32})

    Args:
        half: `"fp16"` or `"bf16"`.
        weights: `"half"` is O2. `"full"` is O1: no copies, weights are cast at every use.
        loss_scale: `"dynamic"`, a constant, or a `LossScaleConfig`. `None` is dynamic for fp16;
            bf16 has the range of fp32 and takes no loss scale.
        fp32_modules: Modules that compute in fp32, with their own weights: `"norm"` for all
            normalisation layers, names of classes, or dotted names.
        fp32_ops: Names of torch functions to run in fp32 beside those of `OpPolicy`.
        half_ops: Names of torch functions to run in half.
        inf_clamp: Modules whose fp16 outputs are kept from overflowing, as `InfClamp` takes them.
        reduce_dtype: DDP averages gradients in `"fp32"`, or in `"half"` with half the bytes.
        adam_epsilon: `"auto"` checks that every optimizer's epsilon survives where it is used,
            `"keep"` does not, a number replaces it.
        device: Device type for autocast; `"auto"` is where the model is.

    Raises:
        ValueError: An argument cannot be used, or a name is unknown.
        MisconfigurationException: An optimizer cannot be used, or there is no Trainer.
        FloatingPointError: Steps at the smallest loss scale were skipped again and again.

    References:
        - Mixed Precision Training, https://arxiv.org/abs/1710.03740
        - Scaling Vision Model Training Platforms, PyTorch blog and ai.meta.com, May 2022

    Example: `Trainer(plugins=BalancedAMP(half="fp16"), gradient_clip_val=1.0)`
    """

    precision: Literal["16-mixed", "bf16-mixed"] = "16-mixed"

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
        # Gradients of half weights, or of half messages, pass through fp16 on their way to p.grad.
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
        kept = self._keep_fp32(module)
        widen(module.parameters(), "the model's", module.modules())
        if self.weights == "half":
            self._working.attach(module, kept.values())
            self._undo.callback(self._working.release)
        serve_norms(kept.values(), self._undo)
        # Lightning compiles the steps of a whole module, and unwraps it.
        self._compiled = module if getattr(module, "_compiler_ctx", None) is not None else None
        self._undo.callback(setattr, self, "_compiled", None)
        self.inf_clamp.attach(module)
        self._undo.callback(self.inf_clamp.remove)
        return module

    def _keep_fp32(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the modules that keep fp32 weights; let those that are no norms compute in it."""
        kept = select_modules(module, self.fp32_modules)
        # The policy sees to norms, which return the dtype of their input.
        norms = set(select_modules(module, ["norm"]).values())
        islands = {n: m for n, m in kept.items() if m not in norms}
        for island in islands.values():  # inputs are fp32 there, also for a tower frozen in half
            for tensor in (*island.parameters(), *island.buffers()):
                if tensor.dtype in HALF_DTYPES and not tensor.requires_grad:
                    tensor.data = tensor.data.float()
        compute_in_fp32(outermost(islands), self._undo)
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
        for optimizer in self._ledger.optimizers:  # a callback may have unfrozen what was in half
            widen(self.main_params(optimizer), "unfrozen")
        # After widening, as only fp32 weights have copies; all of them, as writes to `p.data` go
        # unseen.
        self._working.refresh()

    @override
    def _after_step(self, optimizer: Optimizer) -> None:
        self._working.refresh(self.main_params(optimizer))

    @override
    @contextlib.contextmanager
    def _step_of(self, optimizer: Optimizer) -> Iterator[None]:
        with super()._step_of(optimizer):
            yield
        if self._is_inside:  # of a forward, as in manual optimization; others bring copies up first
            self._working.refresh(self.main_params(optimizer))

    @override
    def _recompute_context(self) -> contextlib.AbstractContextManager[None]:
        return self.policy.recompute_context(self._device_type)

    @property
    def _device_type(self) -> str:
        return self._first_device().type if self.device == "auto" else self.device


def widen(parameters: Iterable[Tensor], whose: str, owners: Iterable[nn.Module] = ()) -> None:
    """Turn trainable half parameters into fp32, in place, and their owners' half buffers."""
    half = {p for p in parameters if p.requires_grad and p.dtype in HALF_DTYPES}
    for owner in owners:
        if not half.isdisjoint(owner.parameters(recurse=False)):
            for name, buffer in owner.named_buffers(recurse=False):
                if buffer.dtype in HALF_DTYPES:
                    # Batch norm's kernels take weights and statistics of one dtype.
                    owner._buffers[name] = buffer.float()
    for parameter in half:
        # torch would keep a half gradient beside fp32 data, and go on adding to it in half.
        parameter.grad = None
        # In place: optimizers and tied modules hold this very parameter.
        parameter.data = parameter.data.float()
    if half:
        rank_zero_info(
            f"BalancedAMP: {len(half)} of {whose} trainable parameters came in half, and are in "
            "fp32 from here on. Nothing was lost."
        )


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """Keep `nn.TransformerEncoder` from its inference path, which no autocast reaches."""
    was_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_on)
