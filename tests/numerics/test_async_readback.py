"""`AsyncReadback` loses nothing, never waits, and keeps the step of every number."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_mp.numerics.async_readback import AsyncReadback
from lightning_mp.numerics.tensor_stats import tensor_stats


class _Event:
    """An event of a simulated device; the test decides when it is done."""

    def __init__(self, copy: Any) -> None:
        self.copy, self.is_done, self.waits = copy, False, 0

    def finish(self) -> None:
        self.copy()
        self.is_done = True

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.waits += 1
        if not self.is_done:
            self.finish()


class _Delayed(AsyncReadback):
    """Copies into buffers as on CUDA, at the time that the test chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[_Event] = []
        self.buffers: set[int] = set()

    def _new_buffer(self, packed: Tensor) -> Tensor:
        return torch.full_like(packed, -1.0, device="cpu")

    def _start_copy(self, packed: Tensor) -> tuple[Tensor, Any]:
        host, source = self._buffer(packed), packed.clone()
        self.buffers.add(host.data_ptr())
        self.events.append(_Event(lambda: host.copy_(source)))
        return host, self.events[-1]


def test_submissions_on_the_cpu_are_ready_at_once_with_their_context() -> None:
    readback, packed = AsyncReadback(), torch.arange(6.0).view(2, 3)
    readback.submit(7, packed, names=("a", "b"))
    packed.zero_()
    readback.submit(8, packed)
    first, second = readback.ready()
    assert (first.step, second.step) == (7, 8)
    assert first.array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert first.context == {"names": ("a", "b")}
    assert second.context == {}
    assert second.array.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert readback.ready() == readback.drain() == []


def test_statistics_arrive_on_the_host_unchanged() -> None:
    stats = tensor_stats([torch.randn(50, 70), torch.zeros(3)])
    readback = AsyncReadback()
    readback.submit(0, stats)
    (taken,) = readback.ready()
    assert taken.array.dtype == np.float64
    assert np.array_equal(taken.array, stats.numpy())


def test_ready_takes_finished_copies_in_the_order_of_submission() -> None:
    readback = _Delayed()
    for step in range(4):
        readback.submit(step, torch.full((2,), float(step)))
    assert readback.ready() == []
    readback.events[1].finish()
    assert readback.ready() == []  # step 0 comes first
    readback.events[0].finish()
    taken = readback.ready()
    assert [(one.step, one.array.tolist()) for one in taken] == [(0, [0, 0]), (1, [1, 1])]
    assert len(readback) == 2
    assert [event.waits for event in readback.events] == [0] * 4


def test_drain_waits_for_all_copies() -> None:
    readback = _Delayed()
    for step in (3, 5):
        readback.submit(step, torch.full((1,), float(step)))
    taken = readback.drain()
    assert [(one.step, one.array.tolist()) for one in taken] == [(3, [3]), (5, [5])]
    assert [event.waits for event in readback.events] == [1, 1]
    assert len(readback) == 0


def test_buffers_grow_with_copies_in_flight_and_are_reused() -> None:
    readback = _Delayed()
    for step in range(5):
        readback.submit(step, torch.full((3,), float(step)))
    assert len(readback.buffers) == 5
    for event in readback.events:
        event.finish()
    kept = readback.ready()
    for step in range(5, 50):
        readback.submit(step, torch.full((3,), float(step)))
        readback.events[-1].finish()
        kept += readback.ready()
    assert len(readback.buffers) == 5
    # Arrays that were taken are not overwritten by later copies through the same buffer.
    assert [one.array.tolist() for one in kept] == [[float(step)] * 3 for step in range(50)]


def test_buffer_is_reused_only_for_its_shape_and_dtype() -> None:
    readback = _Delayed()
    tensors = [torch.ones(2, 3), torch.ones(3, 2), torch.ones(2, 3, dtype=torch.float64)]
    for step, tensor in enumerate(tensors * 2):
        readback.submit(step, tensor)
        (taken,) = readback.drain()
        assert taken.array.shape == tensor.shape
        assert torch.from_numpy(taken.array).dtype == tensor.dtype
    assert len(readback.buffers) == 3


@pytest.mark.gpu
def test_readback_from_a_gpu_never_waits_for_it() -> None:
    readback = AsyncReadback()
    packed = torch.zeros(4, 8, device="cuda", dtype=torch.float64)
    readback.submit(-1, packed)  # allocates buffers
    readback.drain()
    torch.cuda._sleep(2_000_000_000)  # about a second
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3):
            packed.fill_(step)
            readback.submit(step, packed, name=step)
            assert readback.ready() == []  # the device sleeps, so no copy has arrived
    finally:
        torch.cuda.set_sync_debug_mode("default")
    taken = readback.drain()
    assert [one.step for one in taken] == [0, 1, 2]
    assert all((one.array == one.step).all() for one in taken)
    assert [one.context for one in taken] == [{"name": step} for step in range(3)]
