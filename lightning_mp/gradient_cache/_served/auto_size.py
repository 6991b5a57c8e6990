"""Finds the largest micro-batch size that fits into memory, in the first call of a tower.

Probes run and differentiate the first rows of the batch, doubling the number of rows each time. On
CUDA they continue until memory runs out, while a placeholder tensor reserves the memory that the
rest of a step needs. On other devices they continue until the measured bytes exceed a budget; so do
probes of sharded towers, where a rank that runs out of memory would leave other ranks waiting. The
peak memory is a maximum of sums that grow linearly with the rows, so it is convex, and between two
probes it is at most their chord.
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp._nested import tensors_in
from lightning_mp.gradient_cache._served.sharding import min_over_ranks
from lightning_mp.numerics.replay_state import eager_mode

if TYPE_CHECKING:
    from lightning_mp.gradient_cache._served.call import TowerCall

__all__ = ["CPU_BYTES", "find_micro_batch_size"]

CPU_BYTES = 2**30
"""Default memory budget for the activations of a micro-batch on a CPU."""

_FIRST_ROWS = 2  # BatchNorm fails on one row
# For each trained parameter, in its dtype: the sum of gradients over micro-batches, the gradient,
# and Adam's two moments.
_COPIES_OF_TRAINED = 4
# Features of images and texts in fp32, their gradients, and the buffers of the exchange: the loss
# needs at most 8 times the features of one tower.
_COPIES_OF_FEATURES = 8
_LOSS_BYTES = 512 * 2**20  # the workspace of `ContrastiveLoss` on CUDA
_USABLE = 0.5  # share of free memory for budgets, as the last probe takes twice its limit


def find_micro_batch_size(
    call: "TowerCall", activation_bytes: int | None, trained: Iterable[Tensor]
) -> int:
    """Return the largest micro-batch size that fits on every rank; all ranks must call this.

    `activation_bytes` limits the activations of a micro-batch. `None`: `CPU_BYTES` on a CPU, all
    free memory on CUDA. The optimizer keeps states for the `trained` tensors.
    """
    is_cuda = call.device.type == "cuda"
    if activation_bytes is None and is_cuda and not call.sharded:
        # Probing the allocator accounts for fragmentation and workspaces.
        rows = _by_doubling(call, trained)
    elif activation_bytes is None and is_cuda:
        rows = _by_budget(call, _free_bytes(call.device) - _other_step_bytes(call, trained))
    else:
        # Sums of gradients do not depend on the number of rows.
        gradients = sum(x.nbytes for x in call.trained.parameters)
        rows = _by_budget(call, (activation_bytes or CPU_BYTES) + gradients)
    # All ranks raise together, or ranks with enough memory would wait for the others.
    (least,) = min_over_ranks([rows], call.device)
    if least < 1:
        raise RuntimeError(
            "Passed `micro_batch_size='auto'`, but some rank has too little memory for "
            f"{_first_rows(call)} rows of the tower `{call.tower}` and the rest of a step. Use "
            "activation checkpointing, or shard the tower with `InfCLModelParallelStrategy`."
        )
    return least


def _by_doubling(call: "TowerCall", trained: Iterable[Tensor]) -> int:
    rows = fitting = _first_rows(call)
    if _in_memory(call.probe, rows) is None:
        return 0
    # The reserve may be an overestimate, so the first probe runs without it.
    size = _other_step_bytes(call, trained)
    reserve = _in_memory(torch.empty, size, dtype=torch.uint8, device=call.device)
    while reserve is not None and _in_memory(call.probe, rows) is not None:
        fitting = rows
        if rows == call.batch_size:
            break
        rows = min(2 * rows, call.batch_size)
    del reserve
    torch.accelerator.empty_cache()  # the step needs blocks of other sizes
    return fitting


def _by_budget(call: "TowerCall", limit: int) -> int:
    """Return the number of rows whose peak stays within `limit`; a probe may exceed it twofold."""
    most, device = call.batch_size, call.device
    if call.sharded:  # equal on all ranks, because ranks gather layers together
        (most,) = min_over_ranks([most], device)
    # If the first probe exceeds the limit, the chord starts at 0 rows and 0 bytes.
    before, rows = (0, 0), min(_FIRST_ROWS, most)
    while True:
        peak = _peak_bytes(call, rows)
        fits = peak <= limit
        if call.sharded:
            # If one rank stopped alone, the others would wait in their next probe.
            fits = bool(min_over_ranks([int(fits)], device)[0])
        if not fits or rows == most:
            break
        before, rows = (rows, peak), min(2 * rows, most)
    if not fits:
        fitting, peak_then = before
        # On the chord between the two probes, which is an upper bound of the peak.
        share = min(1.0, max(0, limit - peak_then) / max(1, peak - peak_then))
        # At least one row, unless the budget is empty.
        rows = max(int(limit > 0), fitting + int(share * (rows - fitting)))
    # Tensor cores work on multiples of 8 rows.
    return rows if rows < 16 or rows == most else rows // 8 * 8


def _first_rows(call: "TowerCall") -> int:
    return min(_FIRST_ROWS, call.batch_size)


def _in_memory(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; return `None` instead of its result if memory runs out."""
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
    gc.collect()  # outside of `except`, where the traceback holds the activations
    torch.accelerator.empty_cache()
    return None


def _is_out_of_memory(error: RuntimeError) -> bool:
    # cuBLAS and cuDNN raise their own errors for handles and workspaces.
    words = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def _other_step_bytes(call: "TowerCall", trained: Iterable[Tensor]) -> int:
    """Estimate the bytes that a step needs besides the activations of a micro-batch."""
    features = call.probe(_first_rows(call)) * call.batch_size
    states = sum(x.nbytes for x in trained)
    return _COPIES_OF_TRAINED * states + _COPIES_OF_FEATURES * features + _LOSS_BYTES


def _free_bytes(device: torch.device) -> int:
    # Cached blocks of the allocator are free, too.
    free, _ = torch.accelerator.get_memory_info(device)
    cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return int(_USABLE * (free + cached))


def _peak_bytes(call: "TowerCall", rows: int) -> int:
    if call.device.type == "cuda":
        # Relative to the memory before, because parameters and the batch do not depend on the rows.
        before = torch.accelerator.memory_allocated(call.device)
        torch.accelerator.reset_peak_memory_stats(call.device)
        call.probe(rows)
        peak: int = torch.accelerator.max_memory_allocated(call.device)
        return peak - before
    counted = _LiveBytes()
    # Dynamo would never again compile code that it has seen under a dispatch mode.
    with counted, eager_mode():
        call.probe(rows)
    return counted.peak


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors that were created within it."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._note((args, kwargs), is_new=False)  # parameters and the batch
        result = function(*args, **kwargs)
        self._note(result, is_new=True)
        return result

    def _note(self, value: Any, *, is_new: bool) -> None:
        for tensor in tensors_in(value):
            if tensor.layout is not torch.strided:  # a sparse gradient has no storage
                continue
            # By storage, which views share and which lives as long as the last view.
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes() if is_new else 0
            if key not in self._known:
                self._known.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        # The next storage may reuse the address.
        self._known.discard(key)
        self.live -= size
