"""`tensor_stats` on a GPU, against float64."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from lightning_mp.numerics import tensor_stats as tensor_stats_module
from lightning_mp.numerics.async_readback import AsyncReadback
from lightning_mp.numerics.row_stats import row_stats
from lightning_mp.numerics.tensor_stats import StatField, TensorStats, stored_numels, tensor_stats
from tests.reference.tensor_stats import assert_stats_agree, planted, planted_tensors

pytestmark = pytest.mark.gpu

PATHS = pytest.mark.parametrize("has_kernels", [True, False], ids=["triton", "torch"])


@pytest.fixture(autouse=True)
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the torch path if the test requests it."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and not callspec.params.get("has_kernels", True):
        monkeypatch.setattr(tensor_stats_module, "triton_problem", lambda device: "forced")


@contextmanager
def _no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _on_gpu(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.cuda() for tensor in tensors]


@PATHS
@pytest.mark.parametrize("bad", [False, True])
def test_stats_equal_the_reference(has_kernels: bool, bad: bool) -> None:
    tensors = planted_tensors(0, bad=bad)
    tensors += [tensor.flatten()[1:] for tensor in tensors if tensor.numel() > 1]
    stats = tensor_stats(_on_gpu(tensors), scale=2.0**16, unscale=2.0**-8)
    assert stats.is_cuda
    assert_stats_agree(stats, tensors, scale=2.0**16, unscale=2.0**-8)


@PATHS
def test_stats_of_large_tensors_equal_the_reference(has_kernels: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    tensors = [planted((9_000_011,), dtype, generator) for dtype in dtypes]
    assert_stats_agree(tensor_stats(_on_gpu(tensors)), tensors)


@PATHS
def test_stats_are_bitwise_reproducible(has_kernels: bool) -> None:
    tensors = [torch.randn(3_000_001, device="cuda"), torch.randn(70, device="cuda").half()]
    first = tensor_stats(tensors)
    assert all(torch.equal(tensor_stats(tensors), first) for _ in range(5))


@PATHS
def test_stats_and_readback_never_wait(has_kernels: bool) -> None:
    tensors = _on_gpu(planted_tensors(2))
    named = {f"layer.{i}": tensor for i, tensor in enumerate(tensors)}
    loss_scale = torch.tensor(2.0**10, device="cuda")
    readback = AsyncReadback()
    readback.submit(0, tensor_stats(tensors))  # compiles kernels and allocates buffers
    readback.drain()
    with _no_waiting():
        packed = tensor_stats(tensors, scale=loss_scale, unscale=1 / loss_scale)
        readback.submit(1, packed, numels=stored_numels(tensors))
    (taken,) = readback.drain()
    view = TensorStats(list(named), taken.context["numels"], taken.array)
    assert taken.step == 1
    assert view.amax["layer.8"] == tensor_stats([tensors[8]])[0, StatField.AMAX].item() / 2**10
    assert_stats_agree(packed, tensors, scale=2.0**10, unscale=2.0**-10)


def test_both_paths_have_equal_counts() -> None:
    tensors = [t.flatten() for t in _on_gpu(planted_tensors(3)) if t.dtype != torch.float64]
    bound = torch.tensor(2.0**-14, device="cuda")
    exact = [field for field in StatField if field < StatField.SUM_OF_SQUARES]
    fused, rows = tensor_stats(tensors), row_stats(tensors, bound, may_sync=False)
    assert torch.equal(fused[:, exact], rows[:, exact])


@PATHS
def test_tensors_on_the_host_are_moved_to_the_gpu(has_kernels: bool) -> None:
    tensors = [torch.full((i + 1,), float(i + 1)) for i in range(6)]
    mixed = [tensor.cuda() if i % 2 else tensor for i, tensor in enumerate(tensors)]
    stats = tensor_stats(mixed)
    assert stats.is_cuda
    assert_stats_agree(stats, tensors)
