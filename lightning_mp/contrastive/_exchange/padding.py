"""Blocks of ranks with different numbers of rows: padded for collectives, compact for products.

Collectives take pieces of equal size, so the rows of every rank are padded to the longest. Products
take a matrix without gaps. Neither needs a copy of the block: the compact block is a window of the
padded one, and the rows outside the window are moved into the gaps inside it, and back. The window
always contains this rank's rows, so its positives stay on one diagonal.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["Padding", "padding_of"]


class Padding:
    """Positions of the rows of all ranks in a padded block and in the compact block.

    The rows of this `rank` stay in their place.
    """

    def __init__(self, sizes: Sequence[int], rank: int) -> None:
        self.longest, total = max(sizes), sum(sizes)
        self.rows = len(sizes) * self.longest
        start = min(rank * self.longest, self.rows - total)
        self.window = slice(start, start + total)
        """The compact block among the rows of the padded one."""
        self.own_start = rank * self.longest - start
        """This rank's first row in the compact block."""
        self._moves = list(_moves(sizes, self.window))

    @property
    def is_needed(self) -> bool:
        """Whether the padded block has gaps."""
        return self.window.stop - self.window.start < self.rows

    def compact(self, padded: Tensor) -> Tensor:
        """Return the rows of all ranks without gaps, in the same memory."""
        if self._moves:
            inside, outside = self._pieces(padded)
            torch._foreach_copy_(inside, outside)
        return padded[self.window] if self.is_needed else padded

    def spread(self, padded: Tensor) -> Tensor:
        """Undo `compact` in place, and return the padded block; gaps hold any values."""
        if self._moves:
            inside, outside = self._pieces(padded)
            torch._foreach_copy_(outside, inside)
        return padded

    def _pieces(self, padded: Tensor) -> list[list[Tensor]]:
        return [[padded[rows] for rows in side] for side in zip(*self._moves, strict=True)]


# Ranks whose batches differ in every step have the same few sizes again and again.
padding_of = functools.lru_cache(maxsize=64)(Padding)


def _moves(sizes: Sequence[int], window: slice) -> Iterator[tuple[slice, slice]]:
    """Yield runs of gaps inside the window, each with as many rows from outside of it."""
    longest = max(sizes)
    gaps, strays = [], []
    for first, size in zip(itertools.count(0, longest), sizes, strict=False):
        gaps.append((max(first + size, window.start), min(first + longest, window.stop)))
        strays.append((first, min(first + size, window.start)))
        strays.append((max(first, window.stop), first + size))
    gaps, strays = ([run for run in runs if run[0] < run[1]] for runs in (gaps, strays))
    # As many rows are in gaps as outside, so both lists end together.
    while gaps:
        (gap, gap_stop), (stray, stray_stop) = gaps.pop(), strays.pop()
        count = min(gap_stop - gap, stray_stop - stray)
        yield slice(gap, gap + count), slice(stray, stray + count)
        if gap + count < gap_stop:
            gaps.append((gap + count, gap_stop))
        if stray + count < stray_stop:
            strays.append((stray + count, stray_stop))
