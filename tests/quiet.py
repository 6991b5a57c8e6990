"""Arguments of a Trainer on one CPU that prints, logs and saves nothing."""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["QUIET", "parameters_of"]

SHOWN = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
QUIET: dict[str, Any] = {"accelerator": "cpu", "devices": 1, **dict.fromkeys(SHOWN, False)}


def parameters_of(module: nn.Module) -> Tensor:
    """Return all parameters as one float64 vector."""
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])
