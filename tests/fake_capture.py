"""Operations that CUDA forbids during the capture of a graph, for `FakeCuda`."""

import contextlib
from collections.abc import Iterator

__all__ = ["CaptureError", "Capturing"]


class CaptureError(RuntimeError):
    """During a capture, the host needs a result that exists only after a replay."""


class Capturing:
    """A device that can capture graphs.

    Attributes:
        captured: During a capture, the names of the captured launches; otherwise `None`.
        current: The current stream.
    """

    captured: list[str] | None = None
    current: int
    _only: int | None = None

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[str]]:
        """Capture the work of the current stream; yield the names of its launches.

        As in CUDA, the host must not wait, query events, or copy from pageable memory during the
        capture. Other streams must not be used at all, which is stricter than CUDA.
        """
        self._only, self.captured = self.current, []
        try:
            yield self.captured
        finally:
            self.captured = self._only = None

    def refuse_in_capture(self, what: str) -> None:
        """Raise during a capture."""
        if self.captured is not None:
            raise CaptureError(f"{what} during the capture of a graph.")

    def refuse_streams_in_capture(self, number: int) -> None:
        """Raise during a capture on another stream."""
        if number != self._only:
            self.refuse_in_capture(f"Stream {number} is used")
