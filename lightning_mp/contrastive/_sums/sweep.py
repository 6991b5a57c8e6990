"""The plan of a call, on which all ranks agree, and the sweep over the columns of all ranks."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive._call.pairing import Pairing, paired
from lightning_mp.contrastive._call.request import Request, group_named, ranks_of
from lightning_mp.contrastive._exchange.exchange import Exchange, Ring, Visit
from lightning_mp.contrastive._sums.agreement import (
    agreed_facts,
    exchange_for,
    refuse_on_all_ranks,
)
from lightning_mp.contrastive._sums.false_negatives import thresholds_of
from lightning_mp.contrastive._tiles.masks import Ids
from lightning_mp.contrastive._tiles.tile_backend import (
    Logits,
    RowsColumns,
    StoredTiles,
    TileBackend,
    Vectors,
)
from lightning_mp.numerics.floats import ACCUMULATION_DTYPES, state_dtype

__all__ = [
    "ColumnBlock",
    "LargestNegatives",
    "NeedsGrad",
    "Plan",
    "SweepResult",
    "agreed_plan",
    "sweep",
]


class NeedsGrad(NamedTuple):
    """Whether any rank needs a gradient for its images, its texts, and the scale."""

    image: bool
    text: bool
    scale: bool


class SweepResult(NamedTuple):
    """A loss and its gradients for a cotangent of 1; gradients that no rank needs are `None`.

    DDP and FSDP average gradients over ranks. For the mean to be the gradient of one process with
    the global batch, gradients of features are W times their own, since those of other ranks are
    zero, and scale and bias have their total on every rank. Gradients of features are in the
    accumulation dtype, because the cotangent contains the loss scale, and fp16 would underflow
    before it is applied; those of scale and bias are in the state dtype.
    """

    loss: Tensor  # equal on all ranks
    statistics_5: Tensor | None = None  # of `LossStatistics`; `None` if no rank requests them
    d_image_bD: Tensor | None = None
    d_text_nD: Tensor | None = None
    d_scale: Tensor | None = None
    d_bias: Tensor | None = None  # `None` for a softmax
    d_negatives_bkD: Tensor | None = None

    def of_inputs(self, plan: "Plan") -> "SweepResult":
        """Return the result in the order of the call's inputs, with a gradient of any bias."""
        result, bias, pairing = self, plan.request.bias, plan.pairing
        if bias is not None and plan.request.is_softmax:
            # A bias shifts all logits alike and has no effect, but its NaN and inf must not vanish.
            loss = self.loss + 0.0 * bias.to(self.loss.dtype).reshape(())
            result = self._replace(loss=loss, d_bias=0.0 * loss)
        if pairing is None:
            return result
        by_image, by_text = pairing.image_order, pairing.text_order
        orders = {"d_image_bD": by_image, "d_text_nD": by_text, "d_negatives_bkD": by_image}
        in_order = {
            name: torch.empty_like(grad).index_copy_(0, order, grad)
            for name, order in orders.items()
            if order is not None and (grad := getattr(result, name)) is not None
        }
        return result._replace(**in_order)


@dataclass(eq=False)
class Plan:
    """The facts that all ranks agreed on before a loss, and values derived from them."""

    request: Request  # of this rank, its rows in the order of their columns
    exchange: Exchange
    tiles: TileBackend
    needs_grad: NeedsGrad
    pairs: int = 0  # B, the images of all ranks; by default those of the request
    pairing: Pairing | None = None  # of `positives`
    statistics: bool = False  # whether any rank requests `LossStatistics`
    image_exchange: Exchange | None = None  # for losses whose columns are images

    def __post_init__(self) -> None:
        request, needs_grad = self.request, self.needs_grad
        self.pairs = self.pairs or len(request.image)
        self.statistics |= request.statistics
        # Text i belongs to image i for i < matched.
        self.matched = len(request.image) if self.pairing is None else self.pairing.matched
        is_masked = request.false_negatives != "keep"
        self.thresholds = thresholds_of(request, self.tiles) if is_masked else None
        # Ids are exchanged, and ranks do not compare the dtypes of theirs.
        ids_n = None if request.ids is None else request.ids.long().contiguous()
        # Pairs with equal ids, on any ranks, are no negatives, or else positives.
        self.ids_n = ids_n if request.duplicates == "mask" else None
        self.grouped_ids_n = None if request.duplicates == "mask" else ids_n
        directions = request.directions
        # Whether the loss has cross entropies of images, and of texts; it is the mean of all.
        self.has_terms = RowsColumns(directions != "text_to_image", directions != "image_to_text")
        self.terms = sum(self.has_terms) * self.pairs
        # The scale's gradient is a sum over that of either tower, so one of them is computed.
        self.computes_grad = RowsColumns(
            needs_grad.image or (needs_grad.scale and not needs_grad.text), needs_grad.text
        )
        self.trains = any(needs_grad)
        self.dtype = ACCUMULATION_DTYPES[request.image.dtype]  # of sums over products
        self.state = state_dtype(request.image.device)  # of sums over the batch
        self.weights_b = None
        if request.weights is not None:
            # A check would wait for the device, so the loss becomes NaN.
            self.weights_b = request.weights.to(self.state)
            self.weights_b = self.weights_b.masked_fill(self.weights_b < 0, torch.nan)

    @functools.cached_property
    def scale(self) -> Tensor:
        """The logit scale in the state dtype, 0-d."""
        return self.request.scale.to(self.state).reshape(())

    @functools.cached_property
    def bias(self) -> Tensor:
        """The logit bias, likewise; 0 without one."""
        bias = self.request.bias
        return self.scale.new_zeros(()) if bias is None else bias.to(self.state).reshape(())

    def memory_for_tiles(self, sweeps: int = 1) -> Tensor:
        """Return memory for tiles that the gradient sweep reuses; may be empty."""
        size, image_bD = 0, self.request.image
        # With thresholds, one reference per tile cannot represent the sums.
        if self.trains and self.request.stores_tiles and self.thresholds is None:
            columns = sweeps * self.exchange.global_batch_size
            size = self.tiles.stored_values(len(image_bD), columns, image_bD.dtype, image_bD.device)
        return image_bD.new_empty(size, dtype=self.dtype)


