"""What `SafeAdamW` accepts: its arguments, its parameters and the groups of checkpoints."""

import os
from typing import Any

from torch import Tensor

from lightning_mp._arguments import is_number
from lightning_mp.numerics.floats import FLOAT_DTYPES

__all__ = ["check_group", "check_loaded_group", "check_parameter"]

_CHOICES = {"rule": ("adam", "atan2"), "write_back": ("kahan", "nearest", "stochastic")}


def check_group(group: dict[str, Any]) -> None:
    """Refuse arguments out of their range."""
    lr = group["lr"]
    if isinstance(lr, Tensor):  # its value stays on its device
        _require(lr.numel() == 1, group, "lr", "a tensor of one element", "a number")
    else:
        _require(_is_at_least_0(lr), group, "lr", "0 or more", "a number such as 1e-3")
    betas = group["betas"]
    is_pair = isinstance(betas, tuple | list) and len(betas) == 2
    are_decays = is_pair and all(_is_at_least_0(beta) and beta < 1 for beta in betas)
    fix = "numbers such as (0.9, 0.999)"
    _require(are_decays, group, "betas", "two numbers in [0, 1)", fix)
    for name, usual in (("eps", "1e-8"), ("weight_decay", "1e-2")):
        _require(_is_at_least_0(group[name]), group, name, "0 or more", f"a number such as {usual}")
    clip = group["clip_update_rms"]
    is_bound = clip is None or (_is_at_least_0(clip) and clip > 0)
    fix = "1.0 to bound updates, or leave it out"
    _require(is_bound, group, "clip_update_rms", "`None` or above 0", fix)
    for name, choices in _CHOICES.items():
        listed = " or ".join(repr(choice) for choice in choices)
        _require(group[name] in choices, group, name, listed, f"{choices[0]!r}")
    _check_switches(group)


def _check_switches(group: dict[str, Any]) -> None:
    for name, instead in (
        ("amsgrad", "Pass `clip_update_rms=1.0` against a second moment that is too small."),
        ("differentiable", "`torch.optim.AdamW` steps differentiably, in fp32."),
    ):
        if group[name]:
            raise ValueError(
                f"Passed `SafeAdamW({name}={group[name]!r})`. `{name}` must be False: its step"
                f" does not support it. {instead}"
            )
    if group["foreach"] and group["fused"]:
        raise ValueError(
            "Passed `SafeAdamW(foreach=True, fused=True)`. At most one of the two may be True. "
            "Leave out `foreach`."
        )
    if group["capturable"] and group["write_back"] == "stochastic":
        raise ValueError(
            "Passed `SafeAdamW(capturable=True, write_back='stochastic')`. A captured step would"
            " repeat its noise at every replay, so `write_back` must be another. Pass"
            " `write_back='kahan'`."
        )


def check_parameter(parameter: Tensor, group: dict[str, Any]) -> None:
    """Refuse a parameter that a group's arguments cannot step."""
    if parameter.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"Passed a parameter of {parameter.dtype} to `SafeAdamW`. Parameters must be"
            " fp16, bf16, fp32 or float64. Pass complex ones as `torch.view_as_real(parameter)`."
        )
    # Triton's interpreter runs the kernel on the CPU, as the tests do.
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if group["fused"] and not parameter.is_cuda and not is_interpreted:
        raise ValueError(
            f"Passed `SafeAdamW(fused=True)` with a parameter on {str(parameter.device)!r}. The"
            " fused kernel needs CUDA. Leave out `fused`, or move the model to the GPU first."
        )
    # The clip then steps the DTensors themselves, which no kernel and no noise can take.
    needs_whole = group["clip_update_rms"] is not None and hasattr(parameter, "to_local")
    if needs_whole and (group["fused"] or group["write_back"] == "stochastic"):
        raise ValueError(
            f"Passed `SafeAdamW(clip_update_rms={group['clip_update_rms']!r})` with a sharded"
            " parameter and `fused=True` or `write_back='stochastic'`. The RMS of a whole tensor"
            " takes neither. Leave out `fused`, and pass `write_back='kahan'`."
        )


def check_loaded_group(group: dict[str, Any]) -> None:
    """Refuse a checkpoint's group that `SafeAdamW` would step otherwise than who wrote it."""
    if group.get("amsgrad"):
        raise ValueError(
            "Loaded a state with `amsgrad=True`. `SafeAdamW` has no maximum of second moments."
            " Set `amsgrad` to False in the state's groups to go on without."
        )
    if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
        raise ValueError(
            f"Loaded a state of Adam with `weight_decay={group['weight_decay']!r}`, which acts"
            " through the gradients. `SafeAdamW` decouples it. Set `weight_decay` in the state's"
            " groups to 0, or to a value for AdamW, and remove `decoupled_weight_decay`."
        )


def _is_at_least_0(value: object) -> bool:
    return is_number(value) and value >= 0  # False for NaN


def _require(is_met: bool, group: dict[str, Any], name: str, accepted: str, fix: str) -> None:
    if not is_met:
        raise ValueError(
            f"Passed `SafeAdamW({name}={group[name]!r})`. `{name}` must be {accepted}. Pass {fix}."
        )
