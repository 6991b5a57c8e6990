"""The kernel of `row_dots`, compiled without a GPU: no spills, vector loads, no atomics."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from lightning_mp.numerics.row_dots import fused_row_dots
from tests.contrastive.triton_tiles.compiling import Compiled, compiler

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Request:
    """The kernel for two dtypes on a chip, in the form that `compiling` expects."""

    arch: int
    left: torch.dtype
    right: torch.dtype
    kernel: str = "row_dots_kernel"

    def __str__(self) -> str:
        return f"sm{self.arch}-{self.left}-{self.right}".replace("torch.", "")


# Dtypes of positives: features; features and their fp32 gradients.
REQUESTS = [
    Request(80, torch.bfloat16, torch.bfloat16),
    Request(90, torch.float16, torch.float32),
    Request(90, torch.float32, torch.float32),
]


def _launch(request: Request) -> None:
    left, right = (torch.zeros(64, 512, dtype=dtype) for dtype in (request.left, request.right))
    fused_row_dots(left, right)


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config) -> Iterator[Callable[[Request], Compiled]]:
    with compiler(pytestconfig, _launch) as compile_:
        yield compile_


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_kernel_reads_vectors_and_spills_no_registers(
    compiled: Callable[[Request], Compiled], request_: Request
) -> None:
    kernel = compiled(request_)
    assert not kernel.is_spilled
    assert kernel.complaints == ()
    assert kernel.atomics == ()
    # 8 values per thread and matrix, in loads of 16 bytes.
    vectors = sum(8 * dtype.itemsize // 16 for dtype in (request_.left, request_.right))
    assert kernel.count("LDG") == kernel.instructions["LDG.E.128"] >= vectors
