"""Wraps a loader so that it yields several loader batches as one, in host memory."""

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]

from lightning_mp.gradient_cache._served.roles import DeclaredRoles, Role
from lightning_mp.strategies._inf_cl.joining import JoinedBatch, field_roles
from lightning_mp.strategies._inf_cl.loader_order import LoaderOrder, LoaderState, Place, sampler_of

__all__ = ["drop_states", "gather_batches", "log_missing_state"]

_log = logging.getLogger(__name__)


def gather_batches(
    loader: Any,
    count: int,
    declared: DeclaredRoles,
    *,
    pin: bool,
    epoch_batches: Callable[[], float] = lambda: math.inf,
) -> Any:
    """Return a loader that yields `count` batches of `loader` as one.

    Workers hold small loader batches and the host holds one gathered batch. A loader of large
    batches would hold `prefetch_factor` large batches per worker.

    Args:
        loader: A loader of small batches, such as a `DataLoader`. The result has its attributes.
        count: Number of loader batches per gathered batch. The last gathered batch of an epoch may
            be smaller; with `drop_last` it is dropped.
        declared: The declared roles of fields.
        pin: Whether to use pinned memory.
        epoch_batches: Returns the number of gathered batches per epoch.
    """
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        place: Place = LoaderState(loader)
    else:
        place = LoaderOrder(loader) if LoaderOrder.is_known(loader) else Place(loader)
    return _GatheringLoader(loader, count, declared, pin, place, epoch_batches)


class _GatheringLoader:
    """The loader of gathered batches; Lightning saves and loads its position in an epoch."""

    # Its own attributes; all others belong to the loader.
    _OWN_ATTRIBUTES = (
        *("_loader", "_count", "_declared", "_pin", "_roles"),
        *("_place", "_epoch_batches", "_gathered", "_start", "_before"),
    )

    def __init__(
        self,
        loader: Any,
        count: int,
        declared: DeclaredRoles,
        pin: bool,
        place: Place,
        epoch_batches: Callable[[], float],
    ) -> None:
        self._loader, self._count, self._declared, self._pin = loader, count, declared, pin
        self._roles: dict[str, Role] = {}  # roles of fields, known after the first loader batch
        self._place, self._epoch_batches = place, epoch_batches
        self._gathered = self._start = 0  # batches of this epoch
        self._before: dict[str, Any] | None = None

    def __len__(self) -> int:
        batches: int = len(self._loader)
        return batches // self._count if self._drops_last() else -(-batches // self._count)

    def __iter__(self) -> Iterator[Any]:
        # Begin now instead of at the first batch: samplers draw from generators here.
        return self._gather(self._begin())

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN_ATTRIBUTES:  # not set yet, as during a copy
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN_ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            # The loader's iterator reads the attributes of the loader.
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
            whole, gathered = gathered.concatenated(), None
            yield whole
            del whole  # frees the batch before the next one is allocated

    def _joined(self, first: Any) -> JoinedBatch:
        if not self._roles:
            self._roles = field_roles(first, self._declared)
            words = {path: str(role) for path, role in self._roles.items()}
            _log.debug("Roles of the fields of loader batches: %s", words)
        return JoinedBatch(first, self._count, self._roles, self._declared, self._pin)

    # Defined here: Lightning checks a protocol, and since Python 3.12 the check ignores
    # `__getattr__`.
    def state_dict(self) -> dict[str, Any]:
        return self._state() if self._before is None else self._before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sampler = sampler_of(self._loader)
        if state["epoch"] is not None and hasattr(sampler, "set_epoch"):
            # Lightning sets the epoch only after workers have received the first indices.
            sampler.set_epoch(state["epoch"] + state["is_over"])
        # Lightning also saves the state after the last batch, and then starts a new epoch.
        if state["is_over"]:
            return
        self._start = state["gathered"]
        if state["place"] == self._place.kind:
            rank_zero_info(self._place.resume(state["loader"]))
        else:
            rank_zero_info(
                "The run resumes within an epoch, but its loader starts again from the first "
                "batch, because the checkpoint was written with another kind of loader or sampler."
            )

    def _state(self) -> dict[str, Any]:
        is_over = self._gathered >= self._epoch_batches()
        return {
            "is_over": is_over,
            "gathered": self._gathered,
            "epoch": getattr(sampler_of(self._loader), "epoch", None),
            "place": self._place.kind,
            "loader": self._place.state(),
        }

    def _begin(self) -> Iterator[Any]:
        self._gathered, self._start = self._start, 0
        return self._place.begin()

    def _note_begin(self) -> None:
        # For a loader without a length, Lightning fetches one batch ahead.
        self._before = self._state() if sized_len(self._loader) is None else None

    def _note_end(self, taken: int) -> None:
        self._place.took(taken)
        self._gathered += taken > 0
        if not taken:  # no batch is ahead at the end
            self._before = None

    def _drops_last(self) -> bool:
        return bool(getattr(self._loader, "drop_last", False))


def log_missing_state() -> None:
    """Log that the loader restarts its epoch, because the checkpoint has no state of it."""
    rank_zero_info(
        "The run resumes within an epoch, but its loader starts again from the first batch, "
        "because the checkpoint does not contain the position of the loader."
    )


def drop_states(checkpoint: dict[str, Any]) -> None:
    """Remove the states of gathered loaders from a checkpoint, for a run without them."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    states = loop.pop("combined_loader", [])
    own = [state for state in states if "gathered" in state]
    loop["combined_loader"] = [state for state in states if "gathered" not in state]
    if any(not state["is_over"] for state in own):
        rank_zero_info(
            "The run resumes within an epoch, but its loader starts again from the first batch, "
            "because the checkpoint was written with another `loader_batches_per_step`."
        )
