"""Agreement of ranks before a loss: one collective exchanges a few numbers of each rank.

The host of every rank needs the batch sizes of all ranks to size its buffers. A rank cannot know
whether another rank's batch has changed, and collectives of different sizes would hang in NCCL.
Therefore every call of a loss exchanges them, by one small collective. It does not wait for the
device: on CUDA it runs on a stream of its own, so the host waits for the other hosts and the
network (tens of microseconds) while the device continues with the towers, and, like any collective,
for earlier ones of the same group. Since all ranks see the arguments of all, invalid or different
arguments raise an error on all ranks.
"""

import contextlib
import functools
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.contrastive._call.checks import STATISTICS_PROBLEM
from lightning_mp.contrastive._call.request import GIVEN, RULES, Request, ranks_of
from lightning_mp.contrastive._exchange.exchange import Exchange, Ring
from lightning_mp.contrastive._exchange.slices import Slices, all_gather, block_bytes, slice_count
from lightning_mp.contrastive._tiles.literals import ExchangeName
from lightning_mp.contrastive._tiles.tile_backend import TileBackend
from lightning_mp.numerics.async_readback import AsyncReadback, send
from lightning_mp.numerics.floats import FLOAT_DTYPES, accumulation_dtype

__all__ = [
    "Facts",
    "agreed_facts",
    "device_problem",
    "exchange_for",
    "refuse_on_all_ranks",
    "share_workspace",
]

_EXCHANGES: tuple[str, ...] = get_args(ExchangeName)
# Slices may take up to five eighths of the workspace, tiles have the rest. In steps of an eighth,
# because equal workspaces share one `TritonTiles` and the shapes that it has timed.
_PARTS, _MOST_PARTS = 8, 5
# Beside the workspace, slices may take four times the largest batch in fp32. The loss promises
# eight: gradients take two, and two more while they are concatenated and rounded. A rank with fewer
# rows takes the slices of the largest batch, so that a short last batch costs no more collectives.
_FREE_BATCHES = 4


class Facts(NamedTuple):
    """The facts about its call that a rank sends to the others, all of them integers."""

    is_usable: int = 0  # 0 if the rank raises its own error; the others are then meaningless
    images: int = 0
    texts: int = 0
    width: int = 0  # of the features
    dtype: int = 0  # index in `FLOAT_DTYPES`
    exchange: int = 0  # index in `ExchangeName`
    budget: int = 0  # workspace in bytes
    given: int = 0  # see `Request.given`
    checksum: int = 0  # see `Request.checksum`
    # Bits of the value if the host has it, otherwise 0. Of a scale on a CUDA device, bits of the
    # value that the host has read last, and the call of the loss that got it.
    scale: int = 0
    bias: int = 0
    scale_call: int = 0  # 0 for the current call
    image_needs_grad: int = 0
    text_needs_grad: int = 0
    scale_needs_grad: int = 0
    statistics: int = 0  # whether the call returns statistics
    has_others: int = 0  # whether an image or text has several positives: without statistics


def agreed_facts(
    request: Request,
    needs_grad: tuple[bool, bool, bool],
    group: dist.ProcessGroup | None,
    *,
    has_others: bool,
) -> list[Facts]:
    """Return the facts of all ranks; raise an error on all of them if these contradict."""
    facts = _own_facts(request, needs_grad)._replace(has_others=has_others)
    by_rank = _gather(facts, request.image.device, group)
    _refuse_what_differs(by_rank, request.owner)
    return by_rank


def exchange_for(
    sizes: Sequence[int],
    features_bD: Tensor,
    name: str,
    tiles_of: Callable[[int | None], TileBackend],
    budget: int | None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Exchange, TileBackend]:
    """Return the exchange, and the tile backend for the remaining workspace.

    `sizes` are the columns of each rank. `tiles_of` returns the tile backend for a workspace in
    bytes. `budget` is the workspace, equal on all ranks; `None` takes the backend's default.
    """
    rank = dist.get_rank(group)
    if name == "ring":
        return Ring(sizes, rank, group), tiles_of(budget)
    budget = tiles_of(budget).budget(features_bD.device)
    count, left = share_workspace(sizes, features_bD.shape[1], features_bD.dtype, budget)
    return Slices(sizes, rank, group, count), tiles_of(left)


