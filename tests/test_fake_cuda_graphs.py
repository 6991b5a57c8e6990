"""The loss of one GPU in a CUDA graph: no host sync, no copy of pageable memory, no readback.

The fake device counts the loss operator as one launch. The inside of the operator is tested
separately, by counting launches of Triton kernels and cuBLAS products.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import ContrastiveLoss
from lightning_mp.contrastive import _operator
from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._exchange.exchange import Ring
from lightning_mp.contrastive._sums.softmax import softmax_loss
from lightning_mp.contrastive._sums.sweep import NeedsGrad, Plan, agreed_plan
from lightning_mp.contrastive._tiles.triton_tiles import (
    TritonTiles,
    block,
    lse_kernels,
    pair_kernels,
    softmax_kernels,
    tiles,
)
from lightning_mp.numerics.async_readback import AsyncReadback
from tests.fake_capture import CaptureError
from tests.fake_cuda import FakeCuda

DEVICE = torch.device("cuda", 0)
KERNELS = {
    lse_kernels: ("lse_kernel", "merge_kernel"),
    softmax_kernels: ("factors_kernel", "softmax_kernel"),
    pair_kernels: ("prepare_kernel", "terms_kernel", "finish_kernel"),
}


class _Launched:
    """Replaces a Triton kernel: enqueues a launch that computes nothing."""

    def __init__(self, gpu: FakeCuda, name: str) -> None:
        self._gpu, self._name = gpu, name

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self._gpu._launch(self._name, 1e-5)


@pytest.fixture
def triton_launches(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, _Launched(gpu, name))
    monkeypatch.setattr(block, "add_product", lambda *args: gpu._launch("product", 1e-5))
    return gpu


def test_captured_graph_contains_no_sync_and_no_pageable_copy(gpu: FakeCuda) -> None:
    x, pinned, readback = torch.ones(3, device="cuda"), torch.ones(3).pin_memory(), AsyncReadback()
    readback.submit(0, x)
    refused = {
        "item": lambda: x.sum().item(),
        "pageable": lambda: torch.ones(3).to(DEVICE),
        "look": readback.ready,
        "wait": torch.cuda.synchronize,
        "pin": lambda: torch.ones(3).pin_memory(),
        "other stream": lambda: torch.cuda.Stream().record_event(),
    }
    for ask in refused.values():
        with gpu.capture(), pytest.raises(CaptureError):
            ask()
    with gpu.capture() as captured:
        (pinned.to(DEVICE, non_blocking=True) + x).sum()
    assert captured == ["copy", "add", "sum"]


@pytest.mark.parametrize("scale", [20.0, torch.tensor(20.0)], ids=["number", "tensor"])
def test_loss_and_its_backward_can_be_captured(gpu: FakeCuda, scale: float | Tensor) -> None:
    features = (F.normalize(torch.randn(24, 8), dim=1) for _ in range(2))
    inputs = [x.requires_grad_() for x in features]
    loss_fn = ContrastiveLoss()
    expected = loss_fn(*inputs, scale)
    expected.backward()
    leaves = [x.detach().to(DEVICE).requires_grad_() for x in inputs]
    scale = scale.to(DEVICE) if isinstance(scale, Tensor) else scale
    loss_fn(*leaves, scale).backward()  # the warm-up that `torch.cuda.graph` requires
    for leaf in leaves:
        leaf.grad = None
    with gpu.capture() as captured:
        loss = loss_fn(*leaves, scale)
        loss.backward()
    assert "contrastive_loss" in str(captured)
    assert torch.allclose(loss.detach().cpu(), expected.detach())
    for leaf, x in zip(leaves, inputs, strict=True):
        assert torch.allclose(leaf.grad.cpu(), x.grad)


@pytest.mark.parametrize("tile_dtype", ["auto", "fp32"])
@pytest.mark.parametrize("b", [256, 4096])
def test_small_batch_is_captured_in_few_launches(
    triton_launches: FakeCuda, b: int, tile_dtype: str
) -> None:
    gpu = triton_launches
    dtype = torch.bfloat16 if tile_dtype == "auto" else torch.float32
    image, text = (torch.zeros(b, 64, dtype=dtype, device="cuda") for _ in range(2))
    scale = torch.ones((), device="cuda")
    backend = TritonTiles(tile_dtype=tile_dtype, autotune=True, arch=90)
    plan = Plan(Request(image, text, scale), Ring([b]), backend, NeedsGrad(True, True, True))
    with gpu.capture() as captured:
        softmax_loss(plan)
    kernels = [name for name in captured if name.endswith("_kernel")]
    assert len(kernels) == 7
    # fp32 as two halves takes six products; tests/benchmarks counts torch's operations.
    assert captured.count("product") == (2 if tile_dtype == "auto" else 6)


def test_blocks_that_fill_the_device_can_be_captured(triton_launches: FakeCuda) -> None:
    image, text = (torch.zeros(4096, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    scale, backend = torch.ones((), device="cuda"), TritonTiles(2**21, arch=90)
    plan = Plan(Request(image, text, scale), Ring([4096]), backend, NeedsGrad(True, True, True))
    tiles._multiprocessors.cache_clear()
    with triton_launches.capture() as captured:
        softmax_loss(plan)
    tiles._multiprocessors.cache_clear()
    # 2^20 values are 1024 x 1024; as many rows as this fill the device.
    assert captured.count("softmax_kernel") == 16
    assert captured.count("product") == 32


@pytest.mark.parametrize("is_softmax", [True, False])
def test_positives_on_the_host_take_no_host_sync(gpu: FakeCuda, is_softmax: bool) -> None:
    image, text = torch.randn(20, 8, device="cuda"), torch.randn(25, 8, device="cuda")
    positives, scale = torch.randint(-1, 25, (20, 3)), torch.ones((), device="cuda")
    needs = (True, True, True, False, False)
    request = Request(
        image, text, scale, positives=positives, backend="torch", is_softmax=is_softmax,
        needs_grad=needs,
    )  # fmt: skip
    syncs = gpu.syncs
    _operator._compute(agreed_plan(request))
    assert gpu.syncs == syncs
