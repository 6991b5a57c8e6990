"""What interpreted tests share: Triton's CPU interpreter with its faults repaired, and shards.

Compiled kernels have none of these faults; `test_interpreted_repairs.py` shows each of them.

Shapes:
    b: rows. m: columns. D: width.
"""

import dataclasses
import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_mp.contrastive._tiles.tile_backend import Logits
from lightning_mp.contrastive._tiles.triton_tiles import (
    lse_kernels,
    pair_kernels,
)
from lightning_mp.contrastive._tiles.triton_tiles import tiles as tiles_module
from lightning_mp.contrastive._tiles.triton_tiles.softmax_kernels import SoftmaxFactors

__all__ = [
    "GRADIENT_ERROR",
    "LSE_ERROR",
    "Shard",
    "force_twin",
    "gradient_error",
    "make_shard",
    "repaired_interpreter",
    "shard_of",
]

# Of float64 log-sum-exps, in nats, where logits reach +-100: fp32 values around 100 log2(e) are
# 1.5e-5 apart, and a logit is rounded about three times.
LSE_ERROR = 6e-5
# As `gradient_error` gives it. A softmax value is off by half a unit in the last place of the
# 16-bit format, 2^-8 or 2^-11, and like its logit; that of fp32 features is kept in two halves.
GRADIENT_ERROR = {torch.bfloat16: 4.1e-3, torch.float16: 6e-4, torch.float32: 8e-5}


