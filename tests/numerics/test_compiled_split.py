"""The kernels of `split_weights`, compiled without a GPU: no spills, vector loads and stores."""

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_mp.numerics.split_kernels import fused_join, fused_split
from lightning_mp.numerics.split_weights import residual_unit
from tests.contrastive.triton_tiles.compiling import Compiled, compiler

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Request:
    """A kernel, in the form that `compiling` expects."""

    kernel: str
    arch: int
    half: torch.dtype


KERNELS = ("join_kernel", "split_kernel")
REQUESTS = [
    Request(kernel, arch, half)
    for kernel in KERNELS
    for arch, half in ((80, torch.bfloat16), (90, torch.float16))
]


def _launch(request: Request) -> None:
    unit = residual_unit(request.half)
    weight, residual = fused_split(torch.zeros(4096), request.half, unit)
    fused_join(weight, residual, unit)


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config) -> Iterator[Callable[[Request], Compiled]]:
    with compiler(pytestconfig, _launch) as compile_:
        yield compile_


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda x: f"sm{x.arch}-{x.kernel}-{x.half}")
def test_kernel_reads_and_writes_vectors_and_spills_no_registers(
    compiled: Callable[[Request], Compiled], request_: Request
) -> None:
    kernel = compiled(request_)
    assert not kernel.is_spilled
    assert kernel.complaints == ()
    assert kernel.shared_bytes == 0  # one layout for fp32 and half
    # Four elements per thread: 16 bytes in fp32 and 8 bytes in half precision.
    halves, fulls = ("LDG", "STG") if request_.kernel == "join_kernel" else ("STG", "LDG")
    assert kernel.count(halves) == kernel.instructions[f"{halves}.E.64"] == 2
    assert kernel.count(fulls) == kernel.instructions[f"{fulls}.E.128"] == 1
