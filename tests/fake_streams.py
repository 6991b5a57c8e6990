"""The parts of `FakeCuda`: streams and events, vector clocks, and blocks of memory."""

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fake_cuda import FakeCuda

__all__ = ["HOST", "Block", "Clock", "FakeEvent", "FakeStream", "RaceError", "named"]

HOST = -1
Clock = Counter[int]


class RaceError(AssertionError):
    """Two unordered accesses to the same memory, of which at least one is a write."""


def named(thread: int) -> str:
    """Return the name of the host or of a stream in messages."""
    return "the host" if thread == HOST else f"stream {thread}"


class FakeStream:
    """Stands in for `torch.cuda.Stream`."""

    def __init__(self, gpu: "FakeCuda", number: int) -> None:
        self._gpu, self.number, self.stream_id = gpu, number, number

    def record_event(self, event: Any = None) -> Any:
        event = event or FakeEvent(self._gpu)
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        self._gpu.clocks[self.number] |= event.clock
        self._gpu.ends[self.number] = max(self._gpu.ends[self.number], event.at)

    def wait_stream(self, stream: "FakeStream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def is_capturing(self) -> bool:
        return self._gpu.captured is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number


class FakeEvent:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, gpu: "FakeCuda", **_: Any) -> None:
        self._gpu, self.clock, self.at = gpu, Clock(), 0.0

    def record(self, stream: FakeStream | None = None) -> None:
        number = self._gpu.current if stream is None else stream.number
        self.clock = self._gpu.enqueue(number, 0.0).copy()
        self.at = self._gpu.ends[number]

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or FakeStream(self._gpu, self._gpu.current)).wait_event(self)

    def query(self) -> bool:
        self._gpu.refuse_in_capture("An event is queried")
        is_done = self.at <= self._gpu.time
        if is_done:
            self._gpu.clocks[HOST] |= self.clock
        return is_done

    def synchronize(self) -> None:
        self._gpu.refuse_in_capture("The host waits for an event")
        self._gpu.time = max(self._gpu.time, self.at)
        self._gpu.clocks[HOST] |= self.clock
        self._gpu.waits += 1

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1e3 * (end.at - self.at)


class Block:
    """A block of device or pinned memory, with its last accesses and the time when it is free."""

    def __init__(self, owner: int, size: int, created: Clock) -> None:
        self.owner, self.size = owner, size
        self.written: tuple[int, int] = (owner, created[owner])
        self.read: Clock = Counter()
        self.recorded: set[int] = set()
        self.free_at: float | None = None
