"""All planted failures, with the alarm that must find each, its step, and its remedy."""

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