def agreed_plan(request: Request) -> Plan:
    """Return the plan that all ranks of a group follow; every rank calls this once per loss."""
    image, text, scale, bias, _ = request.needs_grad
    # A bias has no effect on a softmax; in a sigmoid loss its gradient comes with the scale's.
    needs_grad = NeedsGrad(image, text, scale or (bias and not request.is_softmax))
    group, pairing = group_named(request.group), None
    if request.positives is not None:
        problem, request, pairing = paired(request, request.positives)
        if problem is not None:
            refuse_on_all_ranks(problem, request.owner, request.image, group)
    if ranks_of(group, request.owner) == 1:
        tiles = request.tiles(request.workspace_bytes)
        return Plan(request, Ring([len(request.text)]), tiles, needs_grad, pairing=pairing)
    has_others = pairing is not None and len(pairing.others) > 0
    by_rank = agreed_facts(request, needs_grad, group, has_others=has_others)
    # The smallest workspace of all ranks, because all must cut the same slices.
    shared = request.exchange, request.tiles, min(facts.budget for facts in by_rank), group
    exchange, tiles = exchange_for([facts.texts for facts in by_rank], request.image, *shared)
    of_images = None
    if request.within in ("image", "both"):
        of_images, _ = exchange_for([facts.images for facts in by_rank], request.image, *shared)
    # All ranks compute a gradient that any of them needs.
    needs_grad = NeedsGrad(
        image=any(facts.image_needs_grad for facts in by_rank),
        text=any(facts.text_needs_grad for facts in by_rank),
        scale=any(facts.scale_needs_grad for facts in by_rank),
    )
    return Plan(
        request, exchange, tiles, needs_grad, pairing=pairing,
        pairs=sum(facts.images for facts in by_rank),
        statistics=any(facts.statistics for facts in by_rank), image_exchange=of_images,
    )  # fmt: skip


class ColumnBlock(NamedTuple):
    """One block of visiting columns."""

    plan: Plan
    visit: Visit
    text_mD: Tensor
    values: Any  # those of `sweep`
    maxima: Vectors | None
    is_first: bool  # then sums per row are uninitialized, as sums per column always are

    def logits(
        self, image_bD: Tensor, text_mD: Tensor, stored: StoredTiles | None = None
    ) -> Logits:
        """Return the logits of this rank's rows and these columns, or of prefixes of both."""
        plan = self.plan
        # In the order of `travelling` in `sweep`.
        others = self.visit.columns[1:]
        ids = None if plan.ids_n is None else Ids(plan.ids_n[: len(image_bD)], others.pop(0))
        thresholds = None if plan.thresholds is None else plan.thresholds.at(others)
        # Texts without an image have no row.
        own, matched = self.visit.positive_rows, plan.matched
        rows = slice(min(own.start, matched), min(own.stop, matched))
        # Per-column sums are sent after each visit, so every visit has new ones.
        fresh = RowsColumns(self.is_first, True)
        return Logits(
            image_bD, text_mD, plan.request.scale, self.visit.diagonal, rows, ids, thresholds,
            stored, fresh, maxima=self.maxima,
        )  # fmt: skip


class LargestNegatives:
    """The largest logits of the negatives of rows and columns, which a sweep measures."""

    def __init__(self, plan: Plan) -> None:
        image_bD = plan.request.image
        self.rows_b = image_bD.new_full((len(image_bD),), -torch.inf, dtype=plan.state)
        self.columns = plan.exchange.home("max")

    def home(self) -> Vectors:
        return Vectors(self.rows_b, self.columns.result())


def sweep(
    plan: Plan, values: Tensor | None = None, largest: LargestNegatives | None = None
) -> Iterator[ColumnBlock]:
    """Yield the columns of all ranks, block by block, with `values` of these columns if given."""
    travelling = [plan.request.text]
    if plan.ids_n is not None:
        travelling.append(plan.ids_n)
    if plan.thresholds is not None:
        travelling += plan.thresholds.travelling
    for index, visit in enumerate(plan.exchange.visit(travelling, values)):
        text_mD, maxima = visit.columns[0], None
        if largest is not None:
            lowest_m = largest.rows_b.new_full((len(text_mD),), -torch.inf)
            maxima = Vectors(largest.rows_b, lowest_m)
        of_block = None if values is None else visit.columns[-1]
        yield ColumnBlock(plan, visit, text_mD, of_block, maxima, index == 0)
        if largest is not None and maxima is not None:
            largest.columns.add(maxima.columns_m)
