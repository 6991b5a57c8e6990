"""The rows of a micro-batch that there is memory for, found in the first call of a tower.

The first rows of the batch are run and differentiated, twice as many each time. On CUDA until
memory runs out, while an empty tensor holds the place of what a step needs besides. Elsewhere, and
where nothing may run out because each layer of a sharded tower waits for other ranks, until the
measured bytes exceed a budget. The peak is the largest of several sums that grow with the rows,
so it is convex in them, and what lies between two probes needs no more than their chord says.
"""

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp._nested import tensors_in

if TYPE_CHECKING:
    from lightning_mp.gradient_cache._served.call import TowerCall

__all__ = ["CPU_BYTES", "find_micro_batch_size"]

CPU_BYTES = 2**30
"""What activations of a micro-batch may take on a CPU where nothing else is said."""

_FIRST_ROWS = 2  # BatchNorm takes no single row
# For each trained value, in the dtype that it has: the sum of its gradients over micro-batches,
# its gradient, and Adam's two states.
_COPIES_OF_TRAINED = 4
# Features of images and texts in fp32, their gradients, and what exchanging them takes: the loss
# promises 8 times the features of one tower.
_COPIES_OF_FEATURES = 8
_LOSS_BYTES = 512 * 2**20  # the workspace of `ContrastiveLoss` on CUDA
_USABLE = 0.5  # of free memory, where it may not run out: the last probe takes twice the limit


def find_micro_batch_size(
    call: "TowerCall", activation_bytes: int | None, trained: Iterable[Tensor]
) -> int:
    """Return how many rows all ranks have memory for; all of them must call this.

    Args:
        call: The call of the tower, not run yet.
        activation_bytes: What activations of a micro-batch may take. `None`: `CPU_BYTES`, on CUDA
            what is free.
        trained: What the optimizer will have states for.

    Raises:
        RuntimeError: On some rank there is no memory for the least number of rows.
    """
    is_cuda = call.device.type == "cuda"
    if activation_bytes is None and is_cuda and not call.sharded:
        # The allocator itself says what fits, fragmentation and workspaces included.
        rows = _by_doubling(call, trained)
    elif activation_bytes is None and is_cuda:
        rows = _by_budget(call, _free_bytes(call.device) - _reserve(call, trained))
    else:
        # The sums of gradients are there whatever the rows are.
        gradients = sum(_bytes(x) for x in call.trained.parameters)
        rows = _by_budget(call, (activation_bytes or CPU_BYTES) + gradients)
    # Ranks raise together, or those with memory would wait for those without.
    least = _least_of_ranks(rows, call.device)
    if least < 1:
        raise RuntimeError(
            "Passed `micro_batch_size='auto'`, but on some rank there is no memory for "
            f"{_first_rows(call)} rows of the tower `{call.tower}` and what a step needs besides. "
            "Checkpoint its activations, or shard it with `InfCLModelParallelStrategy`."
        )
    return least


def _by_doubling(call: "TowerCall", trained: Iterable[Tensor]) -> int:
    rows = fitting = _first_rows(call)
    if not _fits(call, rows):
        return 0
    # What is held may be more than this step needs: the first rows are taken without it.
    with _held(_reserve(call, trained), call.device) as is_held:
        while is_held and _fits(call, rows):
            fitting = rows
            if rows == call.batch_size:
                break
            rows = min(2 * rows, call.batch_size)
    torch.accelerator.empty_cache()  # for blocks of other sizes
    return fitting


def _by_budget(call: "TowerCall", limit: int) -> int:
    """Return how many rows stay within a limit; a probe may take twice as much."""
    most, device = call.batch_size, call.device
    if call.sharded:  # in step, as layers are gathered from all ranks
        most = _least_of_ranks(most, device)
    # Where the first probe is too large, the chord starts at no rows and no bytes.
    before, rows = (0, 0), min(_FIRST_ROWS, most)
    while True:
        peak = _peak_bytes(call, rows)
        fits = peak <= limit
        if call.sharded:
            # A rank that stopped alone would leave the others waiting in their next probe.
            fits = bool(_least_of_ranks(fits, device))
        if not fits or rows == most:
            break
        before, rows = (rows, peak), min(2 * rows, most)
    if not fits:
        fitting, peak_then = before
        # On the chord between the two probes, which lies above the peak.
        share = min(1.0, max(0, limit - peak_then) / max(1, peak - peak_then))
        # Without anything left, not even one fits; else one is tried.
        rows = max(int(limit > 0), fitting + int(share * (rows - fitting)))
    # Tensor cores take rows in eights.
    return rows if rows < 16 or rows == most else rows // 8 * 8


def _first_rows(call: "TowerCall") -> int:
    return min(_FIRST_ROWS, call.batch_size)


def _fits(call: "TowerCall", rows: int) -> bool:
    try:
        call.probe(rows)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        ran_out = True
    else:
        ran_out = False
    if ran_out:  # not in `except`, where the traceback holds the activations
        gc.collect()
        torch.accelerator.empty_cache()
    return not ran_out


@contextmanager
def _held(size: int, device: torch.device) -> Iterator[bool]:
    """Hold some memory, and yield whether there was as much."""
    try:
        place = torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        yield False
        return
    try:
        yield True
    finally:
        del place


def _is_out_of_memory(error: RuntimeError) -> bool:
    # cuBLAS and cuDNN have errors of their own for their handles and workspaces.
    words = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def _reserve(call: "TowerCall", trained: Iterable[Tensor]) -> int:
    """Return the bytes of what a step needs besides activations, as far as that is known."""
    features = call.probe(_first_rows(call)) * call.batch_size
    states = sum(_bytes(x) for x in trained)
    return _COPIES_OF_TRAINED * states + _COPIES_OF_FEATURES * features + _LOSS_BYTES


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _free_bytes(device: torch.device) -> int:
    # What the allocator holds and nobody uses is free for the tower, too.
    free, _ = torch.accelerator.get_memory_info(device)
    cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return int(_USABLE * (free + cached))


def _peak_bytes(call: "TowerCall", rows: int) -> int:
    if call.device.type == "cuda":
        # Beyond what was there before: parameters and the batch do not grow with the rows.
        before = torch.accelerator.memory_allocated(call.device)
        torch.accelerator.reset_peak_memory_stats(call.device)
        call.probe(rows)
        peak: int = torch.accelerator.max_memory_allocated(call.device)
        return peak - before
    counted = _LiveBytes()
    with counted:
        call.probe(rows)
    return counted.peak


def _least_of_ranks(rows: int, device: torch.device) -> int:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows
    least = torch.tensor(rows, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


class _LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that are made within it, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak: int = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            self._note(tensor, 0)  # made before: parameters, and the batch
        result = function(*args, **kwargs)
        for tensor in tensors_in(result):
            self._note(tensor, tensor.untyped_storage().nbytes())
        return result

    def _note(self, tensor: Tensor, size: int) -> None:
        # By storage, which views share, and which lives as long as the last of them.
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        # Its address may be that of the next storage.
        self._known.discard(key)
        self.live -= size
