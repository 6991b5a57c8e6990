"""The sweep of all losses: the columns of all ranks visit, and visitors add up what they want.

Shapes:
    B: global batch. b: this rank's images. n: its texts, of which the first b belong to its images.
    m: columns that are visiting. D: feature width. W: ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_mp.contrastive._call.pairing import Pairing
from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._exchange.exchange import Combine, Exchange, Visit
from lightning_mp.contrastive._sums.false_negatives import thresholds_of
from lightning_mp.contrastive._tiles.exclusions import Ids, Thresholds
from lightning_mp.contrastive._tiles.tile_backend import (
    Logits,
    RowsColumns,
    StoredTiles,
    TileBackend,
)
from lightning_mp.numerics.floats import ACCUMULATION_DTYPES, state_dtype

__all__ = ["Block", "SweepResult", "NeedsGrad", "OneRank", "Plan", "Visitor", "plan_of", "sweep"]


class NeedsGrad(NamedTuple):
    """Whether any rank needs gradients for its images, for its texts, and for the scale."""

    image: bool
    text: bool
    scale: bool


class SweepResult(NamedTuple):
    """A loss, and its gradients of a cotangent of 1; `None` is what no rank needs.

    Gradients are those that a *mean* over ranks, as DDP and FSDP take it, turns into the gradients
    of one process with the whole batch: features get W times their own, because the other ranks'
    gradients for them are zero; scale and bias get their total on every rank.

    Args:
        loss: The same on all ranks.
        d_image_bD: In the accumulation dtype, like all of features: fp16 would flush what a loss
            scale is to save, and that comes with the cotangent only.
        d_text_nD: Of the texts.
        d_negatives_bkD: Of what each image alone sees.
        d_scale: In the state dtype, like the next.
        d_bias: `None` also for a softmax, which does not see a bias.
        statistics_5: The values of `LossStatistics`; `None` where no rank wants them.
    """

    loss: Tensor
    d_image_bD: Tensor | None = None
    d_text_nD: Tensor | None = None
    d_negatives_bkD: Tensor | None = None
    d_scale: Tensor | None = None
    d_bias: Tensor | None = None
    statistics_5: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """What all ranks have agreed on before a loss is computed, and what follows from that.

    Args:
        request: What this rank's call says, rows in the order of their columns.
        exchange: How the ranks share their columns.
        tiles: What multiplies tiles.
        needs_grad: Which gradients any rank needs.
        pairs: B; other texts may be beside.
        matched: How many of this rank's images have a text of their own, the first ones: text i is
            that of image i.
        pairing: What was made of `positives`.
        statistics: Whether any rank wants to know `LossStatistics`.
        limits: Of this rank's images and texts, what they take for false negatives; `None` for
            nothing.
        ids_n: What this rank's texts show, int64: pairs of equal ids, on whatever ranks, are no
            negatives of each other. `None` on all ranks or on none.
        has_terms: Whether the cross entropies of images count, and those of texts.
        terms: Cross entropies that the loss is the mean of.
        computes_grad: Whether the gradients of images and of texts are computed. The scale's is a
            sum over either: with no features to train it still needs one of them.
        trains: Whether a backward can follow.
        dtype: Of sums over products.
        state: Of sums over the batch.
        image_exchange: How the ranks share their images where these are columns, too.
    """

    request: Request
    exchange: Exchange
    tiles: TileBackend
    needs_grad: NeedsGrad
    pairs: int
    matched: int
    pairing: Pairing | None
    statistics: bool
    thresholds: Thresholds | None
    ids_n: Tensor | None
    has_terms: RowsColumns
    terms: int
    computes_grad: RowsColumns
    trains: bool
    dtype: torch.dtype
    state: torch.dtype
    image_exchange: Exchange

    def memory_for_tiles(self, sweeps: int = 1) -> Tensor:
        """Return memory for what gradients of some sweeps need not work out again; may be empty."""
        size, image_bD = 0, self.request.image
        # Thresholds leave out more than one reference of a tile can tell.
        if self.trains and self.request.stores_tiles and self.thresholds is None:
            columns = sweeps * self.exchange.global_batch_size
            size = self.tiles.stored_values(len(image_bD), columns, image_bD.dtype, image_bD.device)
        return image_bD.new_empty(size, dtype=self.dtype)


def plan_of(
    request: Request,
    exchange: Exchange,
    tiles: TileBackend,
    needs_grad: NeedsGrad,
    *,
    pairs: int | None = None,
    pairing: Pairing | None = None,
    statistics: bool | None = None,
    image_exchange: Exchange | None = None,
) -> Plan:
    """Return the plan of a request: see `Plan`; `pairs` and `statistics` as on one rank."""
    b, directions = len(request.image), request.directions
    has_terms = RowsColumns(directions != "text_to_image", directions != "image_to_text")
    pairs = b if pairs is None else pairs
    thresholds = None if request.false_negatives == "keep" else thresholds_of(request, tiles)
    return Plan(
        request, exchange, tiles, needs_grad, pairs,
        matched=b if pairing is None else pairing.matched, pairing=pairing, thresholds=thresholds,
        statistics=request.statistics if statistics is None else statistics,
        ids_n=None if request.ids is None else request.masked_ids,
        has_terms=has_terms, terms=sum(has_terms) * pairs,
        computes_grad=RowsColumns(
            needs_grad.image or (needs_grad.scale and not needs_grad.text), needs_grad.text
        ), trains=any(needs_grad),
        dtype=ACCUMULATION_DTYPES[request.image.dtype], state=state_dtype(request.image.device),
        image_exchange=image_exchange or OneRank(b),
    )  # fmt: skip


class Block(NamedTuple):
    """The columns that are visiting.

    Args:
        plan: What all ranks have agreed on.
        visit: Whose columns they are.
        text_mD: Their features.
        values: What the sweep was given to travel with them, if anything.
        is_first: Whether sums about rows hold nothing yet; those about columns never do.
    """

    plan: Plan
    visit: Visit
    text_mD: Tensor
    values: Any
    is_first: bool

    def logits(
        self, image_bD: Tensor, text_mD: Tensor, stored: StoredTiles | None = None
    ) -> Logits:
        """Return this rank's rows against these columns, with what is left out.

        Args:
            image_bD: The rows, or a part of their width.
            text_mD: The columns, likewise.
            stored: Memory for tiles.
        """
        plan = self.plan
        # They come in the order of `sweep`.
        others = self.visit.columns[1:]
        ids = None if plan.ids_n is None else Ids(plan.ids_n[: len(image_bD)], others.pop(0))
        thresholds = None if plan.thresholds is None else plan.thresholds.at(others)
        # Texts beyond the images' own have no row.
        own, matched = self.visit.positive_rows, plan.matched
        rows = slice(min(own.start, matched), min(own.stop, matched))
        # Sums about columns go home after each visit, so that each starts with new ones.
        fresh = RowsColumns(self.is_first, True)
        return Logits(
            image_bD, text_mD, plan.request.scale, self.visit.diagonal, rows, ids, thresholds,
            stored, fresh,
        )  # fmt: skip


class Visitor(Protocol):
    """What a loss does with every block of a sweep, and what it has found in the end."""

    def block(self, block: Block) -> None:
        """Add what these columns add."""
        ...

    def home(self) -> Any:
        """Return what was found about this rank's rows and columns; called once, on all ranks."""
        ...