def repaired_interpreter(rows: int | None = 64) -> Iterator[None]:
    """Repair the interpreter until the generator goes on: the body of a fixture or a context.

    Shards are swept as large ones are, with both twins, however small they are. Time goes by the
    number of operations, whatever their size: integers are not checked for overflow one by one.

    Args:
        rows: What a program takes that works beside the sweeps; `None` for as few as on a GPU.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    repairs: list[tuple[object, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = [
        (interpreter.InterpreterBuilder, "create_dot", _with_wide_operands),
        (interpreter.InterpreterBuilder, "cast_impl", _with_rounding),
        (interpreter, "_patch_lang_tensor", _with_index),
        (interpreter.GridExecutor, "__call__", _without_warnings),
        (interpreter, "_patch_lang", _once_a_launch),
        (interpreter, "_get_np_dtype", _kept_by_name),
        *((tl.constexpr, f"__{name}__", _with_tensors) for name in ("add", "sub", "mul")),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, repair in repairs:
            patch.setattr(owner, name, repair(getattr(owner, name)))
        builder = interpreter.interpreter_builder
        options = dataclasses.replace(builder.options, sanitize_overflow=False)
        patch.setattr(builder, "options", options)
        patch.setattr(tiles_module, "_HOST_BOUND", 0)
        if rows is not None:
            patch.setattr(pair_kernels, "_ROWS", rows)
            patch.setattr(pair_kernels, "_FINISH_ROWS", rows)
            patch.setattr(lse_kernels, "_MERGE_BLOCK", rows)
        # The tiles are small: threads would only wait for each other.
        torch.set_num_threads(1)
        # Fills empty tensors with NaN. They would often hold what an earlier call had written.
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic)
            torch.set_num_threads(threads)


def _with_wide_operands(create_dot: Callable[..., Any]) -> Callable[..., Any]:
    """Widen bf16, which is stored as uint16 and would be multiplied as such (triton#11584)."""
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = np.left_shift(handle.data, 16, dtype=np.uint32)
        return TensorHandle(bits.view(np.float32), tl.float32)

    @functools.wraps(create_dot)
    def repaired(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return create_dot(self, widened(left), widened(right), *rest)

    return repaired


def _with_rounding(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Round fp32 to the nearest bf16, ties to even; the interpreter cuts 16 bits off."""
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

    @functools.wraps(cast)
    def repaired(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, source, to)
        values = torch.from_numpy(np.array(source.data, dtype=np.float32))
        bits = values.bfloat16().view(torch.int16).numpy().view(np.uint16)
        return TensorHandle(bits, tl.bfloat16)

    return repaired


def _with_index(patch_tensor: Callable[..., None]) -> Callable[..., None]:
    """Let scalars be counted with: they are arrays, and numpy 2.4 has no `int(array([3]))`."""

    @functools.wraps(patch_tensor)
    def repaired(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        # Triton takes its own `__index__` back after the launch, and this one with it.
        tensor.__index__ = lambda self: int(self.handle.data.item())

    return repaired


def _with_tensors(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Let a constant and a tensor make a tensor; before triton 3.9 they made a constant of one."""
    from triton import language as tl

    @functools.wraps(operator)
    def repaired(self: Any, other: Any) -> Any:
        result = operator(self, other)
        return result.value if isinstance(result.value, tl.tensor) else result

    return repaired


def _once_a_launch(patch_language: Callable[..., Any]) -> Callable[..., Any]:
    """Patch Triton's language as a launch begins; each call of a function did it again, slowly.

    What a function's module lacks of the language, those of others have: all of it is patched.
    """
    from triton import language as tl
    from triton.runtime.interpreter import GridExecutor

    everything = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    @functools.wraps(patch_language)
    def repaired(function: Any) -> Any:
        is_launch = isinstance(sys._getframe(1).f_locals.get("self"), GridExecutor)
        return patch_language(everything) if is_launch else types.SimpleNamespace(restore=int)

    return repaired


def _kept_by_name(dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Look up a dtype's array dtype once; each of its operations made a table of all."""
    known: dict[str, Any] = {}

    @functools.wraps(dtype_of)
    def repaired(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = dtype_of(dtype)
        return known[name]

    return repaired


def _without_warnings(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Run kernels as a GPU does: log2(0), overflow and NaN are values to go on with."""

    @functools.wraps(launch)
    def repaired(*args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # nanmax of nothing but NaN
            return launch(*args, **kwargs)

    return repaired


@dataclasses.dataclass
class Shard:
    """One shard with what the sweeps are to make of it, in float64.

    Args:
        logits: `scale * rows @ columns.T`, positives included.
        positives: Where the positives are.
        start: Log-sum-exps of rows and columns to add to: some as large as the shard's, some -inf.
        lse: Log-sum-exps for the gradients: positives included, and a little more.
    """

    rows: Tensor
    columns: Tensor
    scale: Tensor
    diagonal: int | None
    logits: Tensor
    positives: Tensor
    start: tuple[Tensor, Tensor]
    lse: tuple[Tensor, Tensor]

    @property
    def negatives(self) -> Tensor:
        """The logits without the positives."""
        return self.logits.masked_fill(self.positives, -torch.inf)

    @property
    def softmax(self) -> Tensor:
        """P, the sum of both softmaxes without the positives."""
        row_lse, column_lse = self.lse
        softmax = (self.logits - row_lse[:, None]).exp() + (self.logits - column_lse).exp()
        return softmax.masked_fill(self.positives, 0.0)

    @property
    def swept(self) -> Logits:
        """What the sweeps take."""
        return Logits(self.rows, self.columns, self.scale, self.diagonal)

    def lse_sweep(self, tiles: Any) -> tuple[Tensor, Tensor]:
        """Return what a backend makes of `start`."""
        row_lse, column_lse = (lse.clone() for lse in self.start)
        tiles.lse_sweep(self.swept, row_lse, column_lse)
        return row_lse, column_lse

    def grad_sweep(self, tiles: Any) -> tuple[Tensor, Tensor]:
        """Return the gradients that a backend adds up from zero."""
        gradients = torch.zeros(self.rows.shape), torch.zeros(self.columns.shape)
        tiles.grad_sweep(self.swept, *self.lse, *gradients)
        return gradients

    def lse_error(self, lses: tuple[Tensor, Tensor]) -> float:
        """Return the largest error of log-sum-exps that `lse_sweep` made of `start`, in nats."""
        errors = []
        for lse, start, dim in zip(lses, self.start, (1, 0), strict=True):
            expected = torch.logaddexp(start, self.negatives.logsumexp(dim))
            errors.append((lse - expected).abs().where(lse != expected, 0.0))
        return torch.cat(errors).amax().item()

    def grad_error(self, gradients: tuple[Tensor, Tensor]) -> float:
        """Return the largest `gradient_error` of what `grad_sweep` added up."""
        return max(
            gradient_error(gradients[0], self.softmax, self.columns),
            gradient_error(gradients[1], self.softmax.T, self.rows),
        )


def make_shard(
    b: int,
    m: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    scale: float = 100.0,
    diagonal: int | None = 0,
) -> Shard:
    """Return a shard of normalised features, fresh random ones."""
    rows, columns = (normalize(torch.randn(n, width), dim=1).to(dtype) for n in (b, m))
    return shard_of(rows, columns, scale, diagonal)


def shard_of(rows: Tensor, columns: Tensor, scale: float, diagonal: int | None = 0) -> Shard:
    """Return a shard of given features."""
    scale_fp32 = torch.tensor(scale)
    logits = scale_fp32.double() * rows.double() @ columns.double().T
    offsets = torch.arange(len(columns)) - torch.arange(len(rows))[:, None]
    positives = offsets == diagonal if diagonal is not None else torch.zeros_like(offsets).bool()
    lses = [logits.masked_fill(positives, -torch.inf).logsumexp(dim) for dim in (1, 0)]
    starts = [lse.nan_to_num(neginf=0.0) + torch.randn(len(lse)) for lse in lses]
    for start in starts:
        start[::3] = -torch.inf
    row_lse, column_lse = (logits.logsumexp(dim) + torch.rand(()).double() for dim in (1, 0))
    return Shard(
        rows, columns, scale_fp32, diagonal, logits, positives,
        (starts[0], starts[1]), (row_lse, column_lse),
    )  # fmt: skip


def gradient_error(gradient: Tensor, softmax: Tensor, features: Tensor) -> float:
    """Return the largest error of a row of `softmax @ features`, relative to what it is made of.

    That is `sum_j P_ij |features_j|`, so that the sum may cancel; rows below a thousandth of the
    largest are held to that.
    """
    features = features.double()
    made_of = softmax @ features.norm(dim=1)
    errors = (gradient.double() - softmax @ features).norm(dim=1)
    floor = max(1e-3 * made_of.amax().item(), torch.finfo(torch.float64).tiny)
    return (errors / made_of.clamp_min(floor)).amax().item()


def force_twin(monkeypatch: pytest.MonkeyPatch, *, is_wide: bool) -> None:
    """Send all gradient sweeps to one of the twins, whatever the log-sum-exps."""
    original = SoftmaxFactors.of

    def forced(*arguments: Any, **options: Any) -> SoftmaxFactors:
        flag = torch.tensor([int(is_wide)], dtype=torch.int32)
        return dataclasses.replace(original(*arguments, **options), is_wide=flag)

    monkeypatch.setattr(SoftmaxFactors, "of", forced)
