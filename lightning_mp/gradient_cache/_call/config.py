"""What all calls of a cache share."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """What all calls of a cache share; see `GradientCache`."""

    device: torch.device | None
    prefetch: int
    rows: tuple[str, ...]
    whole: tuple[str, ...]
    leave_out: tuple[str, ...]
    replay_tolerance: float | None
    context: Callable[[], AbstractContextManager[Any]]
