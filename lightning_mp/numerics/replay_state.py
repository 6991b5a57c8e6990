"""What a second run of the same code needs to give the same numbers: generators, buffers, autocast.

Gradient caching runs a tower twice, first without and then with a graph. The second run must draw
the dropout masks of the first and must leave no second trace in running statistics.
"""

import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "AutocastState",
    "BufferState",
    "RngState",
    "own_generators",
    "undisturbed",
    "version_of",
]


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor has been written to in place; -1 where torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


class RngState:
    """The states of all generators that a forward may draw from, as they are now.

    Those of torch on the CPU and on `device`, of Python, of numpy where it is loaded, and those
    that are attributes of a module or of its submodules.

    Args:
        device: Where the forward runs.
        module: Whose own generators to hold.
        generators: More of them, as `own_generators` finds them.
    """

    def __init__(
        self,
        device: torch.device,
        module: nn.Module | None = None,
        generators: Sequence[Any] = (),
    ) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._accelerator = (
            None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        )
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")  # a forward cannot draw from what is not loaded
        self._numpy: Any = None if numpy is None else numpy.random.get_state()
        own = [] if module is None else own_generators(module)
        self._own = [_own_state(generator) for generator in (*own, *generators)]

    def restore(self) -> None:
        """Set the generators back to the states held here."""
        torch.set_rng_state(self._cpu)
        if self._accelerator is not None:
            torch.get_device_module(self._device).set_rng_state(self._accelerator, self._device)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for set_state, state in self._own:
            set_state(state)


def own_generators(module: nn.Module) -> list[Any]:
    """Return the generators that are attributes of a module or of its submodules."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    found = {
        id(value): value
        for owner in module.modules()
        for value in vars(owner).values()
        if isinstance(value, kinds)
    }
    return list(found.values())


def _own_state(generator: Any) -> tuple[Callable[[Any], Any], Any]:
    """Return what sets a generator's state, and the state that it has now."""
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    if hasattr(generator, "bit_generator"):  # numpy's `default_rng`
        bits = generator.bit_generator
        return functools.partial(setattr, bits, "state"), bits.state
    # Those of torch, and numpy's `RandomState`.
    return generator.set_state, generator.get_state()


class AutocastState:
    """Autocast for a device type as it is now, to be entered again at another time."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._enabled = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """What autocast computes in; empty where it is off."""
        return {self._dtype} if self._enabled else set()

    def entered(self) -> torch.autocast:
        """Return what runs under this state, without the cache of cast weights."""
        # A weight that was cast without grad and cached would cut the graph of the run with grad.
        dtype = self._dtype if self._enabled else None
        return torch.autocast(
            self._device_type, dtype=dtype, enabled=self._enabled, cache_enabled=False
        )


class BufferState:
    """The buffers of a module as they are now, so that micro-batches together update them once.

    Every micro-batch starts from these values, as every row of a whole batch would. `commit` then
    sets floating-point buffers to the mean of what the micro-batches made of them, weighted by
    rows, and all others (such as `num_batches_tracked`) to what the last one did. For a running
    average of per-row statistics, that is the update of the whole batch.
    """

    def __init__(self, module: nn.Module | None) -> None:
        # Modules and names, not tensors alone: a forward may also assign a new tensor.
        self._held = [
            _Held(owner, name, buffer)
            for owner in (() if module is None else module.modules())
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._means: dict[_Held, Tensor] = {}
        self._assigned: set[_Held] = set()
        self._changed: list[_Held] = []
        self._rows = 0

    @torch.no_grad()
    def restore(self, *, keep_grown: bool = False) -> None:
        """Set the buffers that changed back to the values held here, or all but those that grew."""
        for held in self._held:
            # Others are not written: a graph may have saved them.
            if held.is_changed() and not (keep_grown and held.has_grown()):
                held.restore()

    @torch.no_grad()
    def collect(self, rows: int) -> None:
        """Take in what a micro-batch of `rows` rows made of the buffers."""
        before, self._rows = self._rows, self._rows + rows
        for held in self._held:
            if held.has_grown():  # a cache, such as that of rotary embeddings: it goes on growing
                self._means.pop(held, None)
            elif held.is_changed() or held in self._means:
                value = held.now()
                if value is not held.buffer:
                    self._assigned.add(held)
                mean = self._means.setdefault(held, held.value.clone())
                if before and mean.is_floating_point():  # the mean so far, weighted by rows
                    mean.lerp_(value, rows / self._rows)
                else:
                    mean.copy_(value)

    @torch.no_grad()
    def commit(self) -> None:
        """Write the collected values, and remember which buffers they were for `rewind`."""
        for held, mean in self._means.items():
            if held in self._assigned:
                held.owner._buffers[held.name] = mean
            else:
                held.restore()
                held.buffer.copy_(mean)
        self._changed = list(self._means)
        self._means = {}

    def rewind(self) -> None:
        """Let the buffers that changed start again, as copies; the tensors themselves stay."""
        for held in self._changed:
            held.owner._buffers[held.name] = held.value.clone()


class _Held:
    """A buffer, its place, and its value at some time."""

    def __init__(self, owner: nn.Module, name: str, buffer: Tensor) -> None:
        self.owner = owner
        self.name = name
        self.buffer = buffer
        self.value = buffer.detach().clone()
        self._version = version_of(buffer)

    def now(self) -> Tensor:
        value = self.owner._buffers.get(self.name)
        return self.buffer if value is None else value

    def is_changed(self) -> bool:
        is_same = self.owner._buffers.get(self.name) is self.buffer
        return (
            not is_same or version_of(self.buffer) != self._version or self._is_silently_changed()
        )

    def _is_silently_changed(self) -> bool:
        """Return whether a kernel wrote to the buffer uncounted, as that of BatchNorm does."""
        if self.buffer.device.type == "cpu":
            return not torch.equal(self.buffer, self.value)
        # To look at values would make the host wait.
        return self.name.startswith("running_") and self.owner.training

    def has_grown(self) -> bool:
        now = self.now()
        return now.shape != self.value.shape or now.dtype != self.value.dtype

    def restore(self) -> None:
        self.owner._buffers[self.name] = self.buffer  # a forward may have assigned another
        if version_of(self.buffer) != self._version or self._is_silently_changed():
            self.buffer.copy_(self.value)
            self._version = version_of(self.buffer)


@contextmanager
def undisturbed(device: torch.device, module: nn.Module | None) -> Iterator[None]:
    """Leave generators and buffers as they are found, whatever runs."""
    rng, buffers = RngState(device, module), BufferState(module)
    try:
        yield
    finally:
        rng.restore()
        buffers.restore()
