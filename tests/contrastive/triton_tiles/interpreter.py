"""Shared by the interpreted tests: repairs of Triton's CPU interpreter, and shards with references.

Compiled kernels do not have the interpreter's faults; `test_interpreted_repairs.py` shows each one.

Shapes:
    b: rows. m: columns. D: width.
"""

import contextlib
import dataclasses
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_mp.contrastive._tiles.tile_backend import Derivatives, Logits, Vectors
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
    "force_variant",
    "gradient_error",
    "make_shard",
    "repaired_interpreter",
    "shard_of",
]

# Error of log-sum-exps against float64, in nats, for logits of up to +-100: fp32 values near
# 100 log2(e) are 1.5e-5 apart, and a logit is rounded about three times.
LSE_ERROR = 6e-5
# Largest result of `gradient_error`. A softmax value has the rounding error of its 16-bit dtype,
# half a unit in the last place (2^-8 or 2^-11), and the error of its logit. For fp32 features the
# softmax is stored in two halves.
GRADIENT_ERROR = {torch.bfloat16: 4.1e-3, torch.float16: 6e-4, torch.float32: 8e-5}


def repaired_interpreter(rows: int | None = 64) -> Iterator[None]:
    """Repair the interpreter until the generator continues: the body of a fixture or a context.

    Loads and stores outside of the memory of a kernel's arguments, which would read other tensors
    on a GPU, raise an error. Small shards also launch both variants of the softmax kernel, as large
    shards do. The interpreter's time depends on the number of operations and not on their size, so
    integers are not checked for overflow one by one.

    Args:
        rows: Rows of a program of the kernels outside the sweeps; `None` for as few as on a GPU.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    repairs: list[tuple[object, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = [
        (interpreter.InterpreterBuilder, "create_dot", _with_wide_operands),
        (interpreter.InterpreterBuilder, "cast_impl", _with_rounding),
        (interpreter.InterpreterBuilder, "create_masked_load", _inside_of_arguments),
        (interpreter.InterpreterBuilder, "create_masked_store", _inside_of_arguments),
        (interpreter.InterpreterBuilder, "create_masked_load", _with_mask_of_bools),
        (interpreter.InterpreterBuilder, "create_masked_store", _with_mask_of_bools),
        (interpreter, "_patch_lang_tensor", _with_index),
        (interpreter.GridExecutor, "__call__", _without_warnings),
        (interpreter.GridExecutor, "__call__", _with_known_memory),
        (interpreter, "_get_np_dtype", _kept_by_name),
        (tl.block_type, "__init__", _kept_by_shape),
        (tl.tensor, "__init__", _kept_by_type),
        *((tl.constexpr, f"__{name}__", _with_tensors) for name in ("add", "sub", "mul")),
    ]
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for owner, name, repair in repairs:
            patch.setattr(owner, name, repair(getattr(owner, name)))
        # Patch the whole language once a test; the interpreter patches it at each launch and call.
        everything = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        stack.callback(interpreter._patch_lang(everything).restore)
        done = types.SimpleNamespace(restore=int)
        patch.setattr(interpreter, "_patch_lang", lambda function: done)
        builder = interpreter.interpreter_builder
        options = dataclasses.replace(builder.options, sanitize_overflow=False)
        patch.setattr(builder, "options", options)
        patch.setattr(tiles_module, "_HOST_BOUND", 0)
        if rows is not None:
            patch.setattr(pair_kernels, "_ROWS", rows)
            patch.setattr(pair_kernels, "_FINISH_ROWS", rows)
            patch.setattr(lse_kernels, "_MERGE_BLOCK", rows)
        # The tiles are so small that threads would only wait for each other.
        torch.set_num_threads(1)
        # Fills empty tensors with NaN; otherwise they often hold the results of an earlier call.
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic)
            torch.set_num_threads(threads)


def _with_wide_operands(create_dot: Callable[..., Any]) -> Callable[..., Any]:
    """Widen bf16 operands, which the interpreter multiplies as uint16 (triton#11584)."""
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
    """Round fp32 to the nearest bf16, ties to even; the interpreter truncates to 16 bits."""
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


def _with_mask_of_bools(access: Callable[..., Any]) -> Callable[..., Any]:
    """Cast masks to bool; a mask that a scalar is part of is int32, which triton 3.9 refuses."""
    from triton.runtime.interpreter import TensorHandle

    position = list(inspect.signature(access).parameters).index("mask")

    @functools.wraps(access)
    def repaired(*args: Any, **options: Any) -> Any:
        mask = args[position]
        if isinstance(mask, TensorHandle):  # loads by descriptors pass arrays before triton 3.9
            mask.data = mask.data.astype(bool, copy=False)
        return access(*args, **options)

    return repaired


_MEMORY: list[tuple[int, int]] = []
"""First address of each argument of the kernel that runs, and the one behind its memory."""


def _with_known_memory(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Remember where the arguments of a kernel are."""

    @functools.wraps(launch)
    def repaired(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = (getattr(x, "base", x) for x in (*args, *kwargs.values()))  # of descriptors
        memories = (x.untyped_storage() for x in tensors if isinstance(x, Tensor))
        _MEMORY[:] = {(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in memories}
        if "contrastive" not in self.fn.__module__:  # takes addresses from tables
            _MEMORY[:] = [(0, 2**63)]
        return launch(self, *args, **kwargs)

    return repaired


def _inside_of_arguments(access: Callable[..., Any]) -> Callable[..., Any]:
    """Raise for addresses outside of the memory of all arguments."""
    from triton.runtime.interpreter import TensorHandle

    place = list(inspect.signature(access).parameters).index("mask")

    @functools.wraps(access)
    def repaired(*args: Any, **options: Any) -> Any:
        pointers, mask = args[1], args[place]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        mask = mask.data if isinstance(mask, TensorHandle) else mask  # an array of a descriptor
        first = pointers.data[np.broadcast_to(mask.astype(bool), pointers.data.shape)]
        if first.size:
            least, end = int(first.min()), int(first.max()) + size
            is_inside = any(start <= least and end <= stop for start, stop in _MEMORY)
            assert is_inside, f"{access.__name__} outside of all arguments"
        return access(*args, **options)

    return repaired


def _with_index(patch_tensor: Callable[..., None]) -> Callable[..., None]:
    """Make scalars usable as indices: they are arrays, and numpy 2.4 has no `int(array([3]))`."""

    @functools.wraps(patch_tensor)
    def repaired(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        # The scope of the patches restores `__index__`, so this replacement ends with them.
        tensor.__index__ = lambda self: int(self.handle.data.item())

    return repaired


def _with_tensors(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a tensor from a constant and a tensor; before triton 3.9 it was inside a constant."""
    from triton import language as tl

    @functools.wraps(operator)
    def repaired(self: Any, other: Any) -> Any:
        result = operator(self, other)
        return result.value if isinstance(result.value, tl.tensor) else result

    return repaired


def _kept_by_name(dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache the numpy dtype of each dtype; the interpreter builds a table of all at each lookup."""
    known: dict[str, Any] = {}

    @functools.wraps(dtype_of)
    def repaired(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = dtype_of(dtype)
        return known[name]

    return repaired


def _kept_by_shape(init: Callable[..., None]) -> Callable[..., None]:
    """Construct each type of a block once; an operation constructs several."""
    known: dict[Any, dict[str, Any]] = {}

    @functools.wraps(init)
    def repaired(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        if key not in known:
            init(self, element_ty, shape)
            known[key] = vars(self)
        self.__dict__ = known[key].copy()

    return repaired


def _kept_by_type(init: Callable[..., None]) -> Callable[..., None]:
    """Construct the shape of a tensor of each type once."""
    known: dict[str, dict[str, Any]] = {}

    @functools.wraps(init)
    def repaired(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            init(self, handle, type)
            known[type.name] = vars(self)
        self.__dict__ = known[type.name] | {"handle": handle}

    return repaired


def _without_warnings(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Run kernels without numpy's warnings about log2(0), overflow and NaN, as on a GPU."""

    @functools.wraps(launch)
    def repaired(*args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # nanmax of nothing but NaN
            return launch(*args, **kwargs)

    return repaired


@dataclasses.dataclass
class Shard:
    """One shard, and the expected results of the sweeps in float64.

    Args:
        logits: `scale * rows @ columns.T`, positives included.
        positives: Mask of the positives.
        start: Log-sum-exps of rows and columns to which the sweep adds; some are as large as the
            shard's, some are -inf.
        lse: Log-sum-exps for the gradients, of positives, negatives and further shards.
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
        """The argument of the sweeps."""
        return Logits(self.rows, self.columns, self.scale, self.diagonal)

    def lse_sweep(self, tiles: Any) -> tuple[Tensor, Tensor]:
        """Return `start` with the shard added by a backend."""
        lses = Vectors(*(lse.clone() for lse in self.start))
        tiles.lse_sweep(self.swept, lses)
        return lses

    def grad_sweep(self, tiles: Any) -> tuple[Tensor, Tensor]:
        """Return the gradients that a backend adds to zeros."""
        gradients = Derivatives(torch.zeros(self.rows.shape), torch.zeros(self.columns.shape))
        tiles.grad_sweep(self.swept, Vectors(*self.lse), gradients)
        return gradients

    def lse_error(self, lses: tuple[Tensor, Tensor]) -> float:
        """Return the largest error of the log-sum-exps of `lse_sweep`, in nats."""
        errors = []
        for lse, start, dim in zip(lses, self.start, (1, 0), strict=True):
            expected = torch.logaddexp(start, self.negatives.logsumexp(dim))
            errors.append((lse - expected).abs().where(lse != expected, 0.0))
        return torch.cat(errors).amax().item()

    def grad_error(self, gradients: tuple[Tensor, Tensor]) -> float:
        """Return the largest `gradient_error` of the result of `grad_sweep`."""
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
    """Return a shard of random normalized features."""
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
    """Return the largest error of a row of `softmax @ features`, relative to its terms.

    The error of row i is divided by `sum_j P_ij |features_j|`, because the terms may cancel, or by
    a thousandth of the largest such sum if that is larger.
    """
    features = features.double()
    terms = softmax @ features.norm(dim=1)
    errors = (gradient.double() - softmax @ features).norm(dim=1)
    floor = max(1e-3 * terms.amax().item(), torch.finfo(torch.float64).tiny)
    return (errors / terms.clamp_min(floor)).amax().item()


def force_variant(monkeypatch: pytest.MonkeyPatch, *, is_wide: bool) -> None:
    """Make all gradient sweeps use one variant of the softmax kernel, for any log-sum-exps."""
    original = SoftmaxFactors.of

    def forced(*arguments: Any, **options: Any) -> SoftmaxFactors:
        flag = torch.tensor([int(is_wide)], dtype=torch.int32)
        return dataclasses.replace(original(*arguments, **options), is_wide=flag)

    monkeypatch.setattr(SoftmaxFactors, "of", forced)
