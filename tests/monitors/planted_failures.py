"""Failures that are planted in small runs: what must find each, when, and what cures it."""

from tests.monitors import (
    planted_divergence,
    planted_numbers,
    planted_outputs,
    planted_training,
)
from tests.monitors.planted import Planted

__all__ = ["FAILURES", "Planted"]

FAILURES: list[Planted] = [
    *planted_divergence.FAILURES,
    *planted_numbers.FAILURES,
    *planted_training.FAILURES,
    *planted_outputs.FAILURES,
]
