"""Gathers small batches of a loader into the batch of a step, in host memory."""

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]

from lightning_mp.gradient_cache._served.roles import Declared, Role
from lightning_mp.strategies._inf_cl.joining import JoinedBatch, field_roles
from lightning_mp.strategies._inf_cl.loader_order import LoaderOrder, LoaderState, Place, sampler_of

__all__ = ["drop_states", "gather_batches", "tell_of_no_state"]

_log = logging.getLogger(__name__)


def gather_batches(
    loader: Any,
    count: int,
    declared: Declared,
    *,
    pin: bool,
    epoch_batches: Callable[[], float] = lambda: math.inf,
) -> Any:
    """Return a loader that yields `count` batches of another as one.

    With N loader batches a step, workers hold loader batches, and the host one whole batch, where a
    loader of whole batches holds `prefetch_factor` of them a worker besides.

    Args:
        loader: What yields small batches, such as a `DataLoader`; attributes are its own.
        count: Batches in one. The last one has what is left; with `drop_last`, what does not fill
            it is dropped, as by a loader of whole batches.
        declared: The roles of fields that were declared.
        pin: Whether to gather in pinned memory.
        epoch_batches: Returns how many gathered batches a step loop takes in an epoch.
    """
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        place: Place = LoaderState(loader)
    else:
        place = LoaderOrder(loader) if LoaderOrder.is_known(loader) else Place(loader)
    return _Gathered(loader, count, declared, pin, place, epoch_batches)


class _Gathered:
    """Goes on between two batches of an epoch, from a state that Lightning saves and loads."""

    # What it has itself; all else is the loader's.
    _OWN = (
        *("_loader", "_count", "_declared", "_pin", "_roles"),
        *("_place", "_epoch_batches", "_gathered", "_start", "_before"),
    )

    def __init__(
        self,
        loader: Any,
        count: int,
        declared: Declared,
        pin: bool,
        place: Place,
        epoch_batches: Callable[[], float],
    ) -> None:
        self._loader, self._count, self._declared, self._pin = loader, count, declared, pin
        self._roles: dict[str, Role] = {}  # of fields, known from the first loader batch on
        self._place, self._epoch_batches = place, epoch_batches
        self._gathered = self._start = 0  # batches of the epoch
        self._before: dict[str, Any] | None = None

    def __len__(self) -> int:
        batches: int = len(self._loader)
        return batches // self._count if self._drops_last() else -(-batches // self._count)

    def __iter__(self) -> Iterator[Any]:
        # At once, as it moves generators: samplers then draw as those of a loader of whole batches.
        return self._gather(self._begin())

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN:  # not there yet, as while it is copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            # Set here alone, it would not reach the loader's own iterator.
            setattr(self._loader, name, value)

    def _gather(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            gathered: JoinedBatch | None = None
            taken = 0
            self._note_begin()
            for batch in batches:
                gathered = gathered or self._joined(batch)
                gathered.add(batch)
                taken += 1
                del batch
                if taken == self._count:
                    break
            self._note_end(taken)
            if gathered is None or (taken < self._count and self._drops_last()):
                return
            whole, gathered = gathered.whole(), None
            yield whole
            del whole  # before the next one is begun

    def _joined(self, first: Any) -> JoinedBatch:
        if not self._roles:
            self._roles = field_roles(first, self._declared)
            words = {path: str(role) for path, role in self._roles.items()}
            _log.debug("The fields of loader batches have these roles: %s", words)
        return JoinedBatch(first, self._count, self._roles, self._declared, self._pin)

    # Lightning asks by `isinstance` of a protocol, which from Python 3.12 on sees no `__getattr__`.
    def state_dict(self) -> dict[str, Any]:
        return self._state() if self._before is None else self._before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sampler = sampler_of(self._loader)
        if state["epoch"] is not None and hasattr(sampler, "set_epoch"):
            # Lightning does so later, when workers have been sent the first indices.
            sampler.set_epoch(state["epoch"] + state["is_over"])
        # Lightning saves and loads it after the last batch, too, and begins another epoch with it.
        if state["is_over"]:
            return
        self._start = state["gathered"]
        if state["place"] == type(self._place).__name__:
            _tell(self._place.resume(state["loader"]))
        else:
            _tell("its data begins anew, as the checkpoint is of another kind of loader or sampler")

    def _state(self) -> dict[str, Any]:
        is_over = self._gathered >= self._epoch_batches()
        return {
            "is_over": is_over,
            "gathered": self._gathered,
            "epoch": getattr(sampler_of(self._loader), "epoch", None),
            "place": type(self._place).__name__,
            "loader": self._place.state(),
        }

    def _begin(self) -> Iterator[Any]:
        self._gathered, self._start = self._start, 0
        return self._place.begin()

    def _note_begin(self) -> None:
        # Without a length, Lightning asks for one batch ahead to know which is the last.
        self._before = self._state() if sized_len(self._loader) is None else None

    def _note_end(self, taken: int) -> None:
        self._place.took(taken)
        self._gathered += taken > 0
        if not taken:  # nothing is ahead at the end
            self._before = None

    def _drops_last(self) -> bool:
        return bool(getattr(self._loader, "drop_last", False))


def tell_of_no_state() -> None:
    """Say that a loader begins its epoch anew, as nothing was saved of it."""
    _tell("its data begins anew, as the checkpoint does not say where its loader stood")


def drop_states(checkpoint: dict[str, Any]) -> None:
    """Take the places of gathered loaders out of a checkpoint, for loaders that have none."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    states = loop.pop("combined_loader", [])
    own = [state for state in states if "gathered" in state]
    loop["combined_loader"] = [state for state in states if "gathered" not in state]
    if any(not state["is_over"] for state in own):
        _tell(
            "its data begins anew, as the checkpoint is of a run with another "
            "`loader_batches_per_step`"
        )


def _tell(sentence: str) -> None:
    rank_zero_info(f"The run goes on in the middle of an epoch, and {sentence}.")
