"""Micro-batches are copied ahead in order, within the memory bound, on one stream."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightning_mp.gradient_cache._served import micro_batches, roles
from lightning_mp.gradient_cache._served.micro_batches import MicroBatches
from tests.fake_cuda import FakeCuda, RaceError
from tests.fake_streams import FakeStream

ROWS, COUNT = 8, 16
UNIT = ROWS * 4 * 4  # bytes of a micro-batch
COMPUTE, COPY = 20e-3, 2e-3
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def gpu() -> Iterator[FakeCuda]:
    # Launched like a compiled tower: the host is far ahead of the device.
    micro_batches._copying_stream.cache_clear()
    with FakeCuda(host_seconds=1e-4, device_seconds=1e-4, copy_seconds=COPY) as gpu:
        yield gpu
    micro_batches._copying_stream.cache_clear()


def make(batch: Tensor, prefetch: int) -> MicroBatches:
    batches = MicroBatches(
        [batch, "flag"],
        [roles.ROWS, roles.WHOLE],
        batch_size=len(batch),
        device=DEVICE,
        prefetch=prefetch,
    )
    batches.split(ROWS)
    return batches


def pairs(pinned: bool = True) -> Tensor:
    batch = torch.arange(ROWS * COUNT * 4.0).view(-1, 4)
    return batch.pin_memory() if pinned else batch


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_device_holds_prefetch_plus_one_micro_batches(
    gpu: FakeCuda, prefetch: int, pinned: bool
) -> None:
    batch = pairs(pinned)
    for _ in range(3):
        for _, (part, flag) in make(batch, prefetch):
            assert (part.device, flag) == (DEVICE, "flag")
            gpu.compute(COMPUTE)
        del part
    assert UNIT < gpu.peak_bytes <= UNIT * max(prefetch + 1, 2)
    assert gpu.syncs == gpu.waits == 0  # the host never waits


def test_all_copies_use_one_stream(gpu: FakeCuda) -> None:
    for _ in range(40):
        for _ in make(pairs(), 2):
            gpu.compute(COMPUTE)
    assert len(gpu.streams) == 2


@pytest.mark.parametrize("prefetch", [2, 5])
def test_copies_overlap_with_the_towers(gpu: FakeCuda, prefetch: int) -> None:
    for _ in make(pairs(), prefetch):
        gpu.compute(COMPUTE)
    # The device waits for the first copy only.
    assert gpu.ends[0] == pytest.approx(COPY + COUNT * COMPUTE, rel=0.01)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_micro_batches_are_complete_when_read_and_may_be_kept(gpu: FakeCuda, prefetch: int) -> None:
    batch = pairs()
    kept, sums = [], []
    for rows, (part, _) in make(batch, prefetch):
        sums.append(part.sum())
        kept.append(part)
        if rows.start == 3 * ROWS:
            del kept[1]
            gpu.compute(COMPUTE)
    assert [total.item() for total in sums] == [p.sum().item() for p in batch.split(ROWS)]
    del kept[1]
    expected = [p for i, p in enumerate(batch.split(ROWS)) if i not in (1, 2)]
    assert torch.equal(torch.cat(kept).cpu(), torch.cat(expected))


def test_tensors_in_a_list_of_rows_are_copied(gpu: FakeCuda) -> None:
    rows = [{"pixels": torch.ones(3, n)} for n in range(4)]
    batches = MicroBatches(
        [pairs()[:4], rows], [roles.ROWS] * 2, batch_size=4, device=DEVICE, prefetch=2
    )
    for _, (_, part) in batches:
        assert [row["pixels"].device for row in part] == [DEVICE] * 4
    assert rows[0]["pixels"].device.type == "cpu"


@pytest.mark.parametrize("forgotten", ["wait_stream", "wait_event"])
def test_fake_device_detects_a_missing_wait(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    monkeypatch.setattr(FakeStream, forgotten, lambda self, other: None)
    with pytest.raises(RaceError):
        _add_up(make(pairs(), 2))


def _add_up(batches: MicroBatches) -> list[Tensor]:
    return [part.sum() for _, (part, _) in batches]
