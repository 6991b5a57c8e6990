"""The kernels of `tensor_stats`, compiled without a GPU: no spills, vector loads, no atomics.

The kernels that the launcher requests are compiled here for A100 and H100.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from lightning_mp.numerics.stats_kernels import fused_stats
from tests.contrastive.triton_tiles.compiling import Compiled, compiler
from tests.contrastive.triton_tiles.kernel_checks import CHIPS

pytestmark = pytest.mark.slow

# dtypes differ in how values are widened; architectures hardly differ.
FORMATS = {80: (torch.float32, torch.bfloat16), 90: (torch.float32, torch.float16)}
# Programs of 128 threads with at least 16 bytes in flight per thread. An A100 needs 10 KiB in
# flight per multiprocessor: 2 TB/s times a latency of 0.5 microseconds over 108 multiprocessors.
PROGRAMS_AT_A_TIME = 5

Compile = Callable[["Request"], Compiled]


@dataclass(frozen=True)
class Request:
    """One kernel, in the form that `compiling` expects."""

    kernel: str
    arch: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"sm{self.arch}-{self.kernel}-{self.dtype}".replace("torch.", "")


STATS = [Request("stats_kernel", arch, dtype) for arch in FORMATS for dtype in FORMATS[arch]]
MERGES = [Request("merge_stats_kernel", arch) for arch in FORMATS]


def _launch(request: Request) -> None:
    fused_stats([torch.zeros(3000, dtype=request.dtype)], torch.ones(()))


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config) -> Iterator[Compile]:
    with compiler(pytestconfig, _launch) as compile_:
        yield compile_


kernels = pytest.mark.parametrize("request_", STATS + MERGES, ids=str, scope="module")
stats = pytest.mark.parametrize("request_", STATS, ids=str, scope="module")


@kernels
def test_kernel_spills_no_registers(compiled: Compile, request_: Request) -> None:
    kernel = compiled(request_)
    assert not kernel.is_spilled
    assert kernel.complaints == ()
    assert kernel.atomics == ()


@stats
def test_whole_blocks_are_read_in_vectors(compiled: Compile, request_: Request) -> None:
    kernel = compiled(request_)
    bytes_a_thread = 8 * request_.dtype.itemsize
    assert kernel.instructions["LDG.E.128"] == bytes_a_thread // 16


@stats
def test_occupancy_is_high_enough(compiled: Compile, request_: Request) -> None:
    assert CHIPS[request_.arch].programs(compiled(request_)) >= PROGRAMS_AT_A_TIME


@stats
def test_magnitudes_are_compared_as_integers(compiled: Compile, request_: Request) -> None:
    """Comparisons and arithmetic of fp32 may take subnormals for zeros; integers cannot."""
    floating = ("FSETP", "FSET", "FMNMX", "FADD", "FMUL", "FFMA")
    assert [name for name in floating if compiled(request_).count(name)] == []
    assert compiled(request_).count("ISETP") > 0
