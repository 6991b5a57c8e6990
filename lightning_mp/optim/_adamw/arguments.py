"""Checks of `SafeAdamW`'s arguments, parameters and loaded parameter groups."""

import os
from typing import Any

from torch import Tensor

from lightning_mp._arguments import Check, check_values, refuse_values
from lightning_mp.numerics.floats import FLOAT_DTYPES

__all__ = ["CHECKS", "check_group", "check_loaded_group", "check_parameter"]


def _take_parameters(given: Any) -> list[Any]:
    # A generator can be consumed only once.
    parameters = [] if isinstance(given, Tensor) else list(given)
    if not parameters or not all(isinstance(p, Tensor | dict | tuple) for p in parameters):
        raise ValueError
    return parameters


CHECKS: dict[str, Check | str] = {
    "params": Check(
        take=_take_parameters,
        words="a non-empty list of tensors, or of groups of them",
        fix="Pass `model.parameters()`.",
    ),
    "lr": Check(
        "[0, inf)",
        test=lambda lr: not isinstance(lr, Tensor) or lr.numel() == 1,  # not read from its device
        words="a finite number of at least 0, or a tensor of one element",
    ),
    "eps weight_decay": "[0, inf)",
    "betas": "[0, 1)",
    "clip_update_rms": "(0, inf]",
    "amsgrad differentiable": Check(
        test=lambda value: not value,
        words="False, as no step here supports it",
        fix="Pass `clip_update_rms=1.0` for `amsgrad`; `torch.optim.AdamW` has both.",
    ),
}


def check_group(owner: object, group: dict[str, Any]) -> None:
    """Raise on invalid options of a parameter group."""
    check_values(owner, group)
    if group["foreach"] and group["fused"]:
        reason = "At most one of them may be True. Remove `foreach`."
        refuse_values(owner, reason, foreach=True, fused=True)
    if group["capturable"] and group["write_back"] == "stochastic":
        reason = "A captured step repeats its noise in every replay. Pass `write_back='kahan'`."
        refuse_values(owner, reason, capturable=True, write_back="stochastic")


def check_parameter(parameter: Tensor, group: dict[str, Any]) -> None:
    """Raise on a parameter that the options of its group do not support."""
    # Frozen parameters, such as quantized weights, are never stepped.
    if parameter.requires_grad and parameter.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"Passed a parameter of {parameter.dtype} to `SafeAdamW`. Parameters must be"
            " fp16, bf16, fp32 or float64. Pass complex ones as `torch.view_as_real(parameter)`."
        )
    if group["fused"] and group["clip_update_rms"] is not None and hasattr(parameter, "to_local"):
        raise ValueError(
            f"Passed `SafeAdamW(clip_update_rms={group['clip_update_rms']!r}, fused=True)` with a"
            " sharded parameter, of which the kernel sees one shard only. Remove `fused`."
        )
    # Triton's interpreter runs the kernel on the CPU, for tests.
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if group["fused"] and not parameter.is_cuda and not is_interpreted:
        raise ValueError(
            f"Passed `SafeAdamW(fused=True)` with a parameter on {str(parameter.device)!r}. The"
            " fused kernel needs CUDA. Remove `fused`, or move the model to the GPU first."
        )


def check_loaded_group(group: dict[str, Any]) -> None:
    """Raise on a loaded group that its own optimizer would step differently."""
    if group.get("amsgrad"):
        raise ValueError(
            "Loaded a state with `amsgrad=True`, which `SafeAdamW` does not support."
            " Set `amsgrad` to False in the state's groups to continue without it."
        )
    if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
        raise ValueError(
            f"Loaded a state of Adam with `weight_decay={group['weight_decay']!r}`, which acts"
            " through the gradients. `SafeAdamW` decouples weight decay. Set `weight_decay` in the"
            " state's groups to 0 or to a value for AdamW, and remove `decoupled_weight_decay`."
        )
