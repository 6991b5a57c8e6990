"""What the loss asks of the code that multiplies tiles.

Shapes:
    b: rows, the images of one rank. m: columns, the texts of one shard (one rank's). D: width.
"""

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["TileBackend"]


class TileBackend(Protocol):
    """Two sweeps over the logits `S = scale * rows @ columns.T`, which are never held as a whole.

    The positive of row `i` is column `i + diagonal` and takes part in neither sweep;
    `diagonal=None` says that the columns hold no positives, and `positive_rows` that these rows
    alone have theirs there. Log-sum-exps are natural logarithms in
    `state_dtype`, gradients are in `accumulation_dtype`; both sweeps add to what they are given,
    in an order that does not depend on the run.
    """

    def budget(self, device: torch.device) -> int:
        """Return how many bytes the sweeps may take at a time on a device."""
        ...

    def lse_sweep(
        self,
        rows_bD: Tensor,
        columns_mD: Tensor,
        scale: Tensor,
        row_lse_b: Tensor,
        column_lse_m: Tensor,
        diagonal: int | None,
        positive_rows: slice | None = None,
    ) -> None:
        """Add one shard to the log-sum-exps of the negatives, in place; one unit of work.

        `row_lse_b[i] <- log(exp(row_lse_b[i]) + sum_j exp(S_ij))` and
        `column_lse_m[j] <- log(exp(column_lse_m[j]) + sum_i exp(S_ij))`, without the positives.
        """
        ...

    def grad_sweep(
        self,
        rows_bD: Tensor,
        columns_mD: Tensor,
        scale: Tensor,
        row_lse_b: Tensor,
        column_lse_m: Tensor,
        d_rows_bD: Tensor | None,
        d_columns_mD: Tensor | None,
        diagonal: int | None,
        positive_rows: slice | None = None,
    ) -> None:
        """Add one shard's negatives to the gradients, in place; three units of work.

        With `P_ij = exp(S_ij - row_lse_b[i]) + exp(S_ij - column_lse_m[j])`, zero at positives:
        `d_rows_bD += P @ columns_mD` and `d_columns_mD += P.T @ rows_bD`. Here the log-sum-exps
        include the positives. `None` skips a gradient and its unit of work.
        """
        ...
