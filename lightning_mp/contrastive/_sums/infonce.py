"""The symmetric contrastive loss as two sweeps over all ranks, with its gradients in closed form.

Shapes:
    B: global batch. b: this rank's batch. n: its texts, of which the first b belong to its images.
    m: columns that are visiting. D: feature width. W: ranks. R: parts, one or one of each rank.

With `S = scale * image @ text.T`, the positive `pos_i = S_ii` and the log-sum-exp of the negatives
`neg_i` of a row or a column (the diagonal left out), each of the `2 B` cross entropies is

    -log softmax_i = log(exp(pos_i) + exp(neg_i)) - pos_i = softplus(neg_i - pos_i),

and its gradient with respect to `pos_i` is `-sigmoid(neg_i - pos_i)`. Nothing cancels there: a
converged pair, whose loss is 1e-12, keeps its digits, where `lse_i - pos_i` would return the
rounding of `lse_i`. With `lse` over positives and negatives,

    dL/dS_ij = (exp(S_ij - row_lse_i) + exp(S_ij - column_lse_j)) / 2B                  for i != j
    dL/dS_ii = -(sigmoid(row_neg_i - pos_i) + sigmoid(column_neg_i - pos_i)) / 2B

and `dL/dimage = scale dL/dS text`, `dL/dtext = scale dL/dS.T image`,
`dL/dscale = sum_i <image_i, (dL/dS text)_i>`. A bias moves all logits alike, and softmax does not
see it: its gradient is exactly 0, and adding it would only cost digits.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive._exchange.exchange import Exchange, Visit
from lightning_mp.contrastive._tiles.backends import Directions
from lightning_mp.contrastive._tiles.tile_backend import (
    Ids,
    Kept,
    Limits,
    Logits,
    Maxima,
    Prepared,
    TileBackend,
)
from lightning_mp.contrastive.statistics import MaximaSweep, measure, softmax_probabilities
from lightning_mp.numerics.first_derivatives import first_derivatives_only
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = [
    "NO_SECOND_DERIVATIVE",
    "InfoNCE",
    "Negatives",
    "Plan",
    "Swept",
    "differentiate",
    "finish_gradients",
    "memory_for_tiles",
    "negatives_gradients",
    "negatives_sweep",
    "not_differentiable",
    "sweep",
]

NO_SECOND_DERIVATIVE = (
    "Called a second derivative through `ContrastiveLoss`, which has a first one only. Write a "
    "gradient penalty on something else, or use a dense loss for it."
)


@dataclass(frozen=True)
class Plan:
    """What all ranks have agreed on before a loss is computed.

    Args:
        exchange: How the ranks share their columns.
        tiles: The tile backend.
        image_needs_grad: Whether any rank needs gradients for its images.
        text_needs_grad: Whether any rank needs gradients for its texts.
        scale_needs_grad: Whether any rank needs the gradient for the scale.
        ids_b: What this rank's pairs show, int64: pairs of equal ids, on whatever ranks, are no
            negatives of each other. `None` on all ranks or on none.
        pairs: B; `None` where no text is without an image.
        directions: Which cross entropies count.
        matched: How many of this rank's images have a text of their own, the first ones: text i is
            that of image i. `None`: all.
        statistics: Whether any rank wants to know `LossStatistics`.
        limits: Of this rank's images and texts, what they take for false negatives; `None` for
            nothing.
    """

    exchange: Exchange
    tiles: TileBackend
    image_needs_grad: bool
    text_needs_grad: bool
    scale_needs_grad: bool
    ids_b: Tensor | None = field(default=None, kw_only=True)
    pairs: int | None = field(default=None, kw_only=True)
    directions: Directions = field(default="both", kw_only=True)
    matched: int | None = field(default=None, kw_only=True)
    statistics: bool = field(default=False, kw_only=True)
    limits: Limits | None = field(default=None, kw_only=True)

    @property
    def global_pairs(self) -> int:
        """B: pairs on all ranks, which may have texts without an image beside."""
        return self.exchange.global_batch_size if self.pairs is None else self.pairs

    @property
    def wanted(self) -> tuple[bool, bool]:
        """Whether the cross entropies of images count, and those of texts."""
        return self.directions != "text_to_image", self.directions != "image_to_text"

    @property
    def travelling(self) -> list[Tensor]:
        """What travels with the texts, to tell which pairs are left out."""
        ids = [] if self.ids_b is None else [self.ids_b]
        return ids if self.limits is None else [*ids, *self.limits.travelling]

    def logits(
        self,
        visit: Visit,
        image_bD: Tensor,
        text_mD: Tensor,
        scale: Tensor,
        kept: Kept | None = None,
        *,
        is_first: bool = False,
    ) -> Logits:
        """Return this rank's rows against visiting columns, with what is left out.

        Args:
            visit: Of the texts, and of what travels with them.
            image_bD: The rows.
            text_mD: The columns.
            scale: One value.
            kept: Memory for tiles.
            is_first: Whether sums about the rows hold nothing yet; those about columns never do.
        """
        others = visit.columns[1:]
        ids = None if self.ids_b is None else Ids(self.ids_b[: len(image_bD)], others.pop(0))
        limits = None if self.limits is None else self.limits.at(others)
        # Texts beyond the images' own have no row.
        own, matched = visit.positive_rows, len(image_bD) if self.matched is None else self.matched
        rows = slice(min(own.start, matched), min(own.stop, matched))
        fresh = (is_first, True)
        return Logits(image_bD, text_mD, scale, visit.diagonal, rows, ids, limits, kept, fresh)

    @property
    def trains(self) -> bool:
        """Whether a backward can follow."""
        return self.image_needs_grad or self.text_needs_grad or self.scale_needs_grad

    @property
    def terms(self) -> int:
        """Cross entropies that the loss is the mean of."""
        return sum(self.wanted) * self.global_pairs


class Swept(NamedTuple):
    """What the forward sweep leaves for the backward.

    Args:
        loss: In the accumulation dtype of the features.
        row_lse_b: Log-sum-exps of this rank's rows, positives included.
        column_lse: Those of its texts, as `Exchange.publish` returned them.
        weight_b: What the positives' cotangents are, times `-2B`.
        kept: Tiles for the backward, see `tile_backend.Kept`; may be empty.
        block_mD: The texts of all ranks, where they came at once and the backward will need them.
        statistics_5: The values of `LossStatistics`; `None` where no rank wants them.
    """

    loss: Tensor
    row_lse_b: Tensor
    column_lse: Tensor
    weight_b: Tensor
    kept: Tensor
    block_mD: Tensor | None = None
    statistics_5: Tensor | None = None


class Negatives(NamedTuple):
    """What the first sweep finds out about the negatives of this rank's rows and columns.

    Args:
        row_lse_b: Log-sum-exps of the rows.
        column_lse_Rn: Parts of those of the columns, see `Home.parts`.
        block_mD: As in `Swept`.
        maxima: Their largest logits, if a rank wants them.
    """

    row_lse_b: Tensor
    column_lse_Rn: Tensor
    block_mD: Tensor | None
    maxima: Maxima | None


class InfoNCE(torch.autograd.Function):
    """The loss over the batches of all ranks of an exchange, the same value on each of them.

    Gradients are those that a *mean* over ranks, as DDP and FSDP take it, turns into the gradients
    of one process with the whole batch: features get W times their own, because the other ranks'
    gradients for them are zero; scale and bias get their total on every rank.
    """

    @staticmethod
    def forward(
        ctx: Any, image_bD: Tensor, text_nD: Tensor, scale: Tensor, bias: Tensor | None, plan: Plan
    ) -> tuple[Tensor, Tensor | None]:
        """Sweep once over all columns for the log-sum-exps of the negatives."""
        swept = sweep(image_bD, text_nD, scale, bias, plan)
        ctx.save_for_backward(image_bD, text_nD, scale, bias, *swept[:-1])
        ctx.plan = plan
        return swept.loss, not_differentiable(ctx, swept.statistics_5)

    @staticmethod
    @first_derivatives_only(NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, cotangent: Tensor, _: object) -> tuple[Tensor | None, ...]:
        """Sweep once more over all columns for the gradients."""
        image_bD, text_nD, scale, bias, *swept = ctx.saved_tensors
        inputs = (image_bD, text_nD, scale, bias)
        return (*differentiate(cotangent, *inputs, Swept(*swept), ctx.plan), None)


def sweep(
    image_bD: Tensor, text_nD: Tensor, scale: Tensor, bias: Tensor | None, plan: Plan
) -> Swept:
    """Return the loss, and what its gradients need; one unit of work."""
    with torch.autocast(image_bD.device.type, enabled=False):
        kept = memory_for_tiles(image_bD, plan)
        prepared = plan.tiles.prepare(image_bD, text_nD, scale)
        row_neg_b, column_neg_Rn, block_mD, maxima = negatives_sweep(
            image_bD, text_nD, scale, kept, plan, prepared
        )
        statistics_5 = None
        if maxima is not None:
            negatives = row_neg_b, column_neg_Rn.logsumexp(0)
            probability_2b = softmax_probabilities(prepared.pos_b, negatives)
            statistics_5 = measure(
                image_bD, text_nD, scale, bias, prepared.pos_b, probability_2b, maxima,
                plan.exchange, plan.tiles,
            )  # fmt: skip
    row_lse_b, published, weight_b = plan.tiles.pair_terms(
        row_neg_b, column_neg_Rn, prepared.pos_b, plan.wanted, plan.terms
    )
    loss, column_lse = plan.exchange.publish(published, to_visits=plan.trains)
    if bias is not None:
        loss = loss + 0.0 * bias.to(loss.dtype).reshape(())  # NaN and inf are not to vanish
    loss = loss.to(accumulation_dtype(image_bD.dtype), copy=True)
    return Swept(loss, row_lse_b, column_lse, weight_b, kept, block_mD, statistics_5)


def not_differentiable(ctx: Any, statistics_5: Tensor | None) -> Tensor | None:
    """Return statistics as an output of an autograd function that has no gradient for them."""
    if statistics_5 is not None:
        ctx.mark_non_differentiable(statistics_5)
    return statistics_5


def differentiate(
    cotangent: Tensor,
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    swept: Swept,
    plan: Plan,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of images, texts, scale and bias; three units of work."""
    with torch.autocast(image_bD.device.type, enabled=False):
        gradients = negatives_gradients(
            image_bD, text_nD, scale, swept.row_lse_b, swept.column_lse, swept.kept,
            swept.block_mD, plan,
        )  # fmt: skip
    return finish_gradients(
        cotangent, image_bD, text_nD, scale, bias, *gradients, swept.weight_b, swept.loss,
        plan.terms, plan.exchange.world_size, plan.scale_needs_grad, plan.tiles,
        plan.exchange.all_reduce,
    )  # fmt: skip


