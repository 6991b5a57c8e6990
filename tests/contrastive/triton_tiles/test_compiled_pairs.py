"""The kernels of the pairs and of the softmax's factors, compiled without a GPU."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from lightning_mp.contrastive._tiles.triton_tiles.pair_kernels import finish, pair_terms, prepare
from lightning_mp.contrastive._tiles.triton_tiles.softmax_kernels import SoftmaxFactors
from tests.contrastive.triton_tiles.compiling import Compiled, compiler

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Request:
    """A kernel for features of a dtype on a chip, as `compiling` wants it."""

    kernel: str
    arch: int
    dtype: torch.dtype
    always_wide: bool = False
    parts: int = 1

    def __str__(self) -> str:
        of = str(self.dtype).removeprefix("torch.") + "-wide" * self.always_wide
        return f"sm{self.arch}-{self.kernel}-{of}-{self.parts}"


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OF_FEATURES = [
    Request(kernel, arch, dtype)
    for kernel in ("prepare_kernel", "finish_kernel")
    for arch, dtype in ((80, FP32), (90, BF16), (90, FP32), (100, BF16), (120, FP16))
]
OF_VECTORS = [
    Request(kernel, arch, BF16)
    for kernel in ("terms_kernel", "factors_kernel")
    for arch in (80, 90, 100, 120)
] + [
    Request("factors_kernel", 90, BF16, always_wide=True),
    Request("terms_kernel", 90, BF16, parts=256),
]
# The largest of what programs have, and how many have come: never a gradient.
COUNTING = ("prepare_kernel", "factors_kernel")


def _launch(request: Request) -> None:
    features = torch.zeros(2, 64, 512, dtype=request.dtype)
    vectors, scale = torch.zeros(3, 64, dtype=torch.float64), torch.ones(())
    row, parts, value = vectors[0], vectors[1].expand(request.parts, -1), vectors[0, 0]
    prepare(*features, scale)
    pair_terms(row, parts, vectors[2], (True, True), 128, value)
    SoftmaxFactors.of(*vectors[:2], scale, 0, always_wide=request.always_wide)
    finish(*features, *torch.zeros(2, 64, 512), row, scale, 128, 1, value)


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config) -> Iterator[Callable[[Request], Compiled]]:
    with compiler(pytestconfig, _launch) as compile_:
        yield compile_


@pytest.mark.parametrize("request_", OF_FEATURES + OF_VECTORS, ids=str)
def test_kernel_keeps_everything_in_registers_and_only_integers_are_atomic(
    compiled: Callable[[Request], Compiled], request_: Request
) -> None:
    kernel = compiled(request_)
    assert not kernel.is_spilled
    assert kernel.complaints == ()
    assert kernel.fuses
    assert {name.split(".")[-1] for name in kernel.atomics} <= {"s32", "u32"}
    counts = request_.kernel in COUNTING and not request_.always_wide
    assert bool(kernel.atomics) == counts


@pytest.mark.parametrize("request_", OF_FEATURES, ids=str)
def test_kernel_reads_whole_vectors(
    compiled: Callable[[Request], Compiled], request_: Request
) -> None:
    kernel = compiled(request_)
    assert kernel.instructions["LDG.E.128"] + kernel.count("LDGSTS") > 0