def sweep(plan: Plan, visitors: Sequence[Visitor], values: Tensor | None = None) -> list[Any]:
    """Show the columns of all ranks to visitors, and return what they bring home.

    Args:
        plan: What all ranks have agreed on.
        visitors: In this order, the same on all ranks.
        values: Of this rank's columns, which other ranks see beside them.
    """
    travelling = [plan.request.text]
    if plan.ids_n is not None:
        travelling.append(plan.ids_n)
    if plan.thresholds is not None:
        travelling += plan.thresholds.travelling
    for index, visit in enumerate(plan.exchange.visit(travelling, values)):
        _show(plan, visitors, visit, values is not None, index == 0)
    return [visitor.home() for visitor in visitors]


# A function, so that what a block takes is free before the next one arrives.
def _show(
    plan: Plan, visitors: Sequence[Visitor], visit: Visit, has_values: bool, is_first: bool
) -> None:
    values = visit.columns[-1] if has_values else None
    block = Block(plan, visit, visit.columns[0], values, is_first)
    for visitor in visitors:
        visitor.block(block)


class OneRank:
    """The `Exchange` of a process alone, which has nobody to tell or to wait for.

    Args:
        columns: Its texts.
    """

    rank = 0
    world_size = 1

    def __init__(self, columns: int) -> None:
        self.global_batch_size = columns

    def visit(self, shard: Sequence[Tensor], values: Tensor | None = None) -> Iterator[Visit]:
        """Yield the columns of this rank, see `Exchange.visit`."""
        columns = [tensor.contiguous() for tensor in shard]
        yield Visit(columns if values is None else [*columns, values], 0, slice(0, len(shard[0])))

    def home(self, combine: Combine) -> "_Part":
        """Return an empty sum, see `Exchange.home`."""
        return _Part()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the tensor, which is the sum."""
        return tensor


class _Part:
    """The one part of a sum."""

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return memory for the part, see `Home.empty`."""
        # `empty_like` keeps strides, and `finish` in Triton takes the gradient for contiguous.
        return like.new_empty(like.shape, dtype=dtype)

    def add(self, part: Tensor) -> None:
        """Keep the part."""
        self._part = part

    def result(self) -> Tensor:
        """Return the part."""
        return self._part

    def parts(self) -> Tensor:
        """Return the part as the only one."""
        return self._part[None]
