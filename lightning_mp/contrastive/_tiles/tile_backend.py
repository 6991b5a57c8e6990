"""What the loss asks of the code that multiplies tiles, and what it does beside the sweeps.

Shapes:
    b: rows, the images of one rank. m: columns, the texts of one shard (one rank's). D: width.
    n: this rank's texts, of which the first b belong to its images. R: parts of a sum.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mp.numerics import triton_support
from lightning_mp.numerics.floats import state_dtype
from lightning_mp.numerics.row_dots import fused_row_dots

__all__ = [
    "Ids",
    "Kept",
    "Limits",
    "Logits",
    "Maxima",
    "PairTerms",
    "Prepared",
    "TileBackend",
    "row_dots",
]

# Where torch makes float64 copies, rows are taken in chunks of about this many values: 512 KiB for
# a copy on a CPU, which fits its caches; 32 MiB on CUDA, where a chunk should outlast its launch.
_CHUNK_VALUES = {"cpu": 2**16, "cuda": 2**22}


class Ids(NamedTuple):
    """What each row and column shows; pairs of equal ids are no negatives."""

    rows_b: Tensor
    columns_m: Tensor

    def block(self, rows: slice, columns: slice) -> "Ids":
        """Return those of some rows and columns."""
        return Ids(self.rows_b[rows], self.columns_m[columns])


class Limits(NamedTuple):
    """The similarities above which a pair is left out of its row's sum, and of its column's.

    Args:
        rows_b: Of the rows, in the state dtype.
        columns_m: Of the columns.
        guides: Rows and columns, contiguous, whose products are the similarities; `None`: those of
            the features are.
    """

    rows_b: Tensor
    columns_m: Tensor
    guides: tuple[Tensor, Tensor] | None = None

    @property
    def travelling(self) -> list[Tensor]:
        """What travels with the columns."""
        return [self.columns_m] if self.guides is None else [self.columns_m, self.guides[1]]

    def at(self, columns: Sequence[Tensor]) -> "Limits":
        """Return the limits of the same rows at other columns, with what came with these."""
        guides = None if self.guides is None else (self.guides[0], columns[1])
        return self._replace(columns_m=columns[0], guides=guides)

    def block(self, rows: slice, columns: slice) -> "Limits":
        """Return the limits of some rows and columns."""
        guides = None
        if self.guides is not None:
            guides = self.guides[0][rows], self.guides[1][columns]
        return Limits(self.rows_b[rows], self.columns_m[columns], guides)


class Maxima(NamedTuple):
    """The largest logit of each row's and each column's negatives, -inf until a sweep raises it."""

    rows_b: Tensor
    columns_m: Tensor

    def block(self, rows: slice, columns: slice) -> "Maxima":
        """Return those of some rows and columns, in the same memory."""
        return Maxima(self.rows_b[rows], self.columns_m[columns])

    def raise_to(self, row_n: Tensor, column_c: Tensor, unit: float) -> None:
        """Put larger values, times `unit`, in place of the smaller ones that are here."""
        for mine, other in zip(self, (row_n, column_c), strict=True):
            # Widened before the change of unit, which in fp32 would round once more. Not `fmax`:
            # it drops a NaN, and no positive may be larger than that.
            torch.maximum(mine, other.to(mine.dtype) * unit, out=mine)


class Kept:
    """Tiles that the first sweep leaves for the second; both take places in the same order.

    Args:
        values: The memory. What no longer fits is not kept, and is worked out again.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._used = 0

    def take(self, size: int) -> Tensor | None:
        """Return the next `size` values, aligned to 64 bytes; `None` if they do not fit."""
        # A smaller tile after it may still fit; both sweeps meet the same tiles, and so agree.
        if self._used + size > self._values.numel():
            return None
        taken = self._values[self._used : self._used + size]
        self._used += -(-size // 16) * 16  # the next one starts at 64 bytes as well
        return taken

    def take_rows(self, rows: int, width: int) -> Tensor:
        """Return (r, width) memory for the first of some rows: for all of them, or r % 128 == 0.

        Rows lie a multiple of 16 values apart.
        """
        stride = -(-width // 16) * 16
        # By 128, as blocks of rows go: those that are kept and others are not put into one.
        if (fit := (self._values.numel() - self._used) // stride) < rows:
            rows = fit // 128 * 128
        taken = self._values[self._used : self._used + rows * stride]
        self._used += rows * stride
        return taken.view(rows, stride)[:, :width]

    @property
    def bytes(self) -> int:
        """Of all the memory."""
        return self._values.nbytes


class Logits(NamedTuple):
    """What a sweep works on: `S = scale * rows @ columns.T`, and which of it are no negatives.

    Args:
        rows_bD: Rows.
        columns_mD: Columns of one shard.
        scale: One value.
        diagonal: The positive of row `i` is column `i + diagonal`; `None`: these columns hold none.
        positive_rows: The rows that have their positive among these columns; `None` for all.
        ids: Pairs of equal ids are left out, with the positives.
        limits: What is above a row's limit is left out of the row's sums, and likewise by column.
            Such tiles are not kept.
        kept: Memory that lasts from the first sweep to the second.
        fresh: Whether what the sweep adds to for rows, and for columns, holds nothing yet: it is
            overwritten.
        weights_b: What rows weigh in `sigmoid_sweep` of torch's tiles; `None`: 1 each.
    """

    rows_bD: Tensor
    columns_mD: Tensor
    scale: Tensor
    diagonal: int | None
    positive_rows: slice | None = None
    ids: Ids | None = None
    limits: Limits | None = None
    kept: Kept | None = None
    fresh: tuple[bool, bool] = (False, False)
    weights_b: Tensor | None = None


class Prepared(NamedTuple):
    """What a loss works out once, whatever columns visit.

    Args:
        pos_b: Logits of the pairs, in the state dtype.
        own: What else the backend's own sweep wants.
    """

    pos_b: Tensor
    own: tuple[Tensor, ...] = ()


class PairTerms(NamedTuple):
    """What pairs make of the log-sum-exps of their negatives.

    Args:
        row_lse_b: Log-sum-exps of the rows with their positives; infinite where they do not count.
        column_lse_n: Those of the columns.
        weight_b: `-2B` times the positives' cotangents.
    """

    row_lse_b: Tensor
    column_lse_n: Tensor
    weight_b: Tensor


class TileBackend(ABC):
    """Sweeps over `Logits`, which are never held as a whole; positives take part in none.

    Log-sum-exps are natural logarithms in `state_dtype`, gradients are in `accumulation_dtype`; all
    sweeps add to what they are given, in an order that does not depend on the run.
    """

    @abstractmethod
    def budget(self, device: torch.device) -> int:
        """Return how many bytes the sweeps may take at a time on a device."""

    @abstractmethod
    def rounding(
        self, width: int, dtype: torch.dtype, *, of_guides: bool = False
    ) -> tuple[float, float]:
        """Return the error of `Maxima`: a factor of `|scale|` and both norms, and a constant.

        Args:
            width: D.
            dtype: Of the features.
            of_guides: They are guides, which may be multiplied in another way.
        """

    @abstractmethod
    def kept_values(self, b: int, m: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return the size of the memory for `Kept`, in values of the accumulation dtype.

        Args:
            b: Rows.
            m: Columns of all shards. Both may be symbolic: no branch is taken on them.
            dtype: Of the features.
            device: Theirs.
        """

    @abstractmethod
    def multiplied_twice(
        self, b: int, m: int, width: int, dtype: torch.dtype, device: torch.device, kept_values: int
    ) -> int:
        """Return how many of the `b m` logits of one process a memory of that size cannot keep."""

    def prepare(self, rows_bD: Tensor, columns_nD: Tensor, scale: Tensor) -> Prepared:
        """Return what a loss works out once; row `i` of both sides is a pair, `n >= b`."""
        state = state_dtype(rows_bD.device)
        pos_b = row_dots(rows_bD, columns_nD[: len(rows_bD)], state)
        return Prepared(pos_b.mul_(scale.to(state).reshape(())))

    def pair_terms(
        self,
        row_neg_b: Tensor,
        column_neg_Rn: Tensor,
        pos_b: Tensor,
        wanted: tuple[bool, bool],
        terms: int,
        loss: Tensor,
    ) -> PairTerms:
        """Return what the pairs make of their negatives, and store this rank's part of the loss.

        Args:
            row_neg_b: Log-sum-exps of the negatives of the rows.
            column_neg_Rn: Parts of those of the columns, whose exponentials add up.
            pos_b: The pairs' logits.
            wanted: Whether the cross entropies of rows count, and those of columns.
            terms: Cross entropies that the loss is the mean of.
            loss: Gets the part, one value in the state dtype.
        """
        b = len(pos_b)
        # A single part is the sum: another logarithm would only round it.
        column_neg_n = column_neg_Rn[0] if len(column_neg_Rn) == 1 else column_neg_Rn.logsumexp(0)
        margin_2b = torch.stack([row_neg_b - pos_b, column_neg_n[:b] - pos_b])
        # A positive of +inf is an overflow, not a loss of 0.
        margin_2b.masked_fill_(pos_b == torch.inf, torch.nan)
        # Not `softplus`, which is the identity above 20: that is 2e-9 off, and this is float64.
        softplus_2b = torch.logaddexp(margin_2b, margin_2b.new_zeros(()))
        if False in wanted:  # what does not count weighs nothing
            unwanted = wanted.index(False)
            softplus_2b, margin_2b[unwanted] = softplus_2b[1 - unwanted], -torch.inf
        row_lse_b = torch.logaddexp(row_neg_b, pos_b)
        # Texts without an image have no term: an infinite sum leaves them a softmax of zero.
        column_lse_n = torch.full_like(column_neg_n, torch.inf)
        if wanted[1]:
            column_lse_n[:b] = torch.logaddexp(column_neg_n[:b], pos_b)
        # Put where its caller wants it, beside the scale's gradient: one collective adds up both.
        torch.div(softplus_2b.sum(), terms, out=loss)
        return PairTerms(
            row_lse_b if wanted[0] else torch.full_like(row_lse_b, torch.inf),
            column_lse_n,
            margin_2b.sigmoid().sum(0),
        )

    def finish(
        self,
        rows_bD: Tensor,
        columns_nD: Tensor,
        d_rows_bD: Tensor | None,
        d_columns_nD: Tensor | None,
        weight_b: Tensor,
        scale: Tensor,
        terms: int,
        ranks: int,
        d_scale: Tensor | None,
    ) -> None:
        """Add the positives to the gradients and scale them, in place; one of them is not `None`.

        Args:
            rows_bD: Images.
            columns_nD: Texts, n >= b.
            d_rows_bD: `terms dL/dS texts` of the negatives; `None` if not wanted.
            d_columns_nD: `terms dL/dS.T images`, likewise.
            weight_b: The weights of the positives.
            scale: One value.
            terms: What the loss is the mean of.
            ranks: W, which a mean over ranks divides by.
            d_scale: Gets this rank's part of the scale's gradient, one value in the state dtype;
                `None` if not wanted.
        """
        b, factor = len(weight_b), scale.to(weight_b.dtype).reshape(()) * (ranks / terms)
        sides = ((rows_bD, columns_nD, d_rows_bD), (columns_nD, rows_bD, d_columns_nD))
        for own_D, other_D, grad_D in sides:
            if grad_D is None:
                continue
            grad_D[:b].addcmul_(other_D[:b], weight_b.to(grad_D.dtype)[:, None], value=-1.0)
            if d_scale is not None and (own_D is rows_bD or d_rows_bD is None):
                # sum <I, dL/dS T> = sum <T, dL/dS^T I>: whichever is there anyway.
                # Before the factor, which has a scale too many and W: ranks add up their parts.
                torch.div(row_dots(own_D, grad_D, weight_b.dtype).sum(), terms, out=d_scale)
            grad_D.mul_(factor)

    @abstractmethod
    def lse_sweep(
        self,
        logits: Logits,
        row_lse_b: Tensor,
        column_lse_m: Tensor,
        prepared: Prepared | None = None,
        maxima: Maxima | None = None,
    ) -> None:
        """Add one shard to the log-sum-exps of the negatives, in place; one unit of work.

        `row_lse_b[i] <- log(exp(row_lse_b[i]) + sum_j exp(S_ij))` and
        `column_lse_m[j] <- log(exp(column_lse_m[j]) + sum_i exp(S_ij))`, without the positives.
        What tiles fit are left in `logits.kept`; `prepared` is what `prepare` returned for the
        loss. `maxima` are raised if they are given.
        """

    @abstractmethod
    def grad_sweep(
        self,
        logits: Logits,
        row_lse_b: Tensor,
        column_lse_m: Tensor,
        d_rows_bD: Tensor | None,
        d_columns_mD: Tensor | None,
    ) -> None:
        """Add one shard's negatives to the gradients, in place; three units of work.

        With `P_ij = exp(S_ij - row_lse_b[i]) + exp(S_ij - column_lse_m[j])`, zero at positives:
        `d_rows_bD += P @ columns_mD` and `d_columns_mD += P.T @ rows_bD`. Here the log-sum-exps
        include the positives. `None` skips a gradient and its unit of work; `logits.kept`, as the
        first sweep left it, takes up to one more off.
        """

    @abstractmethod
    def sigmoid_sweep(
        self,
        logits: Logits,
        bias: Tensor,
        totals_2: Tensor,
        d_rows_bD: Tensor | None,
        d_columns_mD: Tensor | None,
        maxima: Maxima | None = None,
    ) -> None:
        """Add one shard's negatives to the sigmoid loss and its gradients, in place.

        With `x_ij = S_ij + bias` and `P_ij = sigmoid(x_ij)`, zero at positives:
        `totals_2 += [sum softplus(x_ij), sum P_ij]`, `d_rows_bD += P @ columns_mD` and
        `d_columns_mD += P.T @ rows_bD`. One unit of work, and one for each gradient. `maxima`, if
        given, are raised to `S`, without the bias. No tile is kept.
        """


def row_dots(left_nD: Tensor, right_nD: Tensor, dtype: torch.dtype) -> Tensor:
    r"""Return :math:`\sum_k l_{ik} r_{ik}` for every row, multiplied and summed in `dtype`.

    Where Triton runs, float64 sums read each value once: 8 bytes for a pair in fp32. torch's own
    operations write and read float64 copies and their product, 56 bytes a pair.
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
