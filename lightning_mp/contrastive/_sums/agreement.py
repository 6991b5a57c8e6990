"""What the ranks of a group tell each other before a loss: one collective of some numbers a rank.

Every rank needs the batch sizes of all others on its host before it can size a buffer, and no rank
can know that another one's have changed: whatever it assumed, the collectives of the two would not
fit, and NCCL would hang. So every loss reads them. What that costs is one small collective, and not
a wait for the device: on CUDA it runs on a stream of its own, behind no kernel that the towers have
queued, so that the host waits for the other hosts and the network (tens of microseconds) while the
device works on; and, as any collective, for those of the same group that were queued before it.
Arguments that do not fit, of any rank, are seen by all of them and raise on all.

Shapes:
    D: feature width. W: ranks.
"""

import contextlib
import functools
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.contrastive._call.pairing import Pairing
from lightning_mp.contrastive._call.request import GIVEN, RULES, Request, group_named, ranks_of
from lightning_mp.contrastive._exchange.exchange import Exchange
from lightning_mp.contrastive._exchange.ring import Ring
from lightning_mp.contrastive._exchange.slices import Slices, all_gather, block_bytes, slice_count
from lightning_mp.contrastive._sums.sweep import NeedsGrad, OneRank, Plan, plan_of
from lightning_mp.contrastive._tiles.literals import ExchangeName
from lightning_mp.contrastive._tiles.tile_backend import TileBackend
from lightning_mp.numerics.async_readback import AsyncReadback
from lightning_mp.numerics.floats import FLOAT_DTYPES, accumulation_dtype

__all__ = ["agreed_plan", "device_problem", "exchange_for", "refuse", "share_workspace"]

_EXCHANGES: tuple[str, ...] = get_args(ExchangeName)
# Slices may take five eighths of the workspace, the tiles have the rest. Eighths, because Triton's
# tiles remember by their workspace which shapes were the fastest.
_PARTS, _MOST_PARTS = 8, 5
# Beside the workspace, slices may take four times the largest batch in fp32. The loss promises
# eight: gradients take two, and two more while they are concatenated and rounded. A rank with fewer
# rows takes the slices of the largest batch, so that a short last batch costs no more collectives.
_FREE_BATCHES = 4


class Facts(NamedTuple):
    """What a rank tells the others of its call, whole numbers all.

    Attributes:
        is_usable: 0 where the rank stops with an error of its own; nothing else counts then.
        images, texts: How many.
        width, dtype: Of the features; the place of the dtype in `FLOAT_DTYPES`.
        exchange: Its place among the words for it.
        budget: Bytes of the workspace.
        given: Which optional arguments there are, see `Request.given`.
        checksum: Of the rules, see `Request.checksum`.
        scale, bias: The bits of the value where the host has it, else 0; of a scale on a CUDA
            device those of the value that the host has read last.
        scale_call: At which call of the loss that value was passed; 0 is this call.
        image_needs_grad, text_needs_grad, scale_needs_grad: Whether they need a gradient.
        statistics: Whether the call returns them.
    """

    is_usable: int = 0
    images: int = 0
    texts: int = 0
    width: int = 0
    dtype: int = 0
    exchange: int = 0
    budget: int = 0
    given: int = 0
    checksum: int = 0
    scale: int = 0
    bias: int = 0
    scale_call: int = 0
    image_needs_grad: int = 0
    text_needs_grad: int = 0
    scale_needs_grad: int = 0
    statistics: int = 0


def agreed_plan(request: Request, pairing: Pairing | None) -> Plan:
    """Return the plan that all ranks of a group follow; each calls this once a loss.

    Args:
        request: Its rows in the order of their columns.
        pairing: What was made of its `positives`.

    Raises:
        ValueError: Arguments of some ranks do not fit; on all ranks.
    """
    image, text, scale, bias, _ = request.needs_grad
    # A softmax does not see a bias; a sigmoid's has its gradient from the scale's products.
    needs_grad = NeedsGrad(image, text, scale or (bias and not request.is_softmax))
    group = group_named(request.group) if request.group else None
    if ranks_of(group, request.owner) == 1:
        tiles = request.tiles(request.workspace_bytes)
        return plan_of(request, OneRank(len(request.text)), tiles, needs_grad, pairing=pairing)
    by_rank = _gather(_facts(request, needs_grad), request.image.device, group)
    _refuse_what_differs(by_rank, request.owner)
    # The least workspace of all, for all have to cut the same slices.
    shared = request.exchange, request.tiles, min(facts.budget for facts in by_rank), group
    exchange, tiles = exchange_for([facts.texts for facts in by_rank], request.image, *shared)
    of_images = None
    if request.within in ("image", "both"):
        of_images, _ = exchange_for([facts.images for facts in by_rank], request.image, *shared)
    # What one rank wants, all work out.
    needs_grad = NeedsGrad(
        image=any(facts.image_needs_grad for facts in by_rank),
        text=any(facts.text_needs_grad for facts in by_rank),
        scale=any(facts.scale_needs_grad for facts in by_rank),
    )
    return plan_of(
        request, exchange, tiles, needs_grad, pairing=pairing,
        pairs=sum(facts.images for facts in by_rank),
        statistics=any(facts.statistics for facts in by_rank), image_exchange=of_images,
    )  # fmt: skip


