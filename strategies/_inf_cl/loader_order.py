"""The position of a loader in an epoch, so that a run can resume there."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
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

from lightning_mp.gradient_cache._served.sharding import is_alone

__all__ = ["place_of", "sampler_of", "starts_again"]

_ORDERED_BY_EPOCH = (SequentialSampler, DistributedSampler)
# These draw from a generator; a checkpoint contains the generator state of one rank only.
_DRAWN_FROM_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Place:
    """The position of a loader in an epoch; this base class is for loaders of unknown order."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    @property
    def kind(self) -> str:
        """What a resumed run must have in common with the earlier run."""
        return type(self).__name__

    def begin(self) -> Iterator[Any]:
        """Return an iterator of the loader from its position."""
        return iter(self._loader)

    def took(self, batches: int) -> None:
        """Record that `batches` loader batches were taken."""

    def state(self) -> dict[str, Any]:
        """Return the state for `resume`."""
        return {}

    def resume(self, state: dict[str, Any]) -> str:
        """Make the next iterator continue from `state` if possible; return a log message."""
        return starts_again(
            "the order of its loader cannot be reproduced. Use torchdata's `StatefulDataLoader`, "
            "or one of torch's samplers"
        )


class LoaderState(Place):
    """The position of a loader with a state, such as torchdata's `StatefulDataLoader`."""

    @override
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loader.state_dict()
        return state

    @override
    def resume(self, state: dict[str, Any]) -> str:
        self._loader.load_state_dict(state)
        sampler = sampler_of(self._loader)
        inner = _inner_sampler(sampler)
        if inner is not sampler and type(inner) not in _ORDERED_BY_EPOCH:
            return (
                "The run resumes within an epoch from the loader's own state, but possibly in "
                "another order, because the sampler that Lightning put around it has no state. "
                "Pass `Trainer(use_distributed_sampler=False)` and a distributed sampler with a "
                "state."
            )
        return "The run resumes within an epoch at the next batch, from the loader's own state."


class LoaderOrder(Place):
    """The position of a loader of known order; on resume, indices of read batches are skipped."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        super().__init__(loader)
        self._batches: Any = loader.batch_sampler
        self._resumed: tuple[int, list[Tensor]] | None = None
        self._rest: Iterator[Any] | None = None  # remaining indices of a resumed epoch
        self._states: list[Tensor] = []  # generator states before the order was drawn
        self._taken = 0

    @staticmethod
    def is_known(loader: object) -> bool:
        """Return whether the order of a loader can be reproduced."""
        if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
            return False
        # Exact types, because a user's sampler may draw from any source.
        known = (*_ORDERED_BY_EPOCH, *_DRAWN_FROM_GENERATOR) if is_alone() else _ORDERED_BY_EPOCH
        return type(_inner_sampler(loader.batch_sampler.sampler)) in known

    @property
    @override
    def kind(self) -> str:
        sampler = _inner_sampler(self._batches.sampler)
        is_own = getattr(sampler, "generator", None) is not None
        return f"{type(sampler).__name__}{' with a generator' * is_own}"

    @property
    def _rows(self) -> int:
        """Rows per loader batch, of all ranks."""
        rows: int = self._batches.batch_size * getattr(self._batches.sampler, "num_replicas", 1)
        return rows

    @override
    def took(self, batches: int) -> None:
        self._taken += batches

    @override
    def state(self) -> dict[str, Any]:
        return {"rows": self._taken * self._rows, "generators": self._states}

    @override
    def resume(self, state: dict[str, Any]) -> str:
        # Rows, because the number of ranks and the batch size may differ from the earlier run.
        skipped = state["rows"] // self._rows
        self._resumed = skipped, state["generators"]
        return (
            f"The run resumes within an epoch at the next batch: {skipped} loader batches are "
            "skipped in the order of the sampler, without reading them."
        )

    @override
    def begin(self) -> Iterator[Any]:
        self._taken = 0 if self._resumed is None else self._resumed[0]
        # The loader forbids setting its sampler, so write to its `__dict__`. The iterator keeps
        # the sampler that it finds now.
        attributes = vars(self._loader)
        generator = self._loader.generator
        if self._resumed is not None:
            batches = self._in_order(*self._resumed)
            # Drawn now: before it fetches a batch, Lightning sets the sampler's epoch, and counts
            # an epoch that `max_steps` ended as complete.
            self._rest, self._resumed = chain(list(islice(batches, 1)), batches), None
            if generator is not None:
                # The iterator draws a seed for workers, which the earlier run drew before the
                # order. From a copy, so that later epochs have the order of the earlier run, too.
                attributes["generator"] = generator.clone_state()
        attributes["batch_sampler"] = self
        try:
            return iter(self._loader)
        finally:
            attributes |= {"batch_sampler": self._batches, "generator": generator}

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        # A generator, because an iterator with workers creates two of these and uses one.
        rest, self._rest = self._rest, None
        yield from self._in_order(0, []) if rest is None else rest

    def _in_order(self, skipped: int, states: list[Tensor]) -> Iterator[Any]:
        own = getattr(_inner_sampler(self._batches.sampler), "generator", None)
        generators = [torch.default_generator, *([own] if own is not None else [])]
        before = [generator.get_state() for generator in generators]
        self._states = states or before
        for generator, state in zip(generators, self._states, strict=True):
            generator.set_state(state)
        batches = iter(self._batches)
        first = list(islice(batches, 1))  # the sampler draws its order here
        if states:
            # Only the sampler's own generator continues from here, as in the earlier run.
            torch.default_generator.set_state(before[0])
        yield from islice(chain(first, batches), skipped, None)


def place_of(loader: Any) -> Place:
    """Return the position of a loader, of the kind that its type allows."""
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return LoaderState(loader)
    return LoaderOrder(loader) if LoaderOrder.is_known(loader) else Place(loader)


def starts_again(reason: str) -> str:
    """Return a log message for a loader that does not resume."""
    return (
        "The run resumes within an epoch, but its loader starts again from the first batch, "
        f"because {reason}."
    )


def sampler_of(loader: Any) -> Any:
    """Return the sampler of a loader, or `None`."""
    batches = getattr(loader, "batch_sampler", None)
    # Lightning replaces the sampler of `batch_sampler`, but not `loader.sampler`.
    return getattr(batches, "sampler", None) or getattr(loader, "sampler", None)


def _inner_sampler(sampler: Any) -> Any:
    """Return the sampler that draws the order, without Lightning's wrapper for ranks."""
    is_wrapped = isinstance(sampler, DistributedSamplerWrapper)
    return sampler.dataset._sampler if is_wrapped else sampler  # type: ignore[attr-defined]
