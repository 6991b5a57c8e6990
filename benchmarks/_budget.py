"""Which contenders are worth starting: how long a call would take, against what one may take.

A contrastive loss is quadratic in the batch, so a call at twice the batch takes four times as long.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from benchmarks._contenders import Contender
from benchmarks._inputs import Case

__all__ = ["Budget"]

_PROBE_SHARE = 8  # of the batch: a 64th of the work


class Budget:
    """What calls have taken so far, and so what a larger batch will take.

    Args:
        max_seconds: What one call, forward and backward, may take; `None` is no limit.
    """

    def __init__(self, max_seconds: float | None) -> None:
        self.max_seconds = max_seconds
        self._taken: dict[tuple[str, int, str], tuple[int, float]] = {}

    def note(self, name: str, case: Case, seconds: float) -> None:
        """Remember what a call of the contender took."""
        self._taken[name, case.width, case.dtype] = (case.batch, seconds)

    def reason_to_skip(self, contender: Contender, case: Case) -> str | None:
        """Return why a contender would take too long; without a limit nothing is tried."""
        if self.max_seconds is None:
            return None
        seconds = self.predict(contender, case)
        if seconds is None or seconds <= self.max_seconds:
            return None
        return (
            f"predicted {seconds:,.1f} s a call, more than the {self.max_seconds:g} s of "
            "--max-seconds"
        )

    def predict(self, contender: Contender, case: Case) -> float | None:
        """Return the seconds of a call, from the last batch noted or from an eighth of this one.

        On an eighth, a GPU that is not filled gives too large a figure. `None`: it does not run.
        """
        key = contender.name, case.width, case.dtype
        if key not in self._taken:
            rows = max(64, case.batch // _PROBE_SHARE // 64 * 64)
            if rows >= case.batch:
                return None
            small = replace(case, batch=rows)
            try:
                self.note(contender.name, small, _seconds(contender, small))
            except Exception:  # the comparison with ours says what is wrong
                return None
        batch, seconds = self._taken[key]
        return seconds * (case.batch / batch) ** 2


def _seconds(contender: Contender, case: Case) -> float:
    """Return the shortest of two calls, after one that may compile."""
    inputs = contender.inputs(case)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        inputs.run(contender.loss)
        if case.place.type == "cuda":
            torch.cuda.synchronize(case.place)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
