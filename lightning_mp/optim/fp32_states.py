"""Optimizer states in fp32 for half parameters, where the optimizer can compute with them."""

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
    """Return whether a state is one of the optimizer's averages, and not its step count."""
    return name != "step" and isinstance(value, Tensor) and value.is_floating_point()


def widen_state(state: dict[str, Any]) -> None:
    """Move the half averages of one parameter to fp32."""
    for name, value in state.items():
        if is_moment(name, value) and value.dtype in HALF_DTYPES:
            state[name] = value.float()


def widen_states_of_fp32_parameters(optimizer: Optimizer) -> None:
    """Move half states of fp32 parameters to fp32, for torch's own optimizers.

    A parameter that was half while the optimizer took its first steps has left them behind, and
    torch's Adam then refuses to step.
    """
    # Other libraries keep half states on purpose, often scaled.
    if not _is_torchs(optimizer):
        return
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Tensor) and parameter.dtype == torch.float32:
            widen_state(state)


def move_states_to_fp32(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> bool:
    """Give a half parameter fp32 states, before its first step too, if the optimizer uses them.

    Return whether they are in fp32 now. They stay so through a checkpoint with `keep_fp32_states`.
    """
    names = _usable_moments(optimizer, group, parameter)
    if names is None:
        return False
    state = optimizer.state[parameter]
    if state:
        widen_state(state)
        return True
    where = parameter.device if group["capturable"] else None
    # torch makes states only where there are none: what it would make must all be here.
    state["step"] = torch.zeros((), dtype=torch.float32, device=where)
    state.update({name: torch.zeros_like(parameter, dtype=torch.float32) for name in names})
    return True


def _usable_moments(
    optimizer: Optimizer, group: dict[str, Any], parameter: Tensor
) -> list[str] | None:
    """Return the moments that a step keeps in fp32 of a half parameter, `None` if it does not."""
    # In torch 2.10 and 2.13 Adam, AdamW, NAdam, RAdam, Adamax, Adafactor and centered RMSprop
    # raise, as does all that is fused.
    kind = type(optimizer)  # no base: a derived class may hold a second optimizer, or communicate
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
    return ["sum"] if is_usable else None  # Adagrad makes it in its constructor


def keep_fp32_states(optimizer: Optimizer) -> list[RemovableHandle]:
    """Load states in fp32, whatever the dtype of their parameter.

    `Optimizer.load_state_dict` casts every state to the dtype of its parameter: second moments of
    1e-9, loaded for an fp16 parameter, are 0 after it. Here they are put back as they were saved,
    and states that were saved in half become fp32. Only for optimizers that compute with them.

    Args:
        optimizer: The optimizer.

    Returns:
        The handles of its two hooks.
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


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")
