"""Where a loader stands in an epoch, so that a run can go on there."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from typing_extensions import override

__all__ = ["LoaderOrder", "LoaderState", "Place", "sampler_of"]

_OF_THE_EPOCH = (SequentialSampler, DistributedSampler)
# These draw from a generator, of which a checkpoint has the state of one rank.
_DRAWN = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Place:
    """The place of a loader in an epoch; as it is here, of one whose order is unknown."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def begin(self) -> Iterator[Any]:
        """Return an iterator of the loader, from where it stands."""
        return iter(self._loader)

    def took(self, batches: int) -> None:
        """Note that so many batches were taken."""

    def state(self) -> dict[str, Any]:
        """Return what `resume` takes."""
        return {}

    def resume(self, state: dict[str, Any]) -> str:
        """Have the next iterator go on, if it can; return what is said of it."""
        return (
            "its data begins anew, as the order of the loader cannot be drawn once more. Use "
            "torchdata's `StatefulDataLoader`, or one of torch's samplers"
        )


class LoaderState(Place):
    """The place of a loader that has a state, as torchdata's `StatefulDataLoader`."""

    @override
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loader.state_dict()
        return state

    @override
    def resume(self, state: dict[str, Any]) -> str:
        self._loader.load_state_dict(state)
        sampler = sampler_of(self._loader)
        drawing = _drawing_sampler(sampler)
        if drawing is not sampler and type(drawing) not in _OF_THE_EPOCH:
            return (
                "the loader has loaded its own state, but its order may be drawn anew, as the "
                "sampler that Lightning put around it has none. Pass "
                "`Trainer(use_distributed_sampler=False)` and a sampler of ranks with a state"
            )
        return "it goes on with exactly the next batch, as the loader has loaded its own state"


class LoaderOrder(Place):
    """The place of a loader whose order is known: it skips the indices of batches that were read.

    Args:
        loader: Of a data set with indices, for which `is_known` holds.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        super().__init__(loader)
        self._batches: Any = loader.batch_sampler
        self._resumed: tuple[int, list[Tensor]] | None = None
        self._rest: Iterator[Any] | None = None  # of an epoch that was begun before
        self._states: list[Tensor] = []  # of the generators that the order was drawn from
        self._taken = 0

    @staticmethod
    def is_known(loader: object) -> bool:
        """Return whether a loader's order can be drawn once more."""
        if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
            return False
        # Exact types: a sampler of the user's may draw from anything.
        is_alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        known = (*_OF_THE_EPOCH, *_DRAWN) if is_alone else _OF_THE_EPOCH
        return type(_drawing_sampler(loader.batch_sampler.sampler)) in known

    @override
    def took(self, batches: int) -> None:
        self._taken += batches

    @override
    def state(self) -> dict[str, Any]:
        return {"loader_batches": self._taken, "generators": self._states}

    @override
    def resume(self, state: dict[str, Any]) -> str:
        self._resumed = state["loader_batches"], state["generators"]
        return (
            f"it goes on with exactly the next batch: {state['loader_batches']} loader batches are "
            "skipped in the order of the sampler, without being read"
        )

    @override
    def begin(self) -> Iterator[Any]:
        self._taken = 0 if self._resumed is None else self._resumed[0]
        if self._resumed is not None:
            batches = self._in_order(*self._resumed)
            # Drawn now: Lightning sets the sampler's epoch before it asks for a batch, and counts
            # an epoch that `max_steps` has cut short as a whole one.
            self._rest, self._resumed = chain(list(islice(batches, 1)), batches), None
        # The loader refuses to have its sampler set; its iterator keeps what it finds now.
        attributes = vars(self._loader)
        attributes["batch_sampler"] = self
        try:
            return iter(self._loader)
        finally:
            attributes["batch_sampler"] = self._batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        # Only when a batch is asked for: an iterator with workers asks for two of these.
        rest, self._rest = self._rest, None
        yield from self._in_order(0, []) if rest is None else rest

    def _in_order(self, skipped: int, states: list[Tensor]) -> Iterator[Any]:
        own = getattr(_drawing_sampler(self._batches.sampler), "generator", None)
        generators = [torch.default_generator, *([own] if own is not None else [])]
        before = [generator.get_state() for generator in generators]
        self._states = states or before
        for generator, state in zip(generators, self._states, strict=True):
            generator.set_state(state)
        batches = iter(self._batches)
        first = list(islice(batches, 1))  # samplers draw their order here
        if states:
            # The sampler's own generator goes on from here, as in the run before.
            torch.default_generator.set_state(before[0])
        yield from islice(chain(first, batches), skipped, None)


def sampler_of(loader: Any) -> Any:
    """Return what a loader takes indices from, or `None`."""
    batches = getattr(loader, "batch_sampler", None)
    # Lightning puts its own for ranks into the batches, and leaves the loader's as it was.
    return getattr(batches, "sampler", None) or getattr(loader, "sampler", None)


def _drawing_sampler(sampler: Any) -> Any:
    """Return what draws the order: Lightning wraps samplers of the user's for its ranks."""
    is_wrapped = isinstance(sampler, DistributedSamplerWrapper)
    return sampler.dataset._sampler if is_wrapped else sampler  # type: ignore[attr-defined]
