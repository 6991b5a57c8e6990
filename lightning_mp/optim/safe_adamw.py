"""AdamW for half or full weights, with fp32 states, fp32 math and a bound on starved updates."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightning_mp._arguments import explains_arguments
from lightning_mp.numerics.floats import HALF_DTYPES, accumulation_dtype
from lightning_mp.numerics.tensor_stats import local_shard
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

# How a run steps is a matter of its machine, not of its checkpoint.
_MACHINE_OPTIONS = ("foreach", "fused", "capturable", "differentiable")


@explains_arguments(checks=CHECKS)
class SafeAdamW(Optimizer):
    r"""AdamW that is safe on half weights: fp32 states, fp32 math, and no update is lost.

    torch's AdamW keeps its states in the dtype of its weights: in fp16 its epsilon of 1e-8 is 0,
    and one zero gradient gives NaN at the first step. Here a residual of each half weight takes
    what rounding leaves: 22 bits in fp16, 12 bytes a parameter for 16 with an fp32 master weight.

    .. math::
        w \leftarrow (1 - \mathrm{lr} \, \lambda) \, w
        - \mathrm{lr}_t \, \hat m / (\sqrt{\hat v} + \epsilon), \quad
        \mathrm{lr}_t = \mathrm{lr} / \max(1, \mathrm{RMS}_t / c)

    with :math:`\mathrm{RMS}_t = \sqrt{\mathrm{mean}(g^2 / \max(\hat v, \epsilon^2))}` and c of
    `clip_update_rms`. `step` never waits for the device and follows the protocol of `GradScaler`.
    docs/optim/safe-adamw.md explains the bound, rounding and speed.

    Args:
        params: Parameters or groups of them, in fp16, bf16, fp32 or float64.
        lr: The learning rate: a number, or a tensor of one element.
        betas: Decay of the first and second moment, each in [0, 1).
        eps: Added outside of the root, after bias correction, in fp32.
        weight_decay: Decoupled: a step takes `lr * weight_decay` of each weight.
        clip_update_rms: c, for each tensor; 1.0 is StableAdamW's, `None` is no bound.
        rule: "adam", or "atan2" for :math:`1.27 \, \mathrm{atan2}(\hat m, \sqrt{\hat v})`.
        write_back: Bits that half weights lack: "kahan" keeps them in `state[p]["residual"]`,
            "nearest" drops them, "stochastic" rounds at random, alike on all ranks.
        amsgrad: Not supported; here for the signature of torch.
        maximize: Step along the gradients.
        foreach: `True` steps all tensors at once, `False` one by one, `None` at once on CUDA.
        fused: One multi-tensor Triton kernel; `None` takes it on CUDA where Triton runs.
        capturable: Without effect: `step` can always be captured in a CUDA graph.
        differentiable: Not supported; here for the signature of torch.

    Raises:
        ValueError: For an argument out of its range.
        RuntimeError: At `step`, for sparse gradients.

    References: AdamW, arXiv:1711.05101; update clipping, arXiv:1804.04235, arXiv:2304.13013;
        Adam-atan2, arXiv:2407.05872, https://github.com/lucidrains/adam-atan2-pytorch.
    """

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
            # Seeds the noise of "stochastic"; in the group, so that checkpoints hold it.
            "rounding_step": 0,
        }
        super().__init__(params, defaults)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tell `torch.amp.GradScaler` to leave unscaling and skipping to `step`.

        It must for half gradients, which it refuses. Others it may as well unscale ahead, and they
        can then be clipped in between; Lightning's `16-mixed` refuses to clip otherwise.
        """
        return any(
            group["fused"] or parameter.dtype in HALF_DTYPES
            for group in self.param_groups
            for parameter in group["params"]
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, at any time during training.

        Args:
            param_group: `params`, and the arguments in which the group differs from the others.

        Raises:
            ValueError: For an argument out of its range, or a parameter that is not real.
        """
        # torch checks the parameters, which may come from a generator.
        check_group(self, {**self.defaults, **param_group, "params": [{}]})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        # torch has filled in what the group leaves out, and has made a list of a generator.
        try:
            for parameter in group["params"]:
                check_parameter(parameter, group)
        except ValueError:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step all parameters that have a gradient.

        Args:
            closure: Computes the loss and the gradients again.

        Returns:
            What `closure` returned, or `None`.

        Raises:
            RuntimeError: For sparse gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group_index, group in enumerate(self.param_groups):
            for index, batch in enumerate(self._batches(group)):
                # No two batches share their noise, and no two steps.
                seed = mix_seed(group["rounding_step"], (group_index << 32) + index)
                self._step_batch(batch, group, seed)
            if group["write_back"] == "stochastic":
                group["rounding_step"] += 1
        return loss

    def _batches(self, group: dict[str, Any]) -> Iterator[AdamWBatch]:
        """Return a group's parameters and states by device and dtypes, or one by one."""
        batches: dict[object, AdamWBatch] = {}
        for index, parameter in enumerate(group["params"]):
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise RuntimeError(
                    f"Parameter {index} of a group has a sparse gradient. `SafeAdamW` steps dense"
                    " ones. Pass `sparse=False` to the embedding, or give its weights to"
                    " `torch.optim.SparseAdam`."
                )
            state = self._state_of(parameter, group)
            # One by one, there are fp32 temporaries of only one tensor.
            at_once = group["fused"] or group["foreach"]
            if group["foreach"] is None:
                at_once = at_once or parameter.is_cuda
            # A foreach op takes its fast path for tensors of one device and dtype.
            dtypes = (parameter.device, parameter.dtype, parameter.grad.dtype)
            batch = batches.setdefault(dtypes if at_once else index, AdamWBatch())
            for collected, tensor in (
                (batch.params, parameter),
                (batch.grads, parameter.grad),
                (batch.exp_avgs, state["exp_avg"]),
                (batch.exp_avg_sqs, state["exp_avg_sq"]),
                (batch.residuals, state.get("residual")),
            ):
                if tensor is not None:
                    # Of a DTensor the clip needs the RMS of the whole.
                    is_whole = group["clip_update_rms"] is not None
                    collected.append(tensor if is_whole else local_shard(tensor))
            batch.steps.append(local_shard(state["step"]))
        yield from batches.values()

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        dtype = accumulation_dtype(parameter.dtype)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            # In the weight's layout, as `zeros_like` keeps it: the fused kernel copies any other
            # one.
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
        # `write_back` may change in the middle of training, as when `PureFP16` takes over.
        if parameter.dtype == dtype or group["write_back"] != "kahan":
            state.pop("residual", None)
        elif "residual" not in state or state["residual"].dtype != parameter.dtype:
            state["residual"] = torch.zeros_like(parameter)
        return state

    def _step_batch(self, batch: AdamWBatch, group: dict[str, Any], seed: int) -> None:
        """Step in place, step counts included, or nothing of it where `found_inf` is not 0."""
        device = batch.params[0].device
        grad_scale = getattr(self, "grad_scale", None)
        if grad_scale is not None:
            grad_scale = grad_scale.reshape(()).to(device, non_blocking=True)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:
            # GradScaler adds the signs of all devices, so that it can be more than 1.
            found_inf = (found_inf.reshape(()) != 0).to(device, torch.float32, non_blocking=True)
        # Taken back below where the step is skipped, which only the device knows.
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
        if _is_fused(batch.params[0], group):
            # Kernels are defined on import, and Triton need not be installed.
            from lightning_mp.optim._adamw.fused import fused_adamw_step

            fused_adamw_step(batch, options)
        else:
            foreach_adamw_step(batch, options)
        if found_inf is not None:
            torch._foreach_sub_(batch.steps, [found_inf] * len(batch.steps))

    # --- checkpoints -----------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer or of `torch.optim.AdamW`, without rounding it to half.

        torch casts states to the dtype of their parameter, which would leave second moments below
        6e-8 at 0. Here moments become fp32 (half ones are widened), residuals keep their dtype,
        and one of another dtype than its weight is dropped. Arguments that the state lacks, and
        `foreach`, `fused`, `capturable` and `differentiable`, stay as they are.

        Args:
            state_dict: What `state_dict` returned. Its tensors are copied.

        Raises:
            ValueError: For a state with `amsgrad`, or with a weight decay that is not decoupled.
        """
        # Added last, so that it shields what the other hooks return.
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


def _is_fused(parameter: Tensor, group: dict[str, Any]) -> bool:
    # A DTensor arrives here as such only for the clip.
    if parameter.dtype == torch.float64 or hasattr(parameter, "to_local"):
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
        # What a state of `torch.optim.AdamW` lacks stays as it is here.
        saved_groups = [
            {**{k: v for k, v in ours.items() if k != "params"}, **saved}
            | {name: ours[name] for name in _MACHINE_OPTIONS}
            for ours, saved in zip(optimizer.param_groups, saved_groups, strict=True)
        ]
        for group in saved_groups:
            group.pop("decoupled_weight_decay", None)  # torch's own; `check_loaded_group` saw it
    states = {
        key: {name: _Shielded(value) for name, value in state.items()}
        if isinstance(state, dict)
        else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states, "param_groups": saved_groups}


def _unshielded(parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state in the dtypes that `step` keeps it in, on the device of its parameter."""
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
            # A copy, or steps would write into the checkpoint that the caller holds.
            loaded[name] = value.value.to(parameter.device, dtype, copy=True)
    return loaded
