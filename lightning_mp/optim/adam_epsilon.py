"""A guard for the epsilon and the second moments of the optimizers that users bring.

Legend: `g` gradient, `v` second moment.
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_mp._arguments import check_arguments
from lightning_mp.numerics.floats import HALF_DTYPES, smallest_overflowing
from lightning_mp.optim.epsilon_report import EpsilonReport, epsilon_report
from lightning_mp.optim.fp32_states import (
    is_moment,
    keep_fp32_states,
    move_states_to_fp32,
    widen_states_of_fp32_parameters,
)

__all__ = ["check_adam_epsilon", "guard_adam_epsilon"]

_Group: TypeAlias = dict[str, Any]

# torch's optimizers with a second moment, how much of it a step keeps, and where epsilon stands:
# beside the root of v, inside that root, or beside |g| where no square is taken.
_ADAM_LIKE = (optim.Adam, optim.NAdam, optim.RAdam, optim.SparseAdam)
_PLACES: tuple[tuple[type[Optimizer], Callable[[_Group], Any], str], ...] = (
    *((cls, lambda group: group["betas"][1], "beside") for cls in _ADAM_LIKE),
    (optim.RMSprop, lambda group: group["alpha"], "beside"),
    (optim.Adagrad, lambda group: 0.0, "beside"),
    (optim.Adadelta, lambda group: group["rho"], "inside"),
    (optim.Adamax, lambda group: group["betas"][1], "unsquared"),
)
# Their names for it, which other libraries' optimizers have taken over.
_SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum", "exp_inf")


def check_adam_epsilon(
    optimizer: Optimizer,
    *,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    ignore: Container[Tensor] = frozenset(),
) -> list[tuple[str, EpsilonReport]]:
    """Report on every trainable half parameter whose optimizer divides by a second moment.

    Only what can be known is reported: torch's own Adam, AdamW, NAdam, RAdam, Adamax, SparseAdam,
    Adagrad, Adadelta, RMSprop and classes derived from them; and any other optimizer once it has a
    half second moment under one of torch's names, such as `exp_avg_sq`, and a scalar epsilon that
    is 0 in that format. An optimizer that declares `keeps_fp32_states = True` is left out.

    Args:
        optimizer: The optimizer; its states need not exist yet.
        named_parameters: Names to report under, such as `model.named_parameters()`.
        ignore: Parameters that are stepped in fp32. A set or a mapping; no list.

    Returns:
        A name and a report for each such parameter.
    """
    name_of = _namer(optimizer, named_parameters)
    return [
        (name_of(parameter), report) for _, parameter, report in _judge(optimizer, ignore=ignore)
    ]


@check_arguments(adam_epsilon="(0, inf)")
def guard_adam_epsilon(
    optimizer: Optimizer,
    adam_epsilon: Literal["auto", "keep"] | float = "auto",
    *,
    ignore: Container[Tensor] = frozenset(),
    name_of: Callable[[Tensor], str] | None = None,
) -> list[RemovableHandle]:
    """Let no optimizer start that half precision would blow up.

    `torch.optim.Adam` keeps its states in the dtype of the parameter. With an fp16 parameter and
    default settings that is a NaN weight at the first zero gradient, and with `fused=True` updates
    that silently grow to 31 learning rates. See `epsilon_report`.

    Half states of fp32 parameters are moved to fp32. So are those of half parameters where the
    optimizer computes with fp32 states: in torch 2.13 RMSprop (unless centered), Adadelta, and
    Adagrad with `foreach=False`. Their states then stay in fp32, also when a checkpoint is loaded.
    torch's Adam family cannot, so its half parameters are refused, unless their report `is_safe`,
    as in bf16.

    Optimizers that are not torch's are judged as `check_adam_epsilon` says, and their states are
    never moved. `keeps_fp32_states = True` on the class or the optimizer exempts it.

    Args:
        optimizer: The optimizer; best before its first step.
        adam_epsilon: `"auto"` guards; `"keep"` does nothing at all; a positive number becomes the
            epsilon of every parameter group that has a scalar one, for good, also when a
            checkpoint with another one is loaded, and then guards like `"auto"`.
        ignore: Parameters that are stepped in fp32. A set or a mapping; no list.
        name_of: Gives the dotted name of a parameter, for the error.

    Returns:
        Handles of the hooks that were set on the optimizer; `handle.remove()` ends them.

    Raises:
        ValueError: If `adam_epsilon` is something else, or a half parameter must be refused; it
            names the parameter and the gradient below which its update blows up.

    References:
        Lightning#20619
    """
    if adam_epsilon == "keep":
        return []
    handles = [] if adam_epsilon == "auto" else [_set_epsilon(optimizer, float(adam_epsilon))]
    # First, as half states that can be widened are no reason to refuse.
    widen_states_of_fp32_parameters(optimizer)
    name_of = name_of or _namer(optimizer, None)
    is_moved = False
    for group, parameter, report in _judge(optimizer, ignore=ignore):
        if report.is_safe:
            is_moved |= report.state_dtype not in HALF_DTYPES  # by an earlier guard, or the user
            continue
        if not move_states_to_fp32(optimizer, group, parameter):
            raise ValueError(
                f"Passed `{type(optimizer).__name__}(eps={group['eps']!r})` with "
                f"{name_of(parameter)!r}, a parameter in {parameter.dtype} that it steps as such: "
                f"{report}. Create the parameter in fp32, so that `BalancedAMP` and `PureFP16` "
                f"step it in fp32, {_instead_of(optimizer, group, parameter)}or pass "
                "`adam_epsilon='keep'` to go on as it is."
            )
        is_moved = True
    return handles + (keep_fp32_states(optimizer) if is_moved else [])


def _instead_of(optimizer: Optimizer, group: _Group, parameter: Tensor) -> str:
    """Advise `SafeAdamW` in the place of Adam, without the arguments that it refuses."""
    if not isinstance(optimizer, optim.Adam):  # and so AdamW
        return ""
    refused = [name for name in ("amsgrad", "differentiable") if group.get(name)]
    if group.get("fused") and not parameter.is_cuda:
        refused.append("fused")
    without = f" without {' and '.join(f'`{name}`' for name in refused)}" if refused else ""
    return f"or use `SafeAdamW`{without}, "


def _set_epsilon(optimizer: Optimizer, eps: float) -> RemovableHandle:
    """Set every scalar epsilon, and set it again when a checkpoint has brought its own."""

    def write(optimizer: Optimizer) -> None:
        # The defaults are what groups that are added later start from.
        for options in (optimizer.defaults, *optimizer.param_groups):
            if isinstance(options.get("eps"), int | float):
                options["eps"] = eps

    write(optimizer)
    return optimizer.register_load_state_dict_post_hook(write)


# --- which parameters, and how they stand ------------------------------------------------------


def _namer(
    optimizer: Optimizer, named: Iterable[tuple[str, Tensor]] | None
) -> Callable[[Tensor], str]:
    names = {
        id(parameter): f"param_groups[{g}]['params'][{i}]"
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    }
    names.update({id(parameter): name for name, parameter in named or ()})
    return lambda parameter: names.get(id(parameter), "an unnamed parameter")


def _judge(
    optimizer: Optimizer, *, ignore: Container[Tensor]
) -> Iterator[tuple[_Group, Tensor, EpsilonReport]]:
    """Yield the trainable half parameters of which something is known, with their reports."""
    if getattr(optimizer, "keeps_fp32_states", False):
        return
    pairs = ((group, p) for group in optimizer.param_groups for p in group["params"])
    for group, parameter in pairs:
        # Frozen ones get no gradient, and are not stepped.
        is_half = parameter.dtype in HALF_DTYPES and parameter.requires_grad
        if is_half and parameter not in ignore and isinstance(group.get("eps"), int | float):
            report = _report_on(optimizer, group, parameter)
            if report is not None:
                yield group, parameter, report


def _report_on(optimizer: Optimizer, group: _Group, parameter: Tensor) -> EpsilonReport | None:
    second_moments = [v for k, v in optimizer.state.get(parameter, {}).items() if _is_second(k, v)]
    dtype = second_moments[0].dtype if second_moments else parameter.dtype
    for cls, beta2_of, place in _PLACES:
        if isinstance(optimizer, cls):
            # The fused kernels hold intermediate results in fp32, and so does type promotion.
            math_dtype = torch.float32 if group.get("fused") else dtype
            report = epsilon_report(
                eps=float(group["eps"]),
                beta2=float(beta2_of(group)),
                state_dtype=dtype,
                math_dtype=math_dtype,
            )
            return report if place == "beside" else _move_epsilon(report, place)
    # Of others' formulas only this is known: they divide by it, and an epsilon of 0 is NaN.
    if second_moments and dtype in HALF_DTYPES and group["eps"] > 0:
        betas = group.get("betas", (0.0, 0.0))
        report = epsilon_report(eps=float(group["eps"]), beta2=float(betas[1]), state_dtype=dtype)
        return None if report.survives else report
    return None


def _move_epsilon(report: EpsilonReport, place: str) -> EpsilonReport:
    """Tell of an epsilon that stands inside the root, or beside a moment that is not squared."""
    if place == "unsquared":  # v is |g| itself, which loses nothing but zero
        overflow = smallest_overflowing(report.state_dtype)
        report = replace(report, blow_up_gradient=0.0, overflow_gradient=overflow)
    if report.survives:  # then v + eps is above 0 whatever v is
        return replace(report, blow_up_gradient=0.0, largest_step=1.0)
    return replace(report, largest_step=math.inf)


def _is_second(name: str, value: object) -> bool:
    return name in _SECOND_MOMENTS and is_moment(name, value)
