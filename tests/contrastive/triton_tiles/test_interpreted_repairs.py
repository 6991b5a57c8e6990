"""Faults of Triton's interpreter, and their repairs for interpreted tests."""

import contextlib
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.contrastive.triton_tiles.interpreter import repaired_interpreter

pytestmark = pytest.mark.interpreted(repaired=False)

_repaired = contextlib.contextmanager(repaired_interpreter)


@triton.jit
def _dot_kernel(left, right, product, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = row * SIZE + column
    tl.store(product + at, tl.dot(tl.load(left + at), tl.load(right + at)))


@triton.jit
def _round_kernel(source, rounded, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(rounded + at, tl.load(source + at).to(tl.bfloat16))


@triton.jit
def _count_kernel(first, past_last, total):
    count = 0
    for index in range(tl.load(first), tl.load(past_last)):
        count += index
    tl.store(total, count)


@triton.jit
def _log_kernel(source, logs, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(logs + at, tl.log2(tl.load(source + at)))


_TWO = tl.constexpr(2.0)


@triton.jit
def _constant_kernel(source, doubled, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    twice = _TWO * tl.load(source + at)
    tl.store(doubled + at, tl.where(twice > twice - 1, twice, 0.0))


def _multiplies_bf16() -> bool:
    left, right = torch.randn(2, 16, 16).bfloat16()
    product = torch.empty(16, 16)
    _dot_kernel[(1,)](left, right, product, SIZE=16)
    return torch.allclose(product, left.float() @ right.float(), rtol=1e-5, atol=1e-5)


def _edge_values() -> Tensor:
    """Return fp32 values around every kind of rounding: ties, carries, overflow, subnormals."""
    values = torch.cat([torch.randn(1024) * 10.0 ** torch.randint(-45, 39, (1024,)), _ties()])
    special = torch.tensor([0.0, -0.0, 3.4e38, -3.4e38, 1e-45, torch.inf, -torch.inf, torch.nan])
    return torch.cat([values, special])


def _ties() -> Tensor:
    bits = torch.randint(-(2**15), 2**15, (1016,), dtype=torch.int32) * 2**16 + 2**15
    return bits.view(torch.float32)


def _rounds_to_nearest() -> bool:
    source = _edge_values()
    rounded = torch.empty(2048, dtype=torch.bfloat16)
    _round_kernel[(1,)](source, rounded, SIZE=2048)
    return torch.allclose(rounded, source.bfloat16(), rtol=0, atol=0, equal_nan=True)


def _counts_with_scalars() -> bool:
    first, past_last, total = (torch.tensor([x], dtype=torch.int32) for x in (3, 7, 0))
    try:
        _count_kernel[(1,)](first, past_last, total)
    except triton.runtime.errors.InterpreterError:
        return False
    return total.item() == 3 + 4 + 5 + 6


def _takes_the_logarithm_of_zero() -> bool:
    logs = torch.empty(2)
    try:
        _log_kernel[(1,)](torch.tensor([0.0, 8.0]), logs, SIZE=2)
    except triton.runtime.errors.InterpreterError:  # pytest makes numpy's warnings errors
        return False
    return logs.tolist() == [-torch.inf, 3.0]


def _multiplies_constants_with_tensors() -> bool:
    source, doubled = torch.randn(8), torch.empty(8)
    try:
        _constant_kernel[(1,)](source, doubled, SIZE=8)
    except triton.runtime.errors.InterpreterError:
        return False
    return torch.equal(doubled, 2 * source)


@pytest.mark.parametrize(
    "works",
    [
        _multiplies_bf16,
        _rounds_to_nearest,
        _counts_with_scalars,
        _takes_the_logarithm_of_zero,
        _multiplies_constants_with_tensors,
    ],
)
def test_repair_is_needed_effective_and_undone(works: Callable[[], bool]) -> None:
    if works():
        pytest.skip("this version of Triton and numpy does not have the fault")
    with _repaired():
        assert works()
    assert not works()


def test_repaired_interpreter_runs_torch_in_one_thread_and_restores_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with _repaired():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_load_outside_of_all_arguments_raises() -> None:
    source, rounded = torch.zeros(16), torch.zeros(16, dtype=torch.bfloat16)
    with _repaired():
        _round_kernel[(1,)](source, rounded, SIZE=16)
        with pytest.raises(Exception, match="outside of all arguments"):
            _round_kernel[(1,)](source[:8].clone(), rounded, SIZE=16)
