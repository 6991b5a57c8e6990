"""Tables of tensor addresses that the kernels of `adamw_kernels` read on the device.

Legend: a *template* depends only on weights, states and step counts; a *table* also holds the
addresses of gradients, which change between steps.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_mp.numerics.async_readback import send
from lightning_mp.optim._adamw.adamw_kernels import CHUNK, MAX_PARTS, ROWS

__all__ = ["Tables", "tables_for_capture", "tables_of"]

_Value = TypeVar("_Value")
_Positions: TypeAlias = tuple[tuple[int, int], ...]
_GRADS = ROWS.index("grad")
_IS_ALIGNED = ROWS.index("is_aligned")
_DTYPES = torch.float16, torch.bfloat16, torch.float32
# Per group and dtype, whose parameters with a gradient may vary; a table takes 88 bytes per tensor.
_MAX_TEMPLATES = 32
_MAX_TABLES = 32


class Tables(NamedTuple):
    """Device tensors that the kernels read."""

    table: Tensor  # see `adamw_kernels.ROWS`
    chunks: Tensor  # int32, tensor and chunk index of each program of `adamw_kernel`
    parts: Tensor  # int32, tensor and part index of each program of `rms_kernel`


@contextlib.contextmanager
def tables_of(lists: Sequence[list[Tensor]], steps: list[Tensor]) -> Iterator[Tables]:
    """Yield the tables of a step on `AdamWBatch.lists`.

    A tensor whose memory layout differs from its weight's is replaced by a copy, which is copied
    back afterwards.
    """
    # If no address has changed since an earlier step, its tables are reused.
    key = _key_of(lists, steps)
    templates = _templates.setdefault(steps[0], OrderedDict())
    template = _cached(templates, key, _MAX_TEMPLATES, lambda: _TableTemplate.of(lists, steps))
    tables, mismatched = template.tables_of(lists)
    if not mismatched:
        yield tables
        return
    dense_lists = [list(each) for each in lists]
    for row, index in mismatched:
        tensor = lists[row][index]
        dense = torch.empty_like(lists[0][index], dtype=tensor.dtype)
        dense_lists[row][index] = dense.copy_(tensor)
    yield _TableTemplate.of(dense_lists, steps).tables_of(dense_lists)[0]
    for row, index in mismatched:
        if row != _GRADS:
            lists[row][index].copy_(dense_lists[row][index])


@dataclass(frozen=True)
class _TableTemplate:
    """The part of the tables that does not depend on gradients."""

    rows: Tensor  # table without gradients, on the host
    chunks: Tensor  # see `Tables`
    parts: Tensor  # see `Tables`
    # Strides of the weights if weights and states are dense and have the same layout.
    strides: tuple[tuple[int, ...], ...] | None
    # Tables by addresses and strides of the gradients, with the positions that need a copy.
    tables: OrderedDict[Any, tuple[Tables, _Positions]] = field(default_factory=OrderedDict)

    @classmethod
    def of(cls, lists: Sequence[list[Tensor]], steps: list[Tensor]) -> "_TableTemplate":
        """Check the tensors and build the template."""
        _check(lists, steps)
        params, device = lists[0], lists[0][0].device
        sizes = torch.tensor([p.numel() for p in params])
        chunks = -(-sizes // CHUNK.value)
        parts = chunks.clamp_max(MAX_PARTS.value)
        quads = -(-sizes // 4)  # Philox draws noise for four elements at a time
        # Without residuals, their row is never read and may hold any addresses.
        kept = [*lists[:4], lists[-1]]
        addresses = torch.tensor([[tensor.data_ptr() for tensor in each] for each in kept])
        # The alignment of gradients is checked for each table because their addresses change.
        is_aligned = (addresses % 16 == 0).logical_or(torch.arange(5)[:, None] == _GRADS).all(0)
        rest = [
            torch.tensor([step.data_ptr() for step in steps]),
            sizes, is_aligned.long(), quads.cumsum(0) - quads, parts.cumsum(0) - parts, parts,
        ]  # fmt: skip
        is_dense = all(row == _GRADS for row, _ in _mismatched_layouts(lists))
        return cls(
            rows=torch.cat([addresses, torch.stack(rest)]),
            chunks=send(_tensor_and_piece(chunks), device),
            parts=send(_tensor_and_piece(parts), device),
            strides=tuple(map(Tensor.stride, params)) if is_dense else None,
        )

    def tables_of(self, lists: Sequence[list[Tensor]]) -> tuple[Tables, _Positions]:
        """Return the tables for these gradients and the positions of tensors that need a copy."""
        addresses, strides = key = _key_of_grads(lists)

        def make() -> tuple[Tables, _Positions]:
            rows = self.rows.clone()
            rows[_GRADS] = torch.tensor(addresses)
            rows[_IS_ALIGNED] *= rows[_GRADS] % 16 == 0
            mismatched = () if strides == self.strides else tuple(_mismatched_layouts(lists))
            return Tables(send(rows, lists[0][0].device), self.chunks, self.parts), mismatched

        return _cached(self.tables, key, _MAX_TABLES, make)


# By the first step count of a batch, so that templates are freed with the optimizer.
_templates: MutableMapping[Tensor, OrderedDict[Any, _TableTemplate]] = WeakTensorKeyDictionary()
# CUDA graphs may be replayed at any time, so tables that they read are never freed.
_captured: list[Tables] = []


def tables_for_capture(lists: Sequence[list[Tensor]], steps: list[Tensor]) -> Tables | None:
    """Return permanent tables for a CUDA graph, or `None` if no earlier step has built them."""
    # A host-to-device copy would be captured and replayed from memory that is reused by then. So
    # the tables must exist before the capture; they may come from any stream, because the device is
    # idle when a capture begins.
    device, _, rest = _key_of(lists, steps)
    for key, template in _templates.get(steps[0], {}).items():
        if (key[0], key[2]) == (device, rest):
            tables, mismatched = template.tables.get(_key_of_grads(lists), (None, ()))
            if tables is not None and not mismatched:
                _captured.append(tables)
                return tables
    return None


def _key_of(
    lists: Sequence[list[Tensor]], steps: list[Tensor]
) -> tuple[torch.device, int | None, tuple[object, ...]]:
    """Return the device, the stream and everything else that a template depends on."""
    device = lists[0][0].device
    # A copy on one stream must not be read on another stream before it has finished.
    stream = torch.accelerator.current_stream(device).stream_id if device.type == "cuda" else None
    kept = [each for row, each in enumerate(lists) if row != _GRADS]
    return device, stream, (
        lists[0][0].dtype, lists[_GRADS][0].dtype,
        *(tuple(map(Tensor.data_ptr, each)) for each in (*kept, steps)),
        tuple(map(Tensor.stride, lists[0])), tuple(map(Tensor.numel, lists[0])),
    )  # fmt: skip


def _key_of_grads(lists: Sequence[list[Tensor]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    grads = lists[_GRADS]
    return tuple(map(Tensor.data_ptr, grads)), tuple(map(Tensor.stride, grads))


def _cached(
    cache: OrderedDict[Any, _Value], key: object, max_size: int, make: Callable[[], _Value]
) -> _Value:
    """Return the cached value of a key; evict the least recently used entry."""
    value = cache.pop(key) if key in cache else make()
    cache[key] = value
    if len(cache) > max_size:
        cache.popitem(last=False)
    return value


def _tensor_and_piece(counts: Tensor) -> Tensor:
    """Return (tensor index, piece index) for every piece of every tensor."""
    owners = torch.repeat_interleave(counts)
    pieces = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
    return torch.stack([owners, pieces], dim=1).int()


def _mismatched_layouts(lists: Sequence[list[Tensor]]) -> Iterator[tuple[int, int]]:
    """Yield the (list, index) of tensors that are not dense in the layout of their weight."""
    for index, param in enumerate(lists[0]):
        dense = _strides(torch.empty_like(param, device="meta"))
        for row, each in enumerate(lists):
            if param.numel() > 0 and _strides(each[index]) != dense:
                yield row, index


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides of dimensions larger than 1."""
    return [n for n, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _check(lists: Sequence[list[Tensor]], steps: list[Tensor]) -> None:
    """Raise on tensors that the kernels would misread."""
    lengths = [len(each) for each in (*lists, steps)]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"Passed lists of {lengths} tensors. Each parameter needs one gradient, two moments, "
            "one step count, and a residual if any parameter has one. Pass lists of equal length."
        )
    params, grads = lists[0], lists[_GRADS]
    half, full, device = params[0].dtype, torch.float32, params[0].device
    for dtype in (half, grads[0].dtype):
        if dtype not in _DTYPES:
            raise ValueError(
                f"Passed {half} weights with {grads[0].dtype} gradients. The fused step supports "
                "fp16, bf16 and fp32. Pass `fused=False` for other dtypes."
            )
    dtypes = (half, grads[0].dtype, full, full, half)
    for name, dtype, each in zip(ROWS, dtypes, lists, strict=False):
        for index, (param, tensor) in enumerate(zip(params, each, strict=True)):
            _check_tensor(f"{name}[{index}]", tensor, dtype, device, param.shape)
    for index, step in enumerate(steps):
        _check_tensor(f"step[{index}]", step, full, device, torch.Size())


def _check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device, shape: torch.Size
) -> None:
    found = (tensor.dtype, tensor.device, tensor.shape)
    if found != (dtype, device, shape):
        raise ValueError(
            f"Passed `{name}` in {found[0]} on {found[1]} with shape {list(found[2])}. Expected "
            f"{dtype} on {device} with shape {list(shape)}. Group parameters by device and by "
            "the dtypes of weights and gradients; keep moments and step counts in fp32."
        )
    # Meta and fake tensors have address 0, to which the kernel would write.
    if tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise ValueError(
            f"Passed `{name}` without storage ({type(tensor).__name__}). The fused step reads "
            "memory addresses. Pass local, materialized tensors."
        )
