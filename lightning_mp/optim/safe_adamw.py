"""AdamW for half- and full-precision weights: fp32 states, fp32 math, optional update clipping."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightning_mp._arguments import explains_arguments
from lightning_mp.numerics.async_readback import as_scalar
from lightning_mp.numerics.floats import HALF_DTYPES, accumulation_dtype
from lightning_mp.numerics.small_chunks import SmallChunks
from lightning_mp.numerics.tensor_stats import local_shard, placed_like
from lightning_mp.numerics.triton_support import triton_problem
from lightning_mp.optim._adamw.arguments import (
    CHECKS,
    check_group,
    check_loaded_group,
    check_parameter,
)
from lightning_mp.optim._adamw.foreach import (
    AdamWBatch,
    AdamWOptions,
    foreach_adamw_step,
    mix_seed,
)

__all__ = ["SafeAdamW"]

# These options depend on the machine, so a checkpoint does not override them.
_MACHINE_OPTIONS = ("foreach", "fused", "capturable", "differentiable")


@explains_arguments(checks=CHECKS, hints={"learning_rate": "Pass it as `lr`."})
class SafeAdamW(Optimizer):
    r"""AdamW that is safe on half-precision weights: fp32 states, fp32 math, no lost updates.

    `torch.optim.AdamW` keeps its states in the dtype of the weights. In fp16 the default epsilon
    of 1e-8 rounds to 0, and one zero gradient makes the weight NaN at the first step. `SafeAdamW`
    keeps fp32 states and stores the rounding error of each half weight in a residual, so that an
    fp16 weight carries 22 bits: 12 bytes per parameter instead of 16 with fp32 master weights.

    .. math::
        w \leftarrow (1 - \mathrm{lr} \, \lambda) \, w
        - \mathrm{lr}_t \, \hat m / (\sqrt{\hat v} + \epsilon), \quad
        \mathrm{lr}_t = \mathrm{lr} / \max(1, \mathrm{RMS}_t / c)

    with :math:`\mathrm{RMS}_t = \sqrt{\mathrm{mean}(g^2 / \max(\hat v, \epsilon^2))}` and
    :math:`c` = `clip_update_rms`. `step` never synchronizes with the device and supports
    `torch.amp.GradScaler`. docs/optim/safe-adamw.md explains clipping, rounding and speed.

    Args:
        params: Parameters or groups in fp16, bf16, fp32 or float64; frozen ones in any dtype.
        lr: Learning rate, a number or a one-element tensor.
        betas: Decay rates of the first and second moments, each in [0, 1).
        eps: Term added to the root of the second moment after bias correction, in fp32.
        weight_decay: Decoupled weight decay: a step subtracts `lr * weight_decay * w`.
        clip_update_rms: Bound c per tensor; 1.0 gives StableAdamW, `None` disables clipping.
        rule: "adam", or "atan2" for :math:`1.27 \, \mathrm{atan2}(\hat m, \sqrt{\hat v})`.
        write_back: Rounding to half weights: "kahan" keeps the error in `state[p]["residual"]`,
            "nearest" drops the error, "stochastic" draws the same noise on all ranks.
        amsgrad: Not supported; present for compatibility with torch's signature.
        maximize: Whether to maximize the objective.
        foreach: Whether to use multi-tensor operations; `None` uses them on CUDA, and elsewhere for
            small tensors.
        fused: Whether to use the Triton kernel; `None` uses it on CUDA if Triton is available.
        capturable: No effect, because `step` can always be captured in a CUDA graph.
        differentiable: Not supported; present for compatibility with torch's signature.

    Raises:
        ValueError: An argument is out of range.
        RuntimeError: `step` meets a sparse gradient.

    References: AdamW, arXiv:1711.05101; update clipping, arXiv:1804.04235, arXiv:2304.13013;
        Adam-atan2, arXiv:2407.05872, https://github.com/lucidrains/adam-atan2-pytorch.
    """

    keeps_fp32_states = True  # as `check_adam_epsilon` and the doctor ask of any optimizer
    # Set by `torch.amp.GradScaler.step` around `step`.
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        clip_update_rms: float | None = None,
        rule: Literal["adam", "atan2"] = "adam",
        write_back: Literal["kahan", "nearest", "stochastic"] = "kahan",
        amsgrad: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "clip_update_rms": clip_update_rms,
            "rule": rule,
            "write_back": write_back,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
            # Seed of stochastic rounding, stored in the group so that checkpoints contain it.
            "rounding_step": 0,
        }
        super().__init__(params, defaults)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `torch.amp.GradScaler` must leave unscaling and skipping to `step`.

        `GradScaler.unscale_` refuses fp16 gradients, so half weights need `True`. For other weights
        `False` lets the scaler unscale first, which Lightning's `16-mixed` requires for clipping.
        """
        return any(
            group["fused"] or parameter.dtype in HALF_DTYPES
            for group in self.param_groups
            for parameter in group["params"]
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a dict of `params` and options that differ from the defaults, also in training."""
        # `params` may be a generator, which torch consumes below; check the other options here.
        check_group(self, {**self.defaults, **param_group, "params": [{}]})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        # By now torch has filled in the defaults and turned a generator into a list.
        try:
            for parameter in group["params"]:
                check_parameter(parameter, group)
        except ValueError:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step all parameters that have a gradient; return the value of `closure`, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group_index, group in enumerate(self.param_groups):
            for index, batch in enumerate(self._batches(group)):
                # Every batch of every step draws different noise.
                seed = mix_seed(group["rounding_step"], (group_index << 32) + index)
                self._step_batch(batch, group, seed)
            if group["write_back"] == "stochastic":
                group["rounding_step"] += 1
        return loss

    def _batches(self, group: dict[str, Any]) -> Iterator[AdamWBatch]:
        """Yield batches of parameters and states with equal device and dtypes."""
        batches: dict[object, AdamWBatch] = {}
        chunks = SmallChunks()
        for index, parameter in enumerate(group["params"]):
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise RuntimeError(
                    f"Parameter {index} of a group has a sparse gradient, but `SafeAdamW` supports"
                    " dense gradients only. Pass `sparse=False` to the embedding, or optimize its"
                    " weights with `torch.optim.SparseAdam`."
                )
            state = self._state_of(parameter, group)
            foreach = group["foreach"]
            # The RMS of a clipped DTensor is that of all shards.
            is_sharded = group["clip_update_rms"] is not None and hasattr(parameter, "to_local")
            # Foreach ops take the fast path only for tensors of one device and dtype.
            kind: Hashable = (parameter.device, parameter.dtype, parameter.grad.dtype, is_sharded)
            at_once = group["fused"] or foreach or (foreach is None and parameter.is_cuda)
            if not at_once:
                # Limits fp32 temporaries to one large tensor, or to a chunk of small tensors.
                chunk = chunks.of(kind, parameter) if foreach is None else None
                kind = index if chunk is None else chunk
            batch = batches.setdefault(kind, AdamWBatch())
            if is_sharded:
                batch.wholes.append(parameter)
            for collected, tensor in (
                (batch.params, parameter),
                (batch.grads, placed_like(parameter.grad, parameter)),
                (batch.exp_avgs, state["exp_avg"]),
                (batch.exp_avg_sqs, state["exp_avg_sq"]),
                (batch.residuals, state.get("residual")),
            ):
                if tensor is not None:
                    collected.append(local_shard(tensor))
            batch.steps.append(local_shard(state["step"]))
        yield from batches.values()

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        dtype = accumulation_dtype(parameter.dtype)
        if "step" not in state:
            check_parameter(parameter, group)  # again, as it may have been frozen
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            # `zeros_like` keeps the weight's memory layout; the fused kernel copies other layouts.
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
        # `write_back` may change during training, for example when `PureFP16` is attached.
        if parameter.dtype == dtype or group["write_back"] != "kahan":
            state.pop("residual", None)
        elif "residual" not in state or state["residual"].dtype != parameter.dtype:
            state["residual"] = torch.zeros_like(parameter)
        return state

    def _step_batch(self, batch: AdamWBatch, group: dict[str, Any], seed: int) -> None:
        """Update parameters, states and step counts in place unless `found_inf` is nonzero."""
        device = batch.params[0].device
        grad_scale = getattr(self, "grad_scale", None)
        if grad_scale is not None:
            grad_scale = as_scalar(grad_scale, torch.float32, device)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:
            # GradScaler sums the flags of all devices, so the value can exceed 1.
            found_inf = as_scalar(found_inf != 0, torch.float32, device)
        # Only the device knows whether the step is skipped, so a skip is subtracted again below.
        torch._foreach_add_(batch.steps, 1)
        options = AdamWOptions(
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            rule=group["rule"],
            write_back=group["write_back"],
            seed=seed,
            clip_update_rms=group["clip_update_rms"],
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        if not batch.wholes and is_fused(batch.params[0], group):
            # Imported here because Triton is optional.
            from lightning_mp.optim._adamw.fused import fused_adamw_step

            fused_adamw_step(batch, options)
        else:
            foreach_adamw_step(batch, options)
        if found_inf is not None:
            torch._foreach_sub_(batch.steps, [found_inf] * len(batch.steps))

    # --- checkpoints -----------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a `SafeAdamW` or `torch.optim.AdamW` without rounding it to half.

        `Optimizer.load_state_dict` casts states to the dtype of the parameter, which flushes second
        moments below 6e-8 to 0 in fp16. This method loads moments in fp32, keeps the dtype of
        residuals, and drops a residual whose dtype differs from its weight's. Options that the
        state lacks keep their current value, as do `foreach`, `fused`, `capturable` and
        `differentiable`.

        Raises:
            ValueError: The state has `amsgrad=True` or a weight decay that is not decoupled.
        """
        # Registered last, so that the hook wraps the state that all other hooks return.
        handle = self.register_load_state_dict_pre_hook(_shield_states)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            for parameter in group["params"]:
                if parameter in self.state:
                    self.state[parameter] = _unshielded(parameter, self.state[parameter])


def is_fused(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Return whether `SafeAdamW` steps a parameter of a group by its Triton kernel."""
    if parameter.dtype == torch.float64:
        return False
    if group["fused"] is None:
        return group["foreach"] is None and triton_problem(parameter.device) is None
    return bool(group["fused"])


@dataclass(frozen=True)
class _Shielded:
    """Hides a tensor from the casts of `Optimizer.load_state_dict`."""

    value: Any


def _shield_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    saved_groups = state_dict["param_groups"]
    for group in saved_groups:
        check_loaded_group(group)
    if len(saved_groups) == len(optimizer.param_groups):  # torch raises otherwise
        # Options that a state of `torch.optim.AdamW` lacks keep their current value.
        saved_groups = [
            {**ours, **saved, **{name: ours[name] for name in _MACHINE_OPTIONS}}
            for ours, saved in zip(optimizer.param_groups, saved_groups, strict=True)
        ]
        for group in saved_groups:
            group.pop("decoupled_weight_decay", None)  # checked by `check_loaded_group`
            group["betas"] = tuple(map(float, group["betas"]))  # may be tensors in torch's AdamW
    states = {
        key: {name: _Shielded(value) for name, value in state.items()}
        if isinstance(state, dict)
        else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states, "param_groups": saved_groups}


def _unshielded(parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state on its parameter's device and in the dtypes that `step` expects."""
    loaded = {}
    for name, value in state.items():
        if not isinstance(value, _Shielded):
            loaded[name] = value
        elif name == "step":
            step = torch.as_tensor(value.value, dtype=torch.float32)
            loaded[name] = step.detach().to(parameter.device, copy=True)
        elif not isinstance(value.value, Tensor):
            loaded[name] = value.value
        elif name != "residual" or value.value.dtype == parameter.dtype:
            dtype = value.value.dtype
            if name in ("exp_avg", "exp_avg_sq"):
                dtype = accumulation_dtype(parameter.dtype)
            # Copied, so that steps do not write into the caller's checkpoint.
            loaded[name] = value.value.to(parameter.device, dtype, copy=True)
    return loaded
