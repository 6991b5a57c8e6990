"""Wraps a loader so that it yields several loader batches as one, in host memory."""

import logging
import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]

from lightning_mp.gradient_cache._served.roles import DeclaredRoles, Role
from lightning_mp.strategies._inf_cl.joining import JoinedBatch, field_roles
from lightning_mp.strategies._inf_cl.loader_order import place_of, sampler_of, starts_again

__all__ = ["GatheredLoader", "drop_states"]

_log = logging.getLogger(__name__)


class GatheredLoader:
    """Yields `count` batches of `loader` as one; has the attributes of `loader`.

    Workers hold small loader batches and the host holds one gathered batch. A loader of large
    batches would hold `prefetch_factor` large batches per worker. Lightning saves and loads the
    position in an epoch.

    The last gathered batch of an epoch may be smaller; with `drop_last` it is dropped. The gathered
    batches of an epoch are `epoch_batches()`.
    """

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
        *,
        pin: bool,
        epoch_batches: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._loader, self._count, self._declared, self._pin = loader, count, declared, pin
        self._roles: dict[str, Role] = {}  # roles of fields, known after the first loader batch
        self._place, self._epoch_batches = place_of(loader), epoch_batches
        self._gathered = self._start = 0  # batches of this epoch
        self._before: dict[str, Any] | None = None

    def __len__(self) -> int:
        batches: int = len(self._loader)
        return batches // self._count if self._drops_last() else -(-batches // self._count)

    def __iter__(self) -> Iterator[Any]:
        # Begin now instead of at the first batch: samplers draw from generators here.
        self._gathered, self._start = self._start, 0
        return self._gather(self._place.begin())

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
            # For a loader without a length, Lightning fetches one batch ahead.
            self._before = self._state() if sized_len(self._loader) is None else None
            gathered: JoinedBatch | None = None
            taken = 0
            for batch in islice(batches, self._count):
                gathered = gathered or self._joined(batch)
                gathered.add(batch)
                taken += 1
                del batch
            self._place.took(taken)
            self._gathered += taken > 0
            if gathered is None:
                self._before = None  # no batch is ahead at the end
                return
            if taken < self._count and self._drops_last():
                return
            whole, gathered = gathered.concatenated(), None
            yield whole
            del whole  # frees the batch before the next one is allocated

    def _joined(self, first: Any) -> JoinedBatch:
        if not self._roles:
            size = getattr(self._loader, "batch_size", None)
            self._roles = field_roles(first, self._declared, size)
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
                starts_again("the checkpoint was written with another kind of loader or sampler")
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

    def _drops_last(self) -> bool:
        return bool(getattr(self._loader, "drop_last", False))


def drop_states(loop: Any) -> None:
    """Remove the states of gathered loaders from those to load, for a run without them."""
    states = loop._combined_loader_states_to_load
    loop._combined_loader_states_to_load = [x for x in states if "gathered" not in x]
    if any("gathered" in state and not state["is_over"] for state in states):
        rank_zero_info(
            starts_again("the checkpoint was written with another `loader_batches_per_step`")
        )
