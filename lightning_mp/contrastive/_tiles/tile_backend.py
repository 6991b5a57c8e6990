"""`TileBackend`: the interface of the tile backends, and its arguments.

Shapes:
    b: rows, the images of one rank. m: columns, the texts of one shard. D: width. n: this rank's
    texts; text i belongs to image i for i < b. R: parts of a sum.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mp.contrastive._tiles.masks import Ids, Thresholds
from lightning_mp.numerics import triton_support
from lightning_mp.numerics.floats import state_dtype
from lightning_mp.numerics.row_dots import fused_row_dots

__all__ = [
    "Derivatives",
    "Logits",
    "PairTerms",
    "Prepared",
    "RowsColumns",
    "StoredTiles",
    "TileBackend",
    "Vectors",
    "row_dots",
]

# `row_dots` makes float64 copies of about this many values at a time: 512 KiB on a CPU, which fits
# its caches; 32 MiB on CUDA, where the work of a chunk should take longer than its launch.
_CHUNK_VALUES = {"cpu": 2**16, "cuda": 2**22}


class RowsColumns(NamedTuple):
    """A flag for the rows (images) and a flag for the columns (texts)."""

    rows: bool
    columns: bool


class Derivatives(NamedTuple):
    """Derivatives of the rows and of the columns; `None` skips one and its unit of work."""

    rows_bD: Tensor | None
    columns_mD: Tensor | None


class Vectors(NamedTuple):
    """One number per row and one per column: log-sum-exps, or the largest negative logits."""

    rows_b: Tensor
    columns_m: Tensor

    def block(self, rows: slice, columns: slice) -> "Vectors":
        return Vectors(self.rows_b[rows], self.columns_m[columns])

    def raise_to(self, row_n: Tensor, column_c: Tensor, unit: float) -> None:
        """Raise maxima in place to the given values times `unit`, if these are larger."""
        for maxima, values in zip(self, (row_n, column_c), strict=True):
            # The product with `unit` would round again in fp32. `fmax` would drop a NaN, so that
            # a positive could exceed it.
            torch.maximum(maxima, values.to(maxima.dtype) * unit, out=maxima)


class StoredTiles:
    """Memory for tiles that the first sweep stores for the second.

    Both sweeps take memory in the same order. Tiles that do not fit are computed again.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._used = 0

    def take(self, size: int) -> Tensor | None:
        """Return the next `size` values, aligned to 64 bytes; `None` if they do not fit."""
        # A later, smaller tile may still fit. Both sweeps visit the same tiles, so they agree.
        if self._used + size > self._values.numel():
            return None
        taken = self._values[self._used : self._used + size]
        self._used += -(-size // 16) * 16  # the next one starts at 64 bytes as well
        return taken

    def take_rows(self, rows: int, width: int) -> Tensor:
        """Return (r, width) memory for the first r rows: all `rows`, or a multiple of 128.

        The row stride is a multiple of 16 values.
        """
        stride = -(-width // 16) * 16
        # Blocks have a multiple of 128 rows, and their rows are all stored or none is.
        if (fit := (self._values.numel() - self._used) // stride) < rows:
            rows = fit // 128 * 128
        taken = self._values[self._used : self._used + rows * stride]
        self._used += rows * stride
        return taken.view(rows, stride)[:, :width]

    @property
    def bytes(self) -> int:
        return self._values.nbytes


class Logits(NamedTuple):
    """The operands of a sweep, `S = scale * rows @ columns.T`, and its masks."""

    rows_bD: Tensor
    columns_mD: Tensor  # of one shard
    scale: Tensor  # one value
    diagonal: int | None  # the positive of row `i` is column `i + diagonal`; `None` without any
    positive_rows: slice | None = None  # those with their positive in the shard; `None`: all
    ids: Ids | None = None  # pairs with equal ids are masked, as positives are
    thresholds: Thresholds | None = None  # tiles are not stored with them
    stored: StoredTiles | None = None  # lasts from the first sweep to the second
    # Whether outputs for rows, and for columns, are uninitialized: the sweep overwrites them.
    fresh: RowsColumns = RowsColumns(False, False)
    weights_b: Tensor | None = None  # of the rows in `TorchTiles.sigmoid_sweep`; `None`: 1 each
    # Raised in place, in the first sweep, to the largest logits of the negatives, without a bias;
    # `None` without statistics. Not supported with thresholds.
    maxima: Vectors | None = None


class Prepared(NamedTuple):
    """Values that a loss computes once, before its sweeps."""

    pos_b: Tensor  # logits of the positives, in the state dtype
    own: tuple[Tensor, ...] = ()  # further values for `lse_sweep` of the same backend


class PairTerms(NamedTuple):
    """Log-sum-exps with the positives, and the gradients of the positives' logits."""

    row_lse_b: Tensor  # infinite for rows without a term in the loss
    column_lse_n: Tensor  # likewise
    weight_b: Tensor  # `-2B` times the gradients of the loss with respect to the logits


class TileBackend(ABC):
    """Sweeps over the negatives of `Logits`, of which only tiles are in memory.

    Log-sum-exps are natural logarithms in `state_dtype`, gradients are in `accumulation_dtype`.
    Sweeps accumulate into their outputs in a fixed order, so results repeat bit for bit.
    """

    @abstractmethod
    def budget(self, device: torch.device) -> int:
        """Return the workspace on a device, in bytes."""

    @abstractmethod
    def rounding(
        self, width: int, dtype: torch.dtype, *, of_guides: bool = False
    ) -> tuple[float, float]:
        """Return the largest error of a logit: a factor of `|scale|` and both norms, a constant.

        The products of guides may have another precision.
        """

    @abstractmethod
    def stored_values(self, b: int, m: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return the size of the memory for `StoredTiles`, in values of the accumulation dtype.

        The m columns are those of all shards. Neither b nor m may decide a branch: both may be
        symbolic.
        """

    @abstractmethod
    def multiplied_twice(
        self, b: int, m: int, width: int, dtype: torch.dtype, device: torch.device, memory: int
    ) -> int:
        """Return how many of the `b m` logits of one process do not fit `memory` stored values."""

    def prepare(self, rows_bD: Tensor, columns_nD: Tensor, scale: Tensor) -> Prepared:
        """Return the values that a loss computes once; row `i` and column `i` are a pair."""
        state = state_dtype(rows_bD.device)
        pos_b = row_dots(rows_bD, columns_nD[: len(rows_bD)], state)
        return Prepared(pos_b.mul_(scale.to(state).reshape(())))

    def pair_terms(
        self,
        row_neg_b: Tensor,
        column_neg_Rn: Tensor,
        pos_b: Tensor,
        has_terms: RowsColumns,
        terms: int,
        loss: Tensor,
    ) -> PairTerms:
        """Combine positives and negatives, and write this rank's part of the loss.

        The log-sum-exps of the columns' negatives are in R parts. The loss, one value in the state
        dtype, is the mean of `terms` cross entropies: of rows, of columns, or of both.
        """
        b = len(pos_b)
        # The log-sum-exp of a single part would only round it.
        column_neg_n = column_neg_Rn[0] if len(column_neg_Rn) == 1 else column_neg_Rn.logsumexp(0)
        margin_2b = torch.stack([row_neg_b - pos_b, column_neg_n[:b] - pos_b])
        # A positive of +inf is an overflow, not a loss of 0.
        margin_2b.masked_fill_(pos_b == torch.inf, torch.nan)
        # `softplus` is the identity above 20, an error of 2e-9 in float64.
        softplus_2b = torch.logaddexp(margin_2b, margin_2b.new_zeros(()))
        if False in has_terms:  # a margin of -inf has a gradient of 0
            unused = has_terms.index(False)
            softplus_2b, margin_2b[unused] = softplus_2b[1 - unused], -torch.inf
        row_lse_b = torch.logaddexp(row_neg_b, pos_b)
        # Texts without an image have no term: their softmax is 0 with an infinite log-sum-exp.
        column_lse_n = torch.full_like(column_neg_n, torch.inf)
        if has_terms.columns:
            column_lse_n[:b] = torch.logaddexp(column_neg_n[:b], pos_b)
        # `loss` lies beside the scale's gradient, so that one collective sums both.
        torch.div(softplus_2b.sum(), terms, out=loss)
        return PairTerms(
            row_lse_b if has_terms.rows else torch.full_like(row_lse_b, torch.inf),
            column_lse_n,
            margin_2b.sigmoid().sum(0),
        )

    def finish(
        self,
        rows_bD: Tensor,
        columns_nD: Tensor,
        d_rows_bD: Tensor | None,
        d_columns_nD: Tensor | None,
        weight_q: Tensor,
        scale: Tensor,
        terms: int,
        ranks: int,
        d_scale: Tensor | None,
    ) -> None:
        """Add the positives to the gradients and scale them, in place; at least one is a tensor.

        `d_rows_bD` are `terms dL/dS texts` of the negatives, `d_columns_nD` likewise
        `terms dL/dS.T images`, and `weight_q` is that of `PairTerms`; rows and columns from
        q on have no positive. A mean over `ranks` divides the gradients. `d_scale` gets this rank's
        part of the scale's gradient, one value in the state dtype.
        """
        q, factor = len(weight_q), scale.to(weight_q.dtype).reshape(()) * (ranks / terms)
        sides = ((rows_bD, columns_nD, d_rows_bD), (columns_nD, rows_bD, d_columns_nD))
        for own_D, other_D, grad_D in sides:
            if grad_D is None:
                continue
            grad_D[:q].addcmul_(other_D[:q], weight_q.to(grad_D.dtype)[:, None], value=-1.0)
            if d_scale is not None and (own_D is rows_bD or d_rows_bD is None):
                # sum <I, dL/dS T> = sum <T, dL/dS^T I>: either gradient serves. The factor comes
                # later, since it holds the scale and W, and ranks sum their parts.
                torch.div(row_dots(own_D, grad_D, weight_q.dtype).sum(), terms, out=d_scale)
            grad_D.mul_(factor)

    @abstractmethod
    def lse_sweep(self, logits: Logits, lses: Vectors, prepared: Prepared | None = None) -> None:
        """Add one shard to the log-sum-exps of the negatives, in place; one unit of work.

        `rows_b[i] <- log(exp(rows_b[i]) + sum_j exp(S_ij))` and
        `columns_m[j] <- log(exp(columns_m[j]) + sum_i exp(S_ij))`, without the positives.
        Tiles that fit are stored in `logits.stored`; `prepared` is the result of `prepare`.
        """

    @abstractmethod
    def grad_sweep(self, logits: Logits, lses: Vectors, gradients: Derivatives) -> None:
        """Add one shard's negatives to the gradients, in place; three units of work.

        With `P_ij = exp(S_ij - lses.rows_b[i]) + exp(S_ij - lses.columns_m[j])`, zero at positives:
        the gradient of rows `+= P @ columns_mD` and that of columns `+= P.T @ rows_bD`. Here the
        log-sum-exps include the positives. The tiles that the first sweep left in `logits.stored`
        save up to one unit.
        """

    @abstractmethod
    def sigmoid_sweep(
        self, logits: Logits, bias: Tensor, totals_2: Tensor, gradients: Derivatives
    ) -> None:
        """Add one shard's negatives to the sigmoid loss and its gradients, in place.

        With `x_ij = S_ij + bias` and `P_ij = sigmoid(x_ij)`, zero at positives:
        `totals_2 += [sum softplus(x_ij), sum P_ij]`, and gradients as in `grad_sweep`. One unit of
        work, and one for each gradient. No tile is stored.
        """


def row_dots(left_nD: Tensor, right_nD: Tensor, dtype: torch.dtype) -> Tensor:
    r"""Return :math:`\sum_k l_{ik} r_{ik}` for every row, multiplied and summed in `dtype`.

    On CUDA with Triton, float64 sums read each value once, 8 bytes per pair of fp32 values; with
    torch's operations, which store float64 copies and their product, they move 56 bytes per pair.
    """
    is_narrow = torch.float64 not in (left_nD.dtype, right_nD.dtype)
    if (
        dtype == torch.float64
        and is_narrow
        and left_nD.device.type == "cuda"
        and triton_support.triton_problem(left_nD.device) is None
    ):
        return fused_row_dots(left_nD, right_nD)
    values = _CHUNK_VALUES.get(left_nD.device.type, _CHUNK_VALUES["cpu"])
    rows = max(1, values // left_nD.shape[1])
    return torch.cat(
        [
            (left_cD.to(dtype) * right_cD.to(dtype)).sum(1)
            for left_cD, right_cD in zip(left_nD.split(rows), right_nD.split(rows), strict=True)
        ]
    )
