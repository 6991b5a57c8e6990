"""More CUDA branches on the fake device: tables of a step, pinned batches, DDP on a stream."""

import tempfile
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_mp import InfCLStrategy
from lightning_mp.gradient_cache._served.roles import DeclaredRoles
from lightning_mp.optim._adamw import tables as adamw_tables
from lightning_mp.optim._adamw.tables import tables_for_capture, tables_of
from lightning_mp.strategies._inf_cl.loader_batches import GatheredLoader
from tests.fake_cuda import DeviceTensor, FakeCuda

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def gpu() -> Iterator[FakeCuda]:
    adamw_tables._templates.clear()
    with FakeCuda() as gpu:
        yield gpu
    adamw_tables._templates.clear()
    adamw_tables._captured.clear()


def on_device(count: int = 3) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return weights, gradients and moments of several sizes, and step counts."""
    shapes = [(5, 7), (4096,), (3,)][:count]
    lists = [[torch.ones(shape, device="cuda") for shape in shapes] for _ in range(4)]
    return lists, [torch.ones((), device="cuda") for _ in shapes]


def test_tables_of_a_step_are_copied_once_without_a_sync(gpu: FakeCuda) -> None:
    lists, steps = on_device()
    copies = []
    for _ in range(4):
        before = gpu.launches["copy"]
        with tables_of(lists, steps) as tables:
            assert all(isinstance(x, DeviceTensor) for x in tables)
        copies.append(gpu.launches["copy"] - before)
    assert copies == [3, 0, 0, 0]  # table, chunks, parts
    assert gpu.syncs == gpu.waits == 0
    addresses = tables.table.cpu()[:4].tolist()
    assert addresses == [[tensor.data_ptr() for tensor in each] for each in lists]


def test_tables_of_many_groups_are_copied_once(gpu: FakeCuda) -> None:
    groups = [on_device(1) for _ in range(60)]  # layer-wise learning rates
    copies = []
    for _ in range(2):
        before = gpu.launches["copy"]
        for group in groups:
            with tables_of(*group):
                pass
        copies.append(gpu.launches["copy"] - before)
    assert copies == [180, 0]


def test_new_gradients_need_one_copy_per_stream(gpu: FakeCuda) -> None:
    lists, steps = on_device()
    with tables_of(lists, steps):
        pass
    lists[1] = [torch.zeros_like(x) for x in lists[1]]
    before = gpu.launches["copy"]
    with tables_of(lists, steps):
        pass
    assert gpu.launches["copy"] - before == 1
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), tables_of(lists, steps) as tables:
        assert int(tables.table.sum()) > 0  # a race, if it were the other stream's
    assert gpu.launches["copy"] - before == 4


def test_capture_uses_only_tables_created_before(gpu: FakeCuda) -> None:
    lists, steps = on_device()
    assert tables_for_capture(lists, steps) is None
    with tables_of(lists, steps) as tables:
        pass
    torch.cuda.synchronize()
    before = gpu.launches["copy"]
    captured = tables_for_capture(lists, steps)
    assert captured is not None
    assert captured.table is tables.table
    assert gpu.launches["copy"] == before
    assert adamw_tables._captured[-1] is captured


def test_batches_are_joined_in_pinned_memory_and_copied_without_a_sync(gpu: FakeCuda) -> None:
    parts = [{"image": torch.full((4, 3), float(i)), "id": torch.arange(4)} for i in range(5)]
    wholes = list(GatheredLoader(parts, 2, DeclaredRoles({}), pin=True))
    assert [len(whole["image"]) for whole in wholes] == [8, 8, 4]
    assert all(whole[name].is_pinned() for whole in wholes for name in ("image", "id"))
    copied = [whole["image"].to(DEVICE, non_blocking=True) for whole in wholes]
    assert gpu.syncs == 0
    assert torch.equal(torch.cat(copied).cpu(), torch.cat([part["image"] for part in parts]))


@pytest.mark.distributed
def test_model_is_wrapped_on_a_separate_stream(gpu: FakeCuda) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=0, world_size=1)
        try:
            strategy = InfCLStrategy(offload="host")
            strategy.parallel_devices = [DEVICE]
            strategy.cluster_environment = LightningEnvironment()
            before = gpu._made
            wrapped = strategy._setup_model(nn.Linear(2, 2))
            assert isinstance(wrapped, DistributedDataParallel)
            assert wrapped.device_ids is None  # else its forward would copy the whole batch
            assert gpu._made == before + 1
            assert gpu.current == 0
        finally:
            dist.destroy_process_group()
