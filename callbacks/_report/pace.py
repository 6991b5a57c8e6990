"""When a report is due: by time, at once after an alarm, and never for more than 5% of a run."""

import contextlib
import time
from collections.abc import Callable, Iterator

__all__ = ["Pace"]

_REST = 20  # times as long as the last report took


class Pace:
    """Says when to write again.

    Args:
        every_n_seconds: Between two reports without an alarm.
        clock: In seconds.
    """

    def __init__(self, every_n_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.every_n_seconds = every_n_seconds
        self.has_news = False  # an alarm since the last report
        self._clock = clock
        self._ended = self._took = 0.0

    def is_due(self) -> bool:
        """Return whether to write now."""
        elapsed = self._clock() - self._ended
        wait = 0.0 if self.has_news else self.every_n_seconds
        return elapsed >= max(wait, _REST * self._took)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure a report."""
        self.has_news = False
        began = self._clock()
        try:
            yield
        finally:
            self._ended = self._clock()
            self._took = self._ended - began
