"""`BalancedAMP`: half working weights, fp32 masters and norms, and an honest loss scale (O2)."""

import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from typing_extensions import override

from lightning_mp.precision.fp32_islands import FP32Islands, outermost
from lightning_mp.precision.loss_scaler import LossScaleConfig
from lightning_mp.precision.master_precision import HALF_DTYPES, MasterPrecision, check_choice
from lightning_mp.precision.module_selection import select_modules
from lightning_mp.precision.op_policy import OpPolicy

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["BalancedAMP"]


class BalancedAMP(MasterPrecision):
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
        fp32_modules: Modules that keep fp32 weights and compute in fp32: `"norm"` for all
            normalisation layers, names of classes, or dotted names.
        fp32_ops: Names of torch functions to run in fp32 beside those of the policy, such as
            `"gelu"`; `OpPolicy().describe()` lists the policy.
        half_ops: Names of torch functions to run in half.
        inf_clamp: Modules whose fp16 outputs are kept from overflowing, as T5's are: `"auto"` for
            those that write to a residual stream, names of classes, or dotted names; see
            `InfClamp`.
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
        inf_clamp: Sequence[str] = (),
        reduce_dtype: Literal["fp32", "half"] = "fp32",
        adam_epsilon: Literal["auto", "keep"] | float = "auto",
        device: str = "auto",
    ) -> None:
        super().__init__(
            half=half,
            weights=weights,
            loss_scale=loss_scale,
            reduce_dtype=reduce_dtype,
            adam_epsilon=adam_epsilon,
            inf_clamp=inf_clamp,
        )
        check_choice(self, "weights", weights, ("half", "full"))
        self.precision = "16-mixed" if half == "fp16" else "bf16-mixed"
        self.fp32_modules = fp32_modules
        self.device = device
        self._islands = FP32Islands()
        self.policy = OpPolicy(fp32_ops=fp32_ops, half_ops=half_ops)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Turn the model's weights into working weights, in place."""
        kept = self._keep_fp32(module)
        self._first = next(module.parameters(), None)
        if self.weights == "half":
            self._masters.convert(module, kept.values())
        self._clamp(module)
        return module

    def _keep_fp32(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the modules that keep fp32 weights; let those that are no norms compute in it.

        The policy sees to norms: they compute in fp32, and return the dtype of their input.
        """
        kept = select_modules(module, self.fp32_modules)
        norms = set(select_modules(module, ["norm"]).values())
        self._islands.attach(outermost({n: m for n, m in kept.items() if m not in norms}))
        return kept

    @override
    def teardown(self) -> None:
        """Hand back an fp32 model."""
        super().teardown()
        self._islands.remove()

    @override
    @contextlib.contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Run operations in the dtypes of the policy."""
        with self.policy.context(self._device_type, HALF_DTYPES[self.half]):
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
        """Run the backward; forwards that it repeats, as in checkpointing, meet the policy too."""
        with self.policy.recompute_context(self._device_type):
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @property
    def _device_type(self) -> str:
        return self._first_device().type if self.device == "auto" else self.device
