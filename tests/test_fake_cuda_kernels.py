"""The host code around Triton kernels on the simulated device, and its fallbacks without Triton.

The kernels themselves run in Triton's interpreter; here they are launches that compute nothing.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import SafeAdamW
from lightning_mp.callbacks._step.sampling import pack_stats
from lightning_mp.contrastive._tiles.tile_backend import row_dots
from lightning_mp.contrastive._tiles.triton_tiles.block import add_product
from lightning_mp.numerics import row_dots_kernels, split_kernels, stats_kernels, triton_support
from lightning_mp.numerics import split_weights as split_weights_module
from lightning_mp.optim._adamw import fused as fused_adamw
from lightning_mp.optim._adamw import tables as adamw_tables
from lightning_mp.optim._adamw.foreach import AdamWBatch, AdamWOptions, foreach_adamw_step
from lightning_mp.optim._adamw.fused import fused_adamw_step
from tests.fake_cuda import DeviceTensor, FakeCuda

OPTIONS = AdamWOptions(
    lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, maximize=False, rule="adam",
    write_back="nearest", seed=0, clip_update_rms=None, grad_scale=None, found_inf=None,
)  # fmt: skip


@pytest.fixture
def gpu() -> Iterator[FakeCuda]:
    with FakeCuda() as gpu:
        yield gpu
    for made in (adamw_tables._templates, adamw_tables._captured):
        made.clear()
    triton_support.triton_problem.cache_clear()


class _Launched:
    """Replaces a Triton kernel: enqueues a launch and records its arguments."""

    def __init__(self, gpu: FakeCuda, name: str) -> None:
        self._gpu, self._name = gpu, name
        self.grids: list[tuple[int, ...]] = []
        self.arguments: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **_: Any) -> None:
            self._gpu._launch(self._name, 1e-5)
            self.grids.append(grid)
            self.arguments.append(arguments)

        return launch


def _on_device(values: list[Tensor]) -> list[Tensor]:
    return [x.to("cuda") for x in values]


def _batch() -> AdamWBatch:
    """Return weights, gradients and moments on the host, and step counts."""
    shapes = [(5, 7), (4096,), (3,)]
    lists = [[torch.rand(shape) for shape in shapes] for _ in range(4)]
    return AdamWBatch(*lists, steps=[torch.ones(()) for _ in shapes])


def _batch_on_device(batch: AdamWBatch) -> AdamWBatch:
    return AdamWBatch(*map(_on_device, batch.lists), steps=_on_device(batch.steps))


def test_captured_fused_step_is_one_launch_with_earlier_tables(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = _Launched(gpu, "adamw_kernel")
    monkeypatch.setattr(fused_adamw, "adamw_kernel", kernel)
    on_device = _batch_on_device(_batch())
    gpu.synchronize()
    syncs, waits = gpu.syncs, gpu.waits
    fused_adamw_step(on_device, OPTIONS)
    assert (gpu.syncs, gpu.waits) == (syncs, waits)
    gpu.synchronize()  # the copies have arrived
    with gpu.capture() as captured:
        fused_adamw_step(on_device, OPTIONS)
    assert captured == ["adamw_kernel"]
    assert kernel.arguments[0][0] is kernel.arguments[1][0]  # the table


def test_captured_fused_step_of_new_tensors_equals_foreach(gpu: FakeCuda) -> None:
    batch = _batch()
    on_device = _batch_on_device(batch)
    with gpu.capture() as captured:
        fused_adamw_step(on_device, OPTIONS)
    assert len(captured) > 1
    foreach_adamw_step(batch, OPTIONS)
    for each, expected in zip(on_device.params, batch.params, strict=True):
        torch.testing.assert_close(each.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_safe_adamw_without_triton_is_multi_tensor_without_a_sync(
    gpu: FakeCuda, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    values = [torch.rand(5, 7).to(dtype), torch.rand(30).to(dtype)]
    grads = [torch.rand_like(x) for x in values]
    results, launches = [], []
    for move in (list, _on_device):
        weights = [nn.Parameter(x) for x in move([x.clone() for x in values])]
        optimizer = SafeAdamW(weights, lr=1e-2, weight_decay=0.1)
        moved = move(grads)
        for _ in range(3):
            before = gpu.launches.total(), gpu.syncs, gpu.waits
            for weight, grad in zip(weights, moved, strict=True):
                weight.grad = grad
            optimizer.step()
        launches.append(gpu.launches.total() - before[0])
        if move is _on_device:
            assert (gpu.syncs, gpu.waits) == before[1:]
        results.append([weight.detach().cpu() for weight in weights])
    assert launches[1] > launches[0] == 0
    for ours, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, expected)


def test_statistics_use_one_table_copied_without_a_sync(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = {name: _Launched(gpu, name) for name in ("stats_kernel", "merge_stats_kernel")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(stats_kernels, name, kernel)
    chunk = stats_kernels.CHUNK.value
    sizes = {3: torch.float16, chunk + 1: torch.float32, 8: torch.float32}
    values = [torch.ones(size, dtype=dtype, device="cuda") for size, dtype in sizes.items()]
    bound = torch.ones((), device="cuda")
    copies = gpu.launches["copy"]
    stats_kernels.fused_stats(values, bound)
    assert gpu.launches["copy"] - copies == 1
    assert gpu.syncs == gpu.waits == 0
    assert kernels["stats_kernel"].grids == [(3,), (1,)]  # chunks of fp32, and of fp16
    assert kernels["merge_stats_kernel"].grids == [(3,)]
    table, chunks = kernels["stats_kernel"].arguments[0][:2]
    assert table.cpu().view(3, -1)[:, 0].tolist() == [x.data_ptr() for x in values]
    assert chunks.tolist() == [1, 1, 2, 0]


def test_statistics_without_triton_equal_those_of_the_host(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    values = [torch.rand(40), torch.rand(3, 5).half()]
    expected = pack_stats(values)
    on_device = _on_device(values)
    gpu.synchronize()
    syncs, waits = gpu.syncs, gpu.waits
    packed = pack_stats(on_device)
    assert (gpu.syncs, gpu.waits) == (syncs, waits)
    # Sums of 40 values in fp32; the host computes them in float64.
    torch.testing.assert_close(packed.cpu(), expected, rtol=40 * 2.0**-24, atol=0)


def test_16_bit_products_use_an_operator_that_cuda_supports(gpu: FakeCuda) -> None:
    left, right = torch.rand(4, 6).bfloat16(), torch.rand(6, 5).bfloat16()
    total = torch.ones(4, 5)
    expected = total + 0.5 * (left.double() @ right.double()).float()
    on_device = total.to("cuda")
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::addmm.dtype_out", "CPU"):
        add_product(on_device, left.to("cuda"), right.to("cuda"), 0.5)
        torch.testing.assert_close(on_device.cpu(), expected)
    else:  # missing on the CPU behind the fake device
        with pytest.raises(NotImplementedError, match="aten::addmm.dtype"):
            add_product(on_device, left.to("cuda"), right.to("cuda"), 0.5)


def test_row_dots_in_float64_are_one_launch(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _Launched(gpu, "row_dots_kernel")
    monkeypatch.setattr(row_dots_kernels, "row_dots_kernel", kernel)
    monkeypatch.setattr(triton_support, "triton_problem", lambda device: None)
    rows = torch.ones(70, 24, device="cuda")
    before = gpu.launches.total()
    dots = row_dots(rows, rows, torch.float64)
    assert (dots.dtype, dots.shape) == (torch.float64, (70,))
    assert gpu.launches.total() - before == 2  # memory counts as one
    assert kernel.arguments[0][3:5] == (70, 24)


def test_contiguous_half_weights_are_joined_and_split_by_one_launch_each(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = {name: _Launched(gpu, name) for name in ("join_kernel", "split_kernel")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(split_kernels, name, kernel)
    monkeypatch.setattr(split_weights_module, "triton_problem", lambda device: None)
    monkeypatch.setattr(split_weights_module, "Tensor", DeviceTensor)  # other subclasses use torch
    shape = (300, 3 * split_kernels.BLOCK.value)
    weight, residual = (torch.ones(shape, dtype=torch.float16, device="cuda") for _ in range(2))
    before = gpu.launches.total()
    value = split_weights_module.join_weight(weight, residual)
    assert gpu.launches.total() - before == 2  # memory counts as one
    assert (value.dtype, value.shape) == (torch.float32, shape)
    parts = split_weights_module.split_weight(value, torch.float16)
    assert gpu.launches.total() - before == 5  # memory of both results
    assert [(part.dtype, part.shape) for part in parts] == [(torch.float16, shape)] * 2
    assert [kernel.grids for kernel in kernels.values()] == [[(900,)]] * 2
    # Other weights use torch's operations.
    split_weights_module.join_weight(weight.t(), residual.t())
    assert len(kernels["join_kernel"].grids) == 1