def finish_gradients(
    cotangent: Tensor,
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    d_image_bD: Tensor | None,
    d_text_nD: Tensor | None,
    weight_b: Tensor,
    loss: Tensor,
    terms: int,
    ranks: int,
    scale_needs_grad: bool,
    tiles: TileBackend,
    all_reduce: Callable[[Tensor], Tensor],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return what `differentiate` does, of what `negatives_gradients` returned, overwritten."""
    d_scale = d_bias = None
    with torch.autocast(image_bD.device.type, enabled=False):
        if d_image_bD is not None or d_text_nD is not None:
            d_image_bD, d_text_nD, d_scale = tiles.finish(
                image_bD, text_nD, d_image_bD, d_text_nD, weight_b, scale, cotangent, terms, ranks,
                scale_needs_grad,
            )  # fmt: skip
        if d_scale is not None:
            d_scale = all_reduce(d_scale).to(scale.dtype).reshape(scale.shape)
    if bias is not None:
        d_bias = (0.0 * loss * cotangent).to(bias.dtype).reshape(bias.shape)
    return d_image_bD, d_text_nD, d_scale, d_bias


def memory_for_tiles(image_bD: Tensor, plan: Plan, sweeps: int = 1) -> Tensor:
    """Return memory for what the backwards of some sweeps need not work out again; may be empty."""
    size, (b, _) = 0, image_bD.shape
    if plan.trains and plan.limits is None:
        columns = sweeps * plan.exchange.global_batch_size
        size = plan.tiles.kept_values(b, columns, image_bD.dtype, image_bD.device)
    return image_bD.new_empty(size, dtype=accumulation_dtype(image_bD.dtype))


def negatives_sweep(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    memory: Tensor,
    plan: Plan,
    prepared: Prepared | None = None,
) -> Negatives:
    """Sweep over all columns for the log-sum-exps of the negatives."""
    row_neg_b = image_bD.new_empty(image_bD.shape[:1], dtype=state_dtype(image_bD.device))
    column_neg, kept = plan.exchange.home("logsumexp"), Kept(memory)
    largest = MaximaSweep(image_bD, plan.exchange) if plan.statistics else None
    block_mD = None

    def sweep_block(visit: Visit, is_first: bool) -> None:
        text_mD = visit.columns[0]
        part_m = row_neg_b.new_empty(text_mD.shape[:1])
        maxima = None if largest is None else largest.block(text_mD)
        logits = plan.logits(visit, image_bD, text_mD, scale, kept, is_first=is_first)
        plan.tiles.lse_sweep(logits, row_neg_b, part_m, prepared, maxima)
        column_neg.add(part_m)
        if largest is not None and maxima is not None:
            largest.add(maxima)

    for index, visit in enumerate(plan.exchange.visit([text_nD, *plan.travelling])):
        sweep_block(visit, index == 0)
        if plan.trains and plan.exchange.holds_all:
            block_mD = visit.columns[0]
    maxima = None if largest is None else largest.result()
    return Negatives(row_neg_b, column_neg.parts(), block_mD, maxima)


def negatives_gradients(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    row_lse_b: Tensor,
    column_lse: Tensor,
    kept_values: Tensor,
    block_mD: Tensor | None,
    plan: Plan,
) -> tuple[Tensor | None, Tensor | None]:
    """Return what the negatives add to `2B dL/dS text` and `2B dL/dS.T image`."""
    dtype = accumulation_dtype(image_bD.dtype)
    # With no features to train, the scale still needs the gradient of one side.
    use_image = plan.image_needs_grad or (plan.scale_needs_grad and not plan.text_needs_grad)
    d_image_bD = image_bD.new_empty(image_bD.shape, dtype=dtype) if use_image else None
    d_text = plan.exchange.home("sum") if plan.text_needs_grad else None
    kept = Kept(kept_values)
    if d_image_bD is None and d_text is None:
        return None, None

    def sweep_block(visit: Visit, is_first: bool) -> None:
        text_mD, column_lse_m = visit.columns[0], visit.columns[-1]
        part_mD = None if d_text is None else torch.empty_like(text_mD, dtype=dtype)
        logits = plan.logits(visit, image_bD, text_mD, scale, kept, is_first=is_first)
        plan.tiles.grad_sweep(logits, row_lse_b, column_lse_m, d_image_bD, part_mD)
        if d_text is not None and part_mD is not None:
            d_text.add(part_mD)

    visits = plan.exchange.visit([text_nD, *plan.travelling], column_lse, block_mD)
    for index, visit in enumerate(visits):
        sweep_block(visit, index == 0)
    return d_image_bD, None if d_text is None else d_text.result()
