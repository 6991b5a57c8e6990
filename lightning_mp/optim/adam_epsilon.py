"""Checks of epsilon and second moments of user-provided optimizers in half precision.

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

# torch's optimizers with a second moment, the moment's decay rate, and where epsilon is added:
# outside the root of v ("beside"), inside the root, or to |g| where nothing is squared.
_ADAM_LIKE = (optim.Adam, optim.NAdam, optim.RAdam, optim.SparseAdam)
_EPSILON_PLACEMENTS: tuple[tuple[type[Optimizer], Callable[[_Group], Any], str], ...] = (
    *((cls, lambda group: group["betas"][1], "beside") for cls in _ADAM_LIKE),
    (optim.RMSprop, lambda group: group["alpha"], "beside"),
    (optim.Adagrad, lambda group: 0.0, "beside"),
    (optim.Adadelta, lambda group: group["rho"], "inside"),
    (optim.Adamax, lambda group: group["betas"][1], "unsquared"),
)
_HAS_HALF_ADAGRAD = torch.__version__ < "2.15"
# torch's names of the second moment, which optimizers of other libraries share.
_SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum", "exp_inf")


def check_adam_epsilon(
    optimizer: Optimizer,
    *,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    ignore: Container[Tensor] = frozenset(),
) -> list[tuple[str, EpsilonReport]]:
    """Report on every trainable half parameter whose optimizer divides by a second moment.

    The check covers torch's Adam, AdamW, NAdam, RAdam, Adamax, SparseAdam, Adagrad, Adadelta,
    RMSprop and subclasses. Any other optimizer is reported once its state has a half second moment
    under one of torch's names, such as `exp_avg_sq`, and its scalar epsilon rounds to 0 in that
    dtype. An optimizer that declares `keeps_fp32_states = True` is skipped.

    Args:
        optimizer: The optimizer; its states need not exist yet.
        named_parameters: Names for the reports, such as `model.named_parameters()`.
        ignore: Set or mapping of parameters that are stepped in fp32 and need no check.
    """
    name_of = _name_lookup(optimizer, named_parameters)
    return [
        (name_of(parameter), report)
        for _, parameter, report in _half_parameter_reports(optimizer, ignore=ignore)
    ]


@check_arguments(adam_epsilon="(0, inf)")
def guard_adam_epsilon(
    optimizer: Optimizer,
    adam_epsilon: Literal["auto", "keep"] | float = "auto",
    *,
    ignore: Container[Tensor] = frozenset(),
    name_of: Callable[[Tensor], str] | None = None,
) -> list[RemovableHandle]:
    """Raise before training if an optimizer's epsilon is lost in half precision.

    `torch.optim.Adam` keeps its states in the dtype of the parameter. With an fp16 parameter and
    default settings, the first zero gradient makes the weight NaN; with `fused=True`, updates
    silently grow to 31 times the learning rate. See `epsilon_report`.

    Half states of fp32 parameters are moved to fp32, as are states of half parameters where the
    optimizer can compute with fp32 states: in torch 2.13 RMSprop (unless centered), Adadelta, and
    Adagrad with `foreach=False`. These states stay in fp32 when a checkpoint is loaded. torch's
    Adam family cannot compute with fp32 states of half parameters, so such parameters are refused
    unless their report `is_safe`, as in bf16.

    Optimizers of other libraries are judged as in `check_adam_epsilon`, and their states are never
    moved. `keeps_fp32_states = True` on the class or the instance exempts an optimizer.

    Args:
        optimizer: The optimizer, preferably before its first step.
        adam_epsilon: `"auto"` checks epsilon; `"keep"` disables the check; a positive number
            replaces every scalar epsilon, also after a checkpoint is loaded, and is then checked.
        ignore: Set or mapping of parameters that are stepped in fp32 and need no check.
        name_of: Returns the dotted name of a parameter for the error message.

    Returns:
        Handles of the hooks on the optimizer; `handle.remove()` removes a hook.

    Raises:
        ValueError: `adam_epsilon` is invalid, or a half parameter is refused. The message names the
            parameter and the gradient below which its update blows up.

    References:
        Lightning#20619
    """
    if adam_epsilon == "keep":
        return []
    handles = [] if adam_epsilon == "auto" else [_set_epsilon(optimizer, float(adam_epsilon))]
    # Widen first: half states that can be widened are no reason to refuse.
    widen_states_of_fp32_parameters(optimizer)
    name_of = name_of or _name_lookup(optimizer, None)
    is_moved = False
    for group, parameter, report in _half_parameter_reports(optimizer, ignore=ignore):
        if report.is_safe:
            is_moved |= report.state_dtype not in HALF_DTYPES  # moved earlier
            continue
        if not move_states_to_fp32(optimizer, group, parameter):
            raise ValueError(
                f"Passed `{type(optimizer).__name__}(eps={group['eps']!r})` with "
                f"the {parameter.dtype} parameter {name_of(parameter)!r}: {report}. "
                "Create the parameter in fp32, so that `BalancedAMP` and `PureFP16` step it in "
                f"fp32. {_safe_adamw_advice(optimizer, group, parameter)}To disable this check, "
                "pass `adam_epsilon='keep'`."
            )
        is_moved = True
    return handles + (keep_fp32_states(optimizer) if is_moved else [])


def _safe_adamw_advice(optimizer: Optimizer, group: _Group, parameter: Tensor) -> str:
    """Return the advice to use `SafeAdamW`, and which Adam arguments to leave out."""
    if not isinstance(optimizer, optim.Adam):  # the base class of AdamW
        return ""
    refused = [name for name in ("amsgrad", "differentiable") if group.get(name)]
    if group.get("fused") and not parameter.is_cuda:
        refused.append("fused")
    without = f" without {' and '.join(f'`{name}`' for name in refused)}" if refused else ""
    return f"Alternatively, use `SafeAdamW`{without}. "


def _set_epsilon(optimizer: Optimizer, eps: float) -> RemovableHandle:
    """Set every scalar epsilon now and after every `load_state_dict`."""

    def write(optimizer: Optimizer) -> None:
        # Groups that are added later start from the defaults.
        for options in (optimizer.defaults, *optimizer.param_groups):
            if isinstance(options.get("eps"), int | float):
                options["eps"] = eps

    write(optimizer)
    return optimizer.register_load_state_dict_post_hook(write)


# --- reports per parameter ---------------------------------------------------------------------


def _name_lookup(
    optimizer: Optimizer, named: Iterable[tuple[str, Tensor]] | None
) -> Callable[[Tensor], str]:
    names = {
        id(parameter): f"param_groups[{g}]['params'][{i}]"
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    }
    names.update({id(parameter): name for name, parameter in named or ()})
    return lambda parameter: names.get(id(parameter), "an unnamed parameter")


def _half_parameter_reports(
    optimizer: Optimizer, *, ignore: Container[Tensor]
) -> Iterator[tuple[_Group, Tensor, EpsilonReport]]:
    """Yield group, parameter and report for each trainable half parameter that can be judged."""
    if getattr(optimizer, "keeps_fp32_states", False):
        return
    pairs = ((group, p) for group in optimizer.param_groups for p in group["params"])
    for group, parameter in pairs:
        # Frozen parameters are not stepped.
        is_half = parameter.dtype in HALF_DTYPES and parameter.requires_grad
        if is_half and parameter not in ignore and isinstance(group.get("eps"), int | float):
            report = _report_on(optimizer, group, parameter)
            if report is not None:
                yield group, parameter, report


def _report_on(optimizer: Optimizer, group: _Group, parameter: Tensor) -> EpsilonReport | None:
    state = optimizer.state.get(parameter, {})
    second_moments = [v for k, v in state.items() if k in _SECOND_MOMENTS and is_moment(k, v)]
    dtype = second_moments[0].dtype if second_moments else parameter.dtype
    for cls, beta2_of, placement in _EPSILON_PLACEMENTS:
        if isinstance(optimizer, cls):
            # Fused kernels compute in fp32, except for that of Adagrad on a CPU before torch 2.15.
            is_half = _HAS_HALF_ADAGRAD and parameter.is_cpu and cls is optim.Adagrad
            report = epsilon_report(
                eps=float(group["eps"]),
                beta2=float(beta2_of(group)),
                state_dtype=dtype,
                math_dtype=torch.float32 if group.get("fused") and not is_half else dtype,
            )
            return report if placement == "beside" else _adjust_to_placement(report, placement)
    # Formulas of other optimizers are unknown, but dividing by v with an epsilon of 0 gives NaN.
    if second_moments and dtype in HALF_DTYPES and group["eps"] > 0:
        betas = group.get("betas", (0.0, 0.0))
        report = epsilon_report(eps=float(group["eps"]), beta2=float(betas[1]), state_dtype=dtype)
        return None if report.survives else report
    return None


def _adjust_to_placement(report: EpsilonReport, placement: str) -> EpsilonReport:
    """Adjust a report for an epsilon inside the root, or beside a moment that is not squared."""
    if placement == "unsquared":  # v is |g| itself, so only a zero gradient is lost
        overflow = smallest_overflowing(report.state_dtype)
        report = replace(report, blow_up_gradient=0.0, overflow_gradient=overflow)
    if report.survives:  # v + eps is positive for every v
        return replace(report, blow_up_gradient=0.0, largest_step=1.0)
    return replace(report, largest_step=math.inf)
