"""Inputs of a contrastive loss with the plan that all ranks have agreed on.

Shapes:
    b: this rank's images. n: its texts. D: feature width.
"""

from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.contrastive._call.inputs import as_tensors
from lightning_mp.contrastive._call.pair_options import PairOptions
from lightning_mp.contrastive._exchange.agreement import (
    agree,
    group_size,
    plan_of_one,
    report_unusable,
    trained,
)
from lightning_mp.contrastive._sums.infonce import Plan
from lightning_mp.contrastive._tiles.backends import ExchangeName, TileChoice, triton_problem

__all__ = ["Planned", "plan_for", "refuse"]


class Planned(NamedTuple):
    """What a loss computes with: inputs on one device, in the order of their pairs; the plan."""

    image_bD: Tensor
    text_nD: Tensor
    scale: Tensor
    bias: Tensor | None
    pairs: PairOptions
    plan: Plan


def plan_for(
    problem: str | None,
    image_bD: Tensor,
    text_nD: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float | None,
    pairs: PairOptions,
    *,
    trains_bias: bool,
    exchange: ExchangeName,
    tiles: TileChoice,
    group: dist.ProcessGroup | None,
) -> Planned:
    """Agree with all ranks of a group on a plan; one process makes its own.

    `problem` is what is wrong with the arguments of this rank, if anything is; `trains_bias` says
    whether the gradient of the bias takes work.

    Raises:
        ValueError: Something cannot be used; on all ranks.
    """
    if problem is None and tiles.backend == "triton":
        problem = triton_problem(image_bD.device, image_bD.dtype)
    if problem is None:
        problem, pairs, image_bD, text_nD = pairs.paired(image_bD, text_nD)
    if problem is not None:
        refuse(problem, image_bD, group)
    scale, bias = as_tensors(logit_scale, logit_bias, image_bD)
    inputs = (image_bD, text_nD, scale, bias if trains_bias else None)
    if group_size(group) == 1:
        plan = plan_of_one(image_bD, text_nD, pairs, tiles, trained(*inputs))
    else:
        plan = agree(*inputs, pairs, exchange=exchange, tiles=tiles, group=group)
    return Planned(image_bD, text_nD, scale, bias, pairs, plan)


@torch.compiler.disable
def refuse(problem: str, image_features: object, group: dist.ProcessGroup | None) -> NoReturn:
    """Stop all ranks of a group, this one with what is wrong.

    Raises:
        ValueError: Always.
    """
    if group_size(group) > 1:
        report_unusable(image_features, group)
    raise ValueError(problem)
