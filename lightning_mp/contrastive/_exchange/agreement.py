"""What the ranks of a group tell each other before a loss: one collective of twelve numbers a rank.

Every rank needs the batch sizes of all others on its host before it can size a buffer, and no rank
can know that another one's have changed: whatever it assumed, the collectives of the two would not
fit, and NCCL would hang. So every loss reads them. What that costs is one small collective, and not
a wait for the device: on CUDA it runs on a stream of its own, behind no kernel that the towers have
queued, so that the host waits for the other hosts and the network (tens of microseconds) while the
device works on; and, as any collective, for those of the same group that were queued before it.
Arguments that do not fit, of any rank, are seen by all of them and raise on all.

Shapes:
    b: this rank's batch. D: feature width. W: ranks.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NoReturn, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.contrastive._call.pair_options import RULES, PairOptions
from lightning_mp.contrastive._exchange.ring import Ring
from lightning_mp.contrastive._exchange.slices import Slices, all_gather, block_bytes, slice_count
from lightning_mp.contrastive._sums.false_negatives import limits_of
from lightning_mp.contrastive._sums.plan import Plan
from lightning_mp.contrastive._tiles.backends import ExchangeName, TileChoice
from lightning_mp.contrastive._tiles.tile_backend import TileBackend
from lightning_mp.numerics.async_readback import AsyncReadback
from lightning_mp.numerics.floats import FLOAT_DTYPES, accumulation_dtype

__all__ = ["group_size", "make_plan", "plan_for", "refuse", "share_workspace"]

_NAMES: tuple[str, ...] = get_args(ExchangeName)

_UNUSABLE = -1  # what a rank reports in place of a batch size when its arguments are bad
_FACTS = 12
# Slices may take five eighths of the workspace, the tiles have the rest. Eighths, because Triton's
# tiles remember by their workspace which shapes were the fastest.
_PARTS, _MOST_PARTS = 8, 5
# And beside it four times what the smallest batch takes in fp32: of the eight that are promised,
# gradients take two, two more while they are put together and rounded.
_FREE_BATCHES = 4


def plan_for(
    image_bD: Tensor,
    text_nD: Tensor,
    needs_grad: Sequence[bool],
    pairs: PairOptions,
    tiles: TileChoice,
    exchange: ExchangeName,
    group: dist.ProcessGroup | None,
) -> Plan:
    """Return the plan that all ranks of a group follow; each calls this once a loss.

    Args:
        image_bD: Image features.
        text_nD: Text features.
        needs_grad: Whether images, texts, and scale or bias need gradients.
        pairs: What the call says of its pairs.
        tiles: What multiplies tiles.
        exchange: How columns travel.
        group: Whose ranks share the batch; `None` is the default group.

    Raises:
        ValueError: Arguments of some ranks do not fit; on all ranks.
    """

    def tiles_of(workspace_bytes: int | None) -> TileBackend:
        chosen = tiles._replace(workspace_bytes=workspace_bytes)
        return chosen.tiles(image_bD.device, image_bD.dtype)

    # Texts may be more than images, which are what is counted as pairs.
    backend, b = tiles_of(tiles.workspace_bytes), len(image_bD)
    if group_size(group) == 1:
        # A ring of one has nobody to tell or to wait for.
        plan = Plan(
            Ring([len(text_nD)]), backend, *needs_grad, pairs=b, statistics=pairs.statistics
        )
    else:
        budget, dtype = backend.budget(image_bD.device), FLOAT_DTYPES.index(image_bD.dtype)
        # What one rank alone passes would leave the others waiting for what travels with it.
        given = sum(is_given << place for place, is_given in enumerate(pairs.given().values()))
        # In this order: `_refuse_what_differs` knows them by their places.
        facts = [*image_bD.shape, dtype, _NAMES.index(exchange), budget, given, len(text_nD)]
        facts += [pairs.rules_checksum, *needs_grad, pairs.statistics]
        by_rank = _gather(facts, image_bD.device, group)
        _refuse_what_differs(by_rank)
        rows, _, _, _, budgets, _, sizes, _, *by_need = zip(*by_rank, strict=True)
        # What one rank wants, all work out.
        *any_needs, statistics = [any(need) for need in by_need]
        # The least workspace of all, for all have to cut the same slices.
        plan = make_plan(sizes, image_bD, exchange, any_needs, tiles_of, min(budgets), group)
        plan = dataclasses.replace(plan, pairs=sum(rows), statistics=statistics)
    return dataclasses.replace(
        plan, ids_b=pairs.masked_ids, directions=pairs.directions, matched=pairs.matched,
        limits=limits_of(pairs, image_bD, text_nD, plan.tiles), keeps_tiles=tiles.keeps_tiles,
    )  # fmt: skip


def make_plan(
    sizes: Sequence[int],
    image_bD: Tensor,
    exchange: str,
    needs_grad: Sequence[bool],
    tiles_of: Callable[[int | None], TileBackend],
    budget: int | None,
    group: dist.ProcessGroup | None = None,
) -> Plan:
    """Return the plan for batch sizes that all ranks know.

    Args:
        sizes: Rows on each rank.
        image_bD: Image features.
        exchange: How columns travel.
        needs_grad: Whether any rank needs gradients for images, texts and scale.
        tiles_of: Makes the tiles for a workspace in bytes.
        budget: The workspace, the same on all ranks, which must cut the same slices. `None`: that
            of the tiles.
        group: The process group.
    """
    rank = dist.get_rank(group)
    if exchange == "ring":
        return Plan(Ring(sizes, rank, group), tiles_of(budget), *needs_grad)
    # `None` has become bytes, from which all ranks cut the same slices.
    budget = tiles_of(budget).budget(image_bD.device)
    count, left = share_workspace(sizes, image_bD.shape[1], image_bD.dtype, budget)
    return Plan(Slices(sizes, rank, group, count), tiles_of(left), *needs_grad)


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
    free = _FREE_BATCHES * min(sizes) * width * 4
    count = slice_count(sizes, row_bytes, budget * _MOST_PARTS // _PARTS + free)
    taken = -(-max(0, block_bytes(sizes, row_bytes, count) - free) * _PARTS // budget)
    return count, budget * max(_PARTS - taken, _PARTS - _MOST_PARTS) // _PARTS


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return how many ranks share the batch; 1 without `torch.distributed`.

    Raises:
        ValueError: This rank is not a member.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    size = dist.get_world_size(group)
    # torch says -1 to a rank that is no member.
    if size < 1:
        raise ValueError(
            "This rank is not a member of the `process_group` passed to `ContrastiveLoss`. "
            "Pass the group that this rank belongs to."
        )
    return size


@torch.compiler.disable
def refuse(problem: str, image_features: object, group: dist.ProcessGroup | None) -> NoReturn:
    """Stop all ranks of a group, this one with what is wrong.

    Raises:
        ValueError: Always.
    """
    # The others are waiting for this rank's numbers: without them, they would hang.
    if group_size(group) > 1:
        if isinstance(image_features, Tensor):
            device = image_features.device
        else:
            # NCCL takes memory of GPUs only.
            device = torch.device("cuda" if "nccl" in str(dist.get_backend(group)) else "cpu")
        _gather([_UNUSABLE] * _FACTS, device, group)
    raise ValueError(problem)


def _refuse_what_differs(by_rank: Sequence[Sequence[int]]) -> None:
    # All ranks have the same numbers, so that each of them raises or none.
    world_size = len(by_rank)
    sizes, widths, dtypes = list(zip(*by_rank, strict=True))[:3]
    # First: all numbers of such a rank are -1, which would read as a width and a dtype.
    if _UNUSABLE in sizes:
        raise ValueError(
            f"Rank {sizes.index(_UNUSABLE)} of {world_size} passed arguments that "
            "`ContrastiveLoss` cannot use; its own error says why. Every rank stops here, so "
            "that none waits for it."
        )
    if len(set(widths)) > 1 or len(set(dtypes)) > 1:
        formats = [
            (width, FLOAT_DTYPES[dtype]) for width, dtype in zip(widths, dtypes, strict=True)
        ]
        raise ValueError(
            f"Passed features of (width, dtype) {formats} on ranks 0 to {world_size - 1}. All "
            "ranks must have the same. Use the same model and precision everywhere."
        )
    for place, name in enumerate(PairOptions().given()):
        having = [rank for rank, facts in enumerate(by_rank) if facts[5] >> place & 1]
        if 0 < len(having) < world_size:
            raise ValueError(
                f"Passed `{name}` on ranks {having} of {world_size} only. All ranks must pass it, "
                f"or none. Pass `{name}` on every rank."
            )
    if len({facts[7] for facts in by_rank}) > 1:
        raise ValueError(
            f"Called a loss whose class or {' or '.join(RULES)} differs between ranks, or "
            "the guides' width or dtype, or the prefixes of `MatryoshkaLoss`. All ranks must have "
            "the same. Configure every rank alike."
        )
    exchanges = [_NAMES[facts[3]] for facts in by_rank]
    if len(set(exchanges)) > 1:
        raise ValueError(
            f"Passed `ContrastiveLoss(exchange=...)` of {exchanges} on ranks 0 to "
            f"{world_size - 1}. All ranks must have the same. Configure every rank alike."
        )


def _gather(
    facts: Sequence[int], device: torch.device, group: dist.ProcessGroup | None
) -> list[list[int]]:
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
    rows: list[list[int]] = arrived.array.reshape(-1, len(facts)).tolist()
    return rows


def _beside(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a stream current that nothing else is queued on."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(_stream_of(device))


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    # One a device for good: the allocator keeps the memory of each stream apart.
    return torch.cuda.Stream(device)
