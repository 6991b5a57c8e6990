"""What CUDA refuses while a graph is made, for `FakeCuda`."""

import contextlib
from collections.abc import Iterator

__all__ = ["CaptureError", "Capturing"]


class CaptureError(RuntimeError):
    """The host asks, while a graph is made, for what is done only when the graph is replayed."""


class Capturing:
    """A device on which graphs are made.

    Attributes:
        captured: While a graph is made, what it will launch.
        current: The stream that the host queues on.
    """

    captured: list[str] | None = None
    current: int
    _only: int | None = None

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[str]]:
        """Make a graph of what is queued on the current stream; yield what it will launch.

        As in CUDA, the host may wait for nothing meanwhile, look at no event, and copy from no
        memory but pinned one. Other streams may not be used at all, which is stricter.
        """
        self._only, self.captured = self.current, []
        try:
            yield self.captured
        finally:
            self.captured = self._only = None

    def refuse_in_capture(self, what: str) -> None:
        """Raise if a graph is being made."""
        if self.captured is not None:
            raise CaptureError(f"{what}, while a graph is made.")

    def refuse_streams_in_capture(self, number: int) -> None:
        """Raise if a graph is being made on another stream."""
        if number != self._only:
            self.refuse_in_capture(f"Stream {number} is used")
