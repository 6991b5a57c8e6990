"""The columns of a packed tensor of statistics."""

from enum import IntEnum

__all__ = ["StatField"]


class StatField(IntEnum):
    """The columns of `tensor_stats`, in their order.

    All but `NON_FINITE` look at finite values only: one NaN must not hide what the other million
    gradients do. Counts are whole numbers, exact up to 2^53 in float64.
    """

    AMAX = 0
    """The largest magnitude; 0 without finite values."""

    SMALLEST = 1
    """The smallest magnitude that is not 0; inf where there is none."""

    ZEROS = 2
    """How many values are exactly 0."""

    SUBNORMALS = 3
    """How many are not 0, but below 2^-14 in magnitude once they are scaled."""

    FLUSHED = 4
    """How many of the subnormals are at most 2^-25 once scaled, which fp16 rounds to 0."""

    NON_FINITE = 5
    """How many are NaN, inf or -inf."""

    SUM = 6
    """The sum of the finite values."""

    SUM_OF_SQUARES = 7
    """The sum of their squares."""
