"""A Trainer on one CPU that shows, logs and keeps nothing, and what it has trained."""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["QUIET", "parameters_of"]

SHOWN = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
QUIET: dict[str, Any] = {"accelerator": "cpu", "devices": 1, **dict.fromkeys(SHOWN, False)}


def parameters_of(module: nn.Module) -> Tensor:
    """Return all weights as one vector of float64."""
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])
