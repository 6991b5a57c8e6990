"""fp32 states for half parameters of optimizers that can compute with fp32 states."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_mp.numerics.floats import HALF_DTYPES

__all__ = [
    "is_moment",
    "keep_fp32_states",
    "move_states_to_fp32",
    "widen_state",
    "widen_states_of_fp32_parameters",
]


def is_moment(name: str, value: object) -> bool:
    """Return whether a state entry is a moment rather than the step count."""
    return name != "step" and isinstance(value, Tensor) and value.is_floating_point()


def widen_state(state: dict[str, Any]) -> None:
    """Cast the half moments of one parameter to fp32."""
    for name, value in state.items():
        if is_moment(name, value) and value.dtype in HALF_DTYPES:
            state[name] = value.float()


def widen_states_of_fp32_parameters(optimizer: Optimizer) -> None:
    """Cast half states of fp32 parameters to fp32 in torch's own optimizers.

    A parameter that was in half precision during the first steps has left half states, with which
    torch's Adam refuses to step.
    """
    # Other libraries use half states deliberately, often scaled.
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Tensor) and parameter.dtype == torch.float32:
            widen_state(state)


def move_states_to_fp32(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> bool:
    """Give a half parameter fp32 states if the optimizer can compute with them; return whether."""
    names = _usable_moments(optimizer, group, parameter)
    if names is None:
        return False
    state = optimizer.state[parameter]
    widen_state(state)
    if not state:  # torch creates states only if there are none, so all must be created here
        where = parameter.device if group["capturable"] else None
        state["step"] = torch.zeros((), dtype=torch.float32, device=where)
        state.update({name: torch.zeros_like(parameter, dtype=torch.float32) for name in names})
    return True


def _usable_moments(
    optimizer: Optimizer, group: dict[str, Any], parameter: Tensor
) -> list[str] | None:
    """Return the moments that a step can keep in fp32 for a half parameter, `None` if it cannot."""
    # In torch 2.10 and 2.13, Adam, AdamW, NAdam, RAdam, Adamax, Adafactor, centered RMSprop and all
    # fused optimizers raise.
    kind = type(optimizer)  # subclasses are excluded: they may wrap an optimizer or communicate
    if group.get("differentiable"):
        return None
    if kind is optim.RMSprop and not group["centered"]:
        return ["square_avg", *(["momentum_buffer"] if group["momentum"] else [])]
    if kind is optim.Adadelta:
        return ["square_avg", "acc_delta"]
    # Adagrad with `foreach=True`, the default on a GPU, multiplies gradient and learning rate in
    # half, which flushes gradients up to 3e-5 at lr=1e-3.
    is_foreach = parameter.is_cuda if group.get("foreach") is None else group["foreach"]
    is_usable = kind is optim.Adagrad and not group["fused"] and not is_foreach
    return ["sum"] if is_usable else None  # created by Adagrad's constructor


def keep_fp32_states(optimizer: Optimizer) -> list[RemovableHandle]:
    """Make `load_state_dict` load states of half parameters in fp32; return the hooks' handles.

    `Optimizer.load_state_dict` casts every state to the dtype of its parameter: a second moment of
    1e-9 becomes 0 for an fp16 parameter. The hooks restore the saved values in fp32. The optimizer
    must be able to compute with fp32 states.
    """
    saved: dict[Tensor, Mapping[str, Any]] = {}

    def before(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        saved.clear()
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for key, parameter in zip(keys, parameters, strict=False):  # torch checks the lengths
            saved[parameter] = state_dict["state"].get(key, {})

    def after(optimizer: Optimizer) -> None:
        for parameter, values in saved.items():
            if parameter.dtype in HALF_DTYPES:
                state = optimizer.state.get(parameter, {})
                for name in state:
                    if is_moment(name, values.get(name)):
                        state[name] = values[name].to(parameter.device, torch.float32, copy=True)
        saved.clear()

    return [
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after),
    ]
