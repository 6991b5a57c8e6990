"""Optimizer states in fp32 for half parameters, where the optimizer can compute with them."""

import inspect
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_mp.numerics.floats import HALF_DTYPES, smallest_subnormal

__all__ = [
    "is_moment",
    "keep_fp32_states",
    "move_states_to_fp32",
    "widen_states_of_fp32_parameters",
]


def is_moment(name: str, value: object) -> bool:
    """Return whether a state is one of the optimizer's averages, and not its step count."""
    return name != "step" and isinstance(value, Tensor) and value.is_floating_point()


def widen_states_of_fp32_parameters(optimizer: Optimizer) -> None:
    """Move half states of fp32 parameters to fp32, for torch's own optimizers.

    A parameter that was half while the optimizer took its first steps has left them behind, and
    torch's Adam then refuses to step. Other libraries keep half states on purpose, often scaled.
    """
    if not _is_torchs(optimizer):
        return
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Tensor) and parameter.dtype == torch.float32:
            _widen(state)


def move_states_to_fp32(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> bool:
    """Give a half parameter fp32 states, before its first step too, if the optimizer uses them.

    The optimizer is asked: one of its class and options steps a single number in half with states
    in fp32, and must move it as it moves one in fp32. In torch 2.13, RMSprop (unless centered),
    Adagrad (single-tensor) and Adadelta do. Adam, AdamW, NAdam, RAdam, Adamax and Adafactor raise,
    whether single-tensor, foreach or fused, as does all that is fused. Adagrad with `foreach=True`,
    the default on a GPU, takes them but multiplies gradient and learning rate in half, which
    flushes gradients up to 3e-5 at lr=1e-3: `foreach=False` cures that.

    Only classes of torch itself are asked: any other may hold a second optimizer, or communicate.

    Args:
        optimizer: The optimizer.
        group: The parameter's group.
        parameter: A half parameter.

    Returns:
        Whether its states are in fp32 now. They stay so through a checkpoint with
        `keep_fp32_states`.
    """
    if not _is_torchs(optimizer):
        return False
    one = torch.zeros(1, device=parameter.device)
    try:
        fresh, _ = _step_once(type(optimizer), group, one, {}, gradient=0.0)
        for value in fresh.values():
            value.zero_()  # a zero gradient has left nothing but the count of its step
        _, wanted = _step_once(type(optimizer), group, one, fresh)
        kept, got = _step_once(type(optimizer), group, one.to(parameter.dtype), fresh)
    except Exception:  # whatever it objects to, it does not take them
        return False
    is_right = abs(got - wanted) <= 0.01 * abs(wanted) + smallest_subnormal(parameter.dtype)
    if not is_right or any(value.dtype in HALF_DTYPES for value in kept.values()):
        return False
    state = optimizer.state[parameter]
    if state:
        _widen(state)
    else:
        for name, value in fresh.items():
            is_like = value.shape == one.shape
            state[name] = torch.zeros_like(parameter, dtype=torch.float32) if is_like else value
    return True


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


def _widen(state: dict[str, Any]) -> None:
    for name, value in state.items():
        if is_moment(name, value) and value.dtype in HALF_DTYPES:
            state[name] = value.float()


def _step_once(
    cls: type[Optimizer],
    group: dict[str, Any],
    start: Tensor,
    state: dict[str, Tensor],
    *,
    gradient: float = 2.0**-20,  # its square is 0 in fp16, as is its product with the rate below
) -> tuple[dict[str, Tensor], float]:
    """Step a single number with a group's options; return its state, and where it has gone."""
    options = {name: group[name] for name in inspect.signature(cls).parameters if name in group}
    options = {**options, "lr": 2.0**-10}  # a schedule may start at 0, which would tell nothing
    options.pop("params", None)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = cls([parameter], **options)
    if state:
        optimizer.state[parameter] = {name: value.clone() for name, value in state.items()}
    parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()
    return dict(optimizer.state[parameter]), parameter.item()