def share_workspace(
    sizes: Sequence[int], width: int, dtype: torch.dtype, budget: int
) -> tuple[int, int]:
    """Return the number of slices, and the bytes of the workspace that they leave for tiles."""
    row_bytes = width * (dtype.itemsize + accumulation_dtype(dtype).itemsize)
    free = _FREE_BATCHES * max(sizes) * width * 4
    count = slice_count(sizes, row_bytes, budget * _MOST_PARTS // _PARTS + free)
    taken = -(-max(0, block_bytes(sizes, row_bytes, count) - free) * _PARTS // budget)
    return count, budget * max(_PARTS - taken, _PARTS - _MOST_PARTS) // _PARTS


def device_problem(request: Request, group: dist.ProcessGroup | None) -> str | None:
    """Return an error if the backend of the group cannot send from the device of the features."""
    if request.image.device.type != "cpu" or ranks_of(group) == 1 or not _is_of_gpus(group):
        return None
    return (
        f"Passed features on the CPU to `{request.owner}` with an NCCL process group, which sends "
        "from CUDA devices only. Move the features to this rank's GPU, or pass "
        "`process_group=torch.distributed.new_group(backend='gloo')`."
    )


@torch.compiler.disable
def refuse_on_all_ranks(
    problem: str, owner: str, image_features: object, group: dist.ProcessGroup | None
) -> NoReturn:
    """Raise an error on all ranks of a group, on this rank with `problem` as its message."""
    # The other ranks wait for the facts of this rank, and would hang without them.
    if ranks_of(group, owner) > 1:
        device = torch.device("cuda" if _is_of_gpus(group) else "cpu")
        if isinstance(image_features, Tensor) and image_features.device.type != "cpu":
            device = image_features.device
        _gather(Facts(), device, group)
    raise ValueError(problem)


def _is_of_gpus(group: dist.ProcessGroup | None) -> bool:
    """Return whether a group of several ranks sends from GPUs only, as NCCL does."""
    # The configuration is a string such as "cpu:gloo,cuda:nccl" or "cuda:nccl".
    backends = str(dist.get_backend_config(group))
    return "nccl" in backends and "cpu:" not in backends


def _own_facts(request: Request, needs_grad: tuple[bool, bool, bool]) -> Facts:
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
    """Return the bits of a value as an integer; 0 if the host would have to wait for the value."""
    if isinstance(value, Tensor):
        value = value.item() if value.device.type == "cpu" else None
    if value is None:
        return 0
    bits: int = struct.unpack("q", struct.pack("d", value))[0]
    return bits


def _refuse_what_differs(by_rank: Sequence[Facts], owner: str) -> None:
    # All ranks have the same facts, so either all of them raise or none does.
    last = len(by_rank) - 1
    unusable = [rank for rank, facts in enumerate(by_rank) if not facts.is_usable]
    if unusable:
        raise ValueError(
            f"Rank {unusable[0]} of {len(by_rank)} passed arguments that `{owner}` cannot use; the "
            "error on that rank says why. All ranks stop, so that none waits for it."
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
            f"Called a loss whose class or {' or '.join(RULES)} differs between ranks, or whose "
            "guides differ in width or dtype, or whose `MatryoshkaLoss` has other prefixes. On "
            f"this rank it is `{owner}`. All ranks must have the same. Configure all ranks alike."
        )
    if len({facts.exchange for facts in by_rank}) > 1:
        raise ValueError(
            f"Passed `{owner}(exchange=...)` of {[_EXCHANGES[facts.exchange] for facts in by_rank]}"
            f" on ranks 0 to {last}. All ranks must have the same. Configure all ranks alike."
        )
    if any(facts.statistics for facts in by_rank) and any(facts.has_others for facts in by_rank):
        raise ValueError(STATISTICS_PROBLEM)
    for name, values in (
        ("logit_scale", [facts.scale for facts in by_rank]),
        ("logit_bias", [facts.bias for facts in by_rank]),
    ):
        # The copy from the device may have arrived on one rank and not yet on another.
        is_of_one_call = name != "logit_scale" or len({facts.scale_call for facts in by_rank}) == 1
        if is_of_one_call and len(set(values)) > 1:
            numbers = [struct.unpack("d", struct.pack("q", bits))[0] for bits in values]
            raise ValueError(
                f"Passed `{name}` of {numbers} to `{owner}` on ranks 0 to {last}. All ranks must "
                "have the same value. Make it a parameter of the module that DDP or FSDP wraps, "
                "which broadcasts rank 0's value."
            )


def _gather(facts: Facts, device: torch.device, group: dist.ProcessGroup | None) -> list[Facts]:
    """Return the facts of all ranks in their order; the host waits for the other hosts."""
    readback = AsyncReadback()
    is_cuda = device.type == "cuda"
    with torch.cuda.stream(_stream_of(device)) if is_cuda else contextlib.nullcontext():
        mine = send(torch.tensor([int(fact) for fact in facts], device="cpu"), device)
        by_rank = mine.new_empty(dist.get_world_size(group) * len(mine))
        all_gather(by_rank, mine, group=group)
        readback.submit(0, by_rank)
    # Waits for the copy of these numbers only, not for the device.
    (arrived,) = readback.drain()
    return [Facts(*row) for row in arrived.array.reshape(-1, len(facts)).tolist()]


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    # One stream per device, because the allocator has separate memory for each stream.
    return torch.cuda.Stream(device)
