"""The kernels of the fused step, compiled without a GPU.

Tests of numbers do not show spilled registers, or loads of 4 bytes instead of 16.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from lightning_mp.optim._adamw.adamw_kernels import NUM_WARPS
from lightning_mp.optim._adamw.foreach import AdamWOptions
from lightning_mp.optim._adamw.fused import fused_adamw_step
from tests.contrastive.triton_tiles.compiling import Compiled, compiler
from tests.optim.adamw_problems import BF16, FP16, FP32, OPTIONS, make_problem

pytestmark = pytest.mark.slow

# With 64 registers, 1024 threads fit on a multiprocessor, enough to keep its memory busy.
MOST_REGISTERS = 64


@dataclass(frozen=True)
class Request:
    """A kernel to compile: its name, the architecture, the dtypes and the options."""

    kernel: str
    arch: int
    half: torch.dtype
    grad: torch.dtype
    write_back: str = "nearest"
    rule: str = "adam"
    clip_update_rms: float | None = None
    is_scaled: bool = False

    def __str__(self) -> str:
        dtypes = (str(dtype).removeprefix("torch.") for dtype in (self.half, self.grad))
        extras = [*["clip"] * (self.clip_update_rms is not None), *["scale"] * self.is_scaled]
        parts = [f"sm{self.arch}", self.kernel, *dtypes, self.write_back, self.rule, *extras]
        return "-".join(parts)


def launch(request: Request) -> None:
    """Launch the kernels of a step; `compiling` records them without a device."""
    problem = make_problem(
        [(64,)], request.half, request.grad, has_residuals=request.write_back == "kahan"
    )
    flags = (torch.ones(()), torch.zeros(())) if request.is_scaled else (None, None)
    names = ("write_back", "rule", "clip_update_rms")
    options = {
        **OPTIONS,
        **{name: getattr(request, name) for name in names},
        "grad_scale": flags[0],
        "found_inf": flags[1],
    }
    fused_adamw_step(problem, AdamWOptions(**options))


STEPS = [
    Request("adamw_kernel", arch, *rest)
    for arch in (80, 90)
    for rest in [
        (FP32, FP32),
        (FP32, BF16, "nearest", "atan2", 1.0, True),
        (FP16, FP16, "kahan", "adam", None, True),
        (FP16, FP32, "kahan", "atan2", 1.0, True),
        (BF16, BF16, "kahan", "adam", 1.0),
        (BF16, FP32, "stochastic", "adam", None),
        (FP16, FP16, "stochastic", "atan2", 1.0, True),
    ]
]
SUMS = [
    Request("rms_kernel", arch, FP16, grad, "nearest", "adam", 1.0, True)
    for arch in (80, 90)
    for grad in (FP16, FP32)
]
Compile = Callable[[Request], Compiled]


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config) -> Iterator[Compile]:
    with compiler(pytestconfig, launch) as compile_:
        yield compile_


def requests(cases: list[Request]) -> pytest.MarkDecorator:
    """Return a parametrization; for 8.0, `make test` compiles the kernel with most registers."""
    gate = {case for case in cases if case.arch == 90} | {STEPS[6]}
    params = [pytest.param(case, marks=[pytest.mark.sweep] * (case not in gate)) for case in cases]
    return pytest.mark.parametrize("request_", params, ids=str, scope="module")


kernels, steps = requests(STEPS + SUMS), requests(STEPS)


@kernels
def test_kernel_spills_no_registers(compiled: Compile, request_: Request) -> None:
    kernel = compiled(request_)
    assert not kernel.is_spilled
    assert kernel.complaints == ()
    assert kernel.threads == 32 * NUM_WARPS
    assert kernel.registers <= MOST_REGISTERS


@kernels
def test_only_aligned_blocks_are_read_in_vectors(compiled: Compile, request_: Request) -> None:
    """A thread reads 16 bytes of fp32 and 8 bytes of half tensors; other blocks are masked."""
    kernel = compiled(request_)
    is_step, has_residual = request_ in STEPS, request_.write_back == "kahan"
    states = 2 if is_step else 1
    weights = [request_.half] * ((1 + has_residual) * is_step)
    read, written = [request_.grad, *[FP32] * states, *weights], [*[FP32] * states, *weights]
    for name, dtypes in (("LDG", read), ("STG", written * is_step)):
        wide = sum(dtype == FP32 for dtype in dtypes)
        found = {one: n for one, n in kernel.instructions.items() if one.startswith(name)}
        assert sum(n for one, n in found.items() if one.endswith(".128")) == wide
        # In a masked block, a thread has two instructions for each half tensor.
        masked = sum(n for one, n in found.items() if one.endswith(".U16"))
        assert masked == 2 * (len(dtypes) - wide)
    if is_step:
        halves = len(written) - sum(dtype == FP32 for dtype in written)
        stores = {one: n for one, n in kernel.instructions.items() if one.startswith("STG")}
        assert sum(n for one, n in stores.items() if one.endswith(".64")) == halves


@steps
def test_values_do_not_pass_through_shared_memory(compiled: Compile, request_: Request) -> None:
    kernel = compiled(request_)
    if request_.write_back == "stochastic":
        # Masked blocks have fewer groups of four than threads, so threads exchange the noise.
        assert kernel.shared_bytes <= 4 * 32 * NUM_WARPS * 2
    else:
        of_warps = 4 * NUM_WARPS  # partial sums for clipping
        assert kernel.shared_bytes <= of_warps * (request_.clip_update_rms is not None)


@kernels
def test_kernel_uses_no_atomics(compiled: Compile, request_: Request) -> None:
    kernel = compiled(request_)
    assert kernel.atomics == ()
    assert not [one for one in kernel.instructions if one.startswith(("ATOM", "RED."))]


@kernels
def test_kernel_computes_nothing_in_float64(compiled: Compile, request_: Request) -> None:
    """Consumer chips have a 64th of their rate in float64."""
    kernel = compiled(request_)
    assert not [one for one in kernel.instructions if one in ("DADD", "DMUL", "DFMA")]
    assert kernel.count("FFMA") > 0
