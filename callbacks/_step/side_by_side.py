"""What lets monitors stand side by side in a Trainer: states and faults are kept apart."""

import copy
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_mp.callbacks._rules.usage import usage

__all__ = ["check_peers", "never_raising", "state_for", "state_key_of"]

_log = logging.getLogger(__name__)


def state_key_of(callback: pl.Callback) -> str:
    """Return a key that differs between callbacks of one class with different arguments.

    It is made of the arguments that are not at their default and that the callback keeps as
    attributes of their name, so that a new argument does not change the key of older checkpoints.
    """
    defaults: dict[str, Any] = {}
    for base in reversed(type(callback).__mro__):  # a subclass may have defaults of its own
        for name, parameter in inspect.signature(base.__init__).parameters.items():  # type: ignore[misc]
            if parameter.kind is parameter.KEYWORD_ONLY:
                defaults[name] = parameter.default
    values = {name: getattr(callback, name, default) for name, default in defaults.items()}
    changed = {name: value for name, value in values.items() if value != defaults[name]}
    return callback._generate_state_key(**changed) if changed else type(callback).__qualname__


def check_peers(callback: pl.Callback, trainer: pl.Trainer) -> None:
    """Refuse callbacks of one class of which one skips or rewinds, and another comes after it."""
    peers = _peers(callback, trainer)
    if any(getattr(peer, "action", None) in ("skip", "rewind") for peer in peers[:-1]):
        passed = ", ".join(f"{type(peer).__name__}(action={peer.action!r})" for peer in peers)
        raise MisconfigurationException(usage("peers", peers=passed))


def _peers(callback: pl.Callback, trainer: pl.Trainer) -> list[Any]:
    return [c for c in trainer.callbacks if type(c) is type(callback)]  # type: ignore[attr-defined]


def state_for(
    callback: pl.Callback, trainer: pl.Trainer, checkpoint: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the state of what this callback was when a checkpoint was saved.

    Where an argument has changed since, it is the one state of its class that no callback claims,
    if it is the one callback of its class without a state. Lightning finds a state of its own key.
    """
    states = checkpoint.get("callbacks", {})
    peers = _peers(callback, trainer)
    stateless = [peer for peer in peers if peer.state_key not in states]
    claimed = {peer.state_key for peer in peers}
    name = type(callback).__qualname__
    free = [k for k in states if k not in claimed and str(k).partition("{")[0] == name]
    if stateless != [callback] or len(free) != 1:
        return None
    state: dict[str, Any] = copy.deepcopy(states[free[0]])
    return state


def never_raising(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep `on_exception` from hiding the exception that it is called for behind its own."""

    @functools.wraps(hook)
    def on_exception(self: pl.Callback, *args: Any) -> None:
        try:
            hook(self, *args)
        except Exception as error:
            _log.warning(usage("hook_failed", callback=type(self).__name__, error=error))

    return on_exception