def exchange_for(
    sizes: Sequence[int],
    features_bD: Tensor,
    name: str,
    tiles_of: Callable[[int | None], TileBackend],
    budget: int | None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Exchange, TileBackend]:
    """Return how columns travel, and what multiplies tiles in the workspace that is left.

    Args:
        sizes: Columns on each rank.
        features_bD: Features of this rank.
        name: The exchange.
        tiles_of: Makes the tiles for a workspace in bytes.
        budget: The workspace, the same on all ranks, which must cut the same slices. `None`: that
            of the tiles.
        group: The process group.
    """
    rank = dist.get_rank(group)
    if name == "ring":
        return Ring(sizes, rank, group), tiles_of(budget)
    # `None` has become bytes, from which all ranks cut the same slices.
    budget = tiles_of(budget).budget(features_bD.device)
    count, left = share_workspace(sizes, features_bD.shape[1], features_bD.dtype, budget)
    return Slices(sizes, rank, group, count), tiles_of(left)


def share_workspace(
    sizes: Sequence[int], width: int, dtype: torch.dtype, budget: int
) -> tuple[int, int]:
    """Return how many slices travel, and the bytes of a workspace that they leave for tiles.

    Args:
        sizes: Rows on each rank.
        width: D.
        dtype: Of the features.
        budget: The workspace.
    """
    row_bytes = width * (dtype.itemsize + accumulation_dtype(dtype).itemsize)
    free = _FREE_BATCHES * max(sizes) * width * 4
    count = slice_count(sizes, row_bytes, budget * _MOST_PARTS // _PARTS + free)
    taken = -(-max(0, block_bytes(sizes, row_bytes, count) - free) * _PARTS // budget)
    return count, budget * max(_PARTS - taken, _PARTS - _MOST_PARTS) // _PARTS


def device_problem(request: Request, group: dist.ProcessGroup | None) -> str | None:
    """Return what is wrong with features on a device that the group's backend cannot send from."""
    if request.image.device.type != "cpu" or ranks_of(group) == 1 or not _is_of_gpus(group):
        return None
    return (
        f"Passed features on the CPU to `{request.owner}` of a process group of NCCL, which sends "
        "from CUDA devices only. Move the features to this rank's GPU, or pass "
        "`process_group=torch.distributed.new_group(backend='gloo')`."
    )


@torch.compiler.disable
def refuse(
    problem: str, owner: str, image_features: object, group: dist.ProcessGroup | None
) -> NoReturn:
    """Stop all ranks of a group, this one with what is wrong.

    Raises:
        ValueError: Always.
    """
    # The others are waiting for this rank's numbers: without them, they would hang.
    if ranks_of(group, owner) > 1:
        device = torch.device("cuda" if _is_of_gpus(group) else "cpu")
        if isinstance(image_features, Tensor) and image_features.device.type != "cpu":
            device = image_features.device
        _gather(Facts(), device, group)
    raise ValueError(problem)


def _is_of_gpus(group: dist.ProcessGroup | None) -> bool:
    """Return whether a group of several ranks sends from GPUs alone, as NCCL's do."""
    # Such as "cpu:gloo,cuda:nccl", or "cuda:nccl".
    backends = str(dist.get_backend_config(group))
    return "nccl" in backends and "cpu:" not in backends


def _facts(request: Request, needs_grad: NeedsGrad) -> Facts:
    is_read = request.read_call > 0 and request.scale.device.type != "cpu"
    scale = _bits(request.read_scale if is_read else request.scale)
    return Facts(
        1, len(request.image), len(request.text), request.image.shape[1],
        FLOAT_DTYPES.index(request.image.dtype), _EXCHANGES.index(request.exchange),
        request.tiles(request.workspace_bytes).budget(request.image.device), request.given,
        request.checksum, scale, _bits(request.bias), request.read_call * is_read, *needs_grad,
        request.statistics,
    )  # fmt: skip


def _bits(value: Tensor | float | None) -> int:
    """Return a value that the host has, as an integer; 0 for one that it would have to wait for."""
    if isinstance(value, Tensor):
        value = value.item() if value.device.type == "cpu" else None
    if value is None:
        return 0
    bits: int = struct.unpack("q", struct.pack("d", value))[0]
    return bits


def _refuse_what_differs(by_rank: Sequence[Facts], owner: str) -> None:
    # All ranks have the same numbers, so that each of them raises or none.
    last = len(by_rank) - 1
    unusable = [rank for rank, facts in enumerate(by_rank) if not facts.is_usable]
    if unusable:
        raise ValueError(
            f"Rank {unusable[0]} of {len(by_rank)} passed arguments that "
            f"`{owner}` cannot use; its own error says why. Every rank stops here, so "
            "that none waits for it."
        )
    formats = [(facts.width, FLOAT_DTYPES[facts.dtype]) for facts in by_rank]
    if len(set(formats)) > 1:
        raise ValueError(
            f"Passed features of (width, dtype) {formats} to `{owner}` on ranks 0 to {last}. All "
            "ranks must have the same. Use the same model and precision everywhere."
        )
    for place, name in enumerate(GIVEN):
        having = [rank for rank, facts in enumerate(by_rank) if facts.given >> place & 1]
        if 0 < len(having) < len(by_rank):
            raise ValueError(
                f"Passed `{name}` to `{owner}` on ranks {having} of {len(by_rank)} only. All ranks "
                f"must pass it, or none. Pass `{name}` on every rank."
            )
    if len({facts.checksum for facts in by_rank}) > 1:
        raise ValueError(
            f"Called a loss whose class or {' or '.join(RULES)} differs between ranks, or the "
            "guides' width or dtype, or the prefixes of `MatryoshkaLoss`. On this rank it is "
            f"`{owner}`. All ranks must have the same. Configure every rank alike."
        )
    if len({facts.exchange for facts in by_rank}) > 1:
        raise ValueError(
            f"Passed `{owner}(exchange=...)` of {[_EXCHANGES[facts.exchange] for facts in by_rank]}"
            f" on ranks 0 to {last}. All ranks must have the same. Configure every rank alike."
        )
    for name, values in (
        ("logit_scale", [facts.scale for facts in by_rank]),
        ("logit_bias", [facts.bias for facts in by_rank]),
    ):
        # A copy from the device may have come to one rank before it has come to another.
        is_of_one_call = name != "logit_scale" or len({facts.scale_call for facts in by_rank}) == 1
        if is_of_one_call and len(set(values)) > 1:
            numbers = [struct.unpack("d", struct.pack("q", bits))[0] for bits in values]
            raise ValueError(
                f"Passed `{name}` of {numbers} to `{owner}` on ranks 0 to {last}. All ranks must "
                "have the same value, or each trains another loss. Make it a parameter of the "
                "module that DDP or FSDP wraps, which sends rank 0's to all."
            )


def _gather(facts: Facts, device: torch.device, group: dist.ProcessGroup | None) -> list[Facts]:
    """Return the facts of every rank in the order of ranks; the host waits for the other hosts."""
    readback = AsyncReadback()
    with _beside(device):
        mine = torch.tensor([int(fact) for fact in facts])
        if device.type == "cuda":  # else the copy would wait for what is queued
            mine = mine.pin_memory()
        mine = mine.to(device, non_blocking=True)
        by_rank = mine.new_empty(dist.get_world_size(group) * len(mine))
        all_gather(by_rank, mine, group=group)
        readback.submit(0, by_rank)
    # Waits for one copy, of these numbers, and not for the device.
    (arrived,) = readback.drain()
    return [Facts(*row) for row in arrived.array.reshape(-1, len(facts)).tolist()]


def _beside(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a stream current that nothing else is queued on."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(_stream_of(device))


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    # One a device for good: the allocator keeps the memory of each stream apart.
    return torch.cuda.Stream(device)
