"""States of modules that compute with copies: they have the parameters, not the copies."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_mp.precision._weights.ledger import Ledger

__all__ = ["FullStates"]


class FullStates:
    """Puts parameters for half copies into a `state_dict` that is read amid a forward.

    As by a thread that saves checkpoints beside the training: 6 of 100 such states had half
    weights. A hook of `state_dict`; that of a pickled module does nothing.

    Args:
        ledger: Of the parameters and their copies.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger

    def __deepcopy__(self, memo: dict[int, object]) -> "FullStates":
        return self  # a copy of the model, such as a teacher, computes with copies too

    def __reduce__(self) -> tuple[Any, ...]:
        return FullStates, ()  # what is loaded is a plain model

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        own = [prefix + name for name in module._parameters]
        found = {key: state[key] for key in own if isinstance(state.get(key), Tensor)}
        halves = {key: value for key, value in found.items() if value.dtype != torch.float32}
        if self._ledger is None or not halves:
            return
        owners = {
            entry.beside.data_ptr(): parameter
            for parameter, entry in self._ledger
            if entry.beside is not None and parameter.dtype == torch.float32
        }
        for key, value in halves.items():
            owner = owners.get(value.data_ptr())
            if owner is not None:  # `requires_grad` where variables are asked for
                state[key] = owner if value.requires_grad else owner.detach()
