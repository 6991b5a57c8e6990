"""The losses of several ranks as operators, so that `torch.compile` keeps them whole.

How large the batches of other ranks are, no compiler knows before a call. So what passes from the
forward to the backward is of this rank's sizes alone: `torch.ops.lightning_mp.loss_of_ranks` makes
both sweeps at once, and `loss_of_ranks_backward` what is left, with the cotangent. The ranks agree
inside, and the calls of all of them have to come in one order, as without a compiler.

Shapes:
    b: this rank's images. n: its texts, of which the first b belong to them. D: feature width.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_mp.contrastive._call.pair_options import PairOptions
from lightning_mp.contrastive._exchange.agreement import agree, trained
from lightning_mp.contrastive._operators.operators import (
    FEATURES,
    TILES,
    define,
    derive,
    wanted_like,
)
from lightning_mp.contrastive._sums import infonce, sigmoid_sweep
from lightning_mp.contrastive._tiles.backends import ExchangeName, TileChoice
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = ["loss_of_ranks"]


def loss_of_ranks(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    pairs: PairOptions,
    tiles: TileChoice,
    exchange: ExchangeName,
    group: dist.ProcessGroup | None,
    is_softmax: bool,
) -> tuple[Tensor, Tensor]:
    """Return loss and statistics of all ranks, by the operator; of pairs that `is_swept`."""
    needs_grad = list(trained(image_bD, text_nD, scale, None if is_softmax else bias))
    name = "" if group is None else group.group_name
    options = (*tiles, pairs.masked_ids, pairs.directions, pairs.statistics, exchange)
    loss, *_, found = _forward(
        image_bD, text_nD, scale, bias, needs_grad, name, is_softmax, *options
    )
    return loss, found


def _loss_of_ranks(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    needs_grad: list[bool],
    group: str,
    is_softmax: bool,
    *options: Any,
) -> tuple[Tensor, ...]:
    """Return the loss, unfinished gradients, what else the backward takes, and statistics.

    These are what `infonce.differentiate` is to finish with the weights of the pairs, or the
    members of `SigmoidSwept`; then the number of terms and of pairs, on the host. Empty is what is
    not wanted.

    Raises:
        ValueError: Ranks differ in what they pass; on all of them.
    """
    *tiles, ids, directions, statistics, exchange = options
    pairs = PairOptions(ids, directions=directions, statistics=statistics, is_softmax=is_softmax)
    plan = agree(
        image_bD, text_nD, scale, bias, pairs,
        exchange=exchange, tiles=TileChoice(*tiles), group=_group_of(group), needs_grad=needs_grad,
    )  # fmt: skip
    gradients: Sequence[Tensor | None] = (None, None)
    if is_softmax:
        swept = infonce.sweep(image_bD, text_nD, scale, bias, plan)
        loss, own, found = swept.loss, swept.weight_b, swept.statistics_5
        if plan.trains:
            with torch.autocast(image_bD.device.type, enabled=False):
                gradients = infonce.negatives_gradients(
                    image_bD, text_nD, scale, swept.row_lse_b, swept.column_lse, swept.kept,
                    swept.block_mD, plan,
                )  # fmt: skip
    else:
        loss, (own, *gradients), found = sigmoid_sweep.sweep(image_bD, text_nD, scale, bias, plan)
    numbers = torch.tensor([plan.terms, plan.global_pairs])
    empty = (loss.new_empty(0) if x is None else x.contiguous() for x in (*gradients, found))
    d_image_bD, d_text_nD, found = empty
    return loss, d_image_bD, d_text_nD, own, numbers, found


def _fake_loss_of_ranks(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    needs_grad: list[bool],
    group: str,
    is_softmax: bool,
    *options: Any,
) -> tuple[Tensor, ...]:
    dtype, state = accumulation_dtype(image_bD.dtype), state_dtype(image_bD.device)
    loss, found = (image_bD.new_empty(s, dtype=dtype) for s in ((), 5 * options[-2]))
    d_image_bD, d_text_nD = (
        torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        if is_used
        else loss.new_empty(0)
        for x, is_used in zip((image_bD, text_nD), sigmoid_sweep.sides_of(*needs_grad), strict=True)
    )
    own = image_bD.new_empty(image_bD.shape[0] if is_softmax else 3, dtype=state)
    numbers = torch.empty(2, dtype=torch.int64, device="cpu")
    return loss, d_image_bD, d_text_nD, own, numbers, found


_forward = define(
    "loss_of_ranks",
    f"({FEATURES}, bool[] needs_grad, str group, bool is_softmax, {TILES}, Tensor? ids,"
    " str directions, bool statistics, str exchange)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _loss_of_ranks,
    _fake_loss_of_ranks,
    tags=(torch.Tag.cudagraph_unsafe,),  # the host waits for other hosts
)


def _loss_of_ranks_backward(
    cotangent: Tensor,
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    swept: list[Tensor],
    needs_grad: list[bool],
    group: str,
    is_softmax: bool,
    *tiles: Any,
) -> list[Tensor]:
    """Return the gradients of images, texts and scale that are needed, and of a bias if given."""
    loss, *unfinished, own, numbers = swept
    terms, pairs = numbers.tolist()
    process_group = _group_of(group)
    ranks = dist.get_world_size(process_group)
    d_image_bD, d_text_nD = (x if x.dim() == 2 else None for x in unfinished)
    found: Sequence[Tensor | None]
    if is_softmax:
        # Finished in place, and a graph that is retained needs them once more.
        d_image_bD, d_text_nD = (None if x is None else x.clone() for x in (d_image_bD, d_text_nD))
        backend = TileChoice(*tiles).tiles(image_bD.device, image_bD.dtype)

        def all_reduce(total: Tensor) -> Tensor:
            dist.all_reduce(total, group=process_group)
            return total

        found = infonce.finish_gradients(
            cotangent, image_bD, text_nD, scale, bias, d_image_bD, d_text_nD, own, loss, terms,
            ranks, needs_grad[2], backend, all_reduce,
        )  # fmt: skip
    else:
        found = sigmoid_sweep.differentiate(
            cotangent, scale, bias, sigmoid_sweep.SigmoidSwept(own, d_image_bD, d_text_nD), pairs,
            ranks, image_bD.dtype,
        )  # fmt: skip
    wanted = (*needs_grad, bias is not None)
    return [x for x, need in zip(found, wanted, strict=True) if x is not None and need]


def _fake_loss_of_ranks_backward(cotangent: Tensor, *arguments: Any) -> list[Tensor]:
    *inputs, _, needs_grad = arguments[:6]
    return wanted_like(inputs, (*needs_grad, True))


_backward = define(
    "loss_of_ranks_backward",
    f"(Tensor cotangent, {FEATURES}, Tensor[] swept, bool[] needs_grad, str group, bool is_softmax,"
    f" {TILES}) -> Tensor[]",
    _loss_of_ranks_backward,
    _fake_loss_of_ranks_backward,
    tags=(torch.Tag.cudagraph_unsafe,),
)


def _save(inputs: Sequence[Any], output: Sequence[Tensor]) -> tuple[list[Tensor | None], Any]:
    *features, _, group, is_softmax = inputs[:7]
    return [*features, *output[:-1]], (group, is_softmax, *inputs[7:11])


def _arguments(
    cotangent: Tensor, tensors: Sequence[Any], values: Any, needs: Sequence[bool]
) -> tuple[Sequence[Any], Sequence[bool]]:
    *features, needs_grad = *tensors[:4], list(needs[:3])
    arguments = (cotangent, *features, list(tensors[4:]), needs_grad, *values)
    return arguments, (*needs_grad, features[3] is not None)


derive(_forward, _backward, _save, _arguments, infonce.NO_SECOND_DERIVATIVE)


def _group_of(name: str) -> dist.ProcessGroup | None:
    """Return the process group of a name; the default one has none here."""
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(name) if name else None
