"""Callbacks that watch for instability; imported as `lightning_mp.callbacks`."""

# A clone's root has this folder under its bare name, where every class would be another one.
if __name__ != "lightning_mp.callbacks":
    raise ImportError(
        f"Passed `import {__name__}`. This folder is installed as `lightning_mp.callbacks`: "
        "write `import lightning_mp.callbacks`."
    )

from typing import TYPE_CHECKING

from lightning_mp._lazy import lazy_names

if TYPE_CHECKING:  # the same as in `_NAMES_OF`, for type checkers and editors
    from lightning_mp.callbacks.activation_range_monitor import ActivationRangeMonitor
    from lightning_mp.callbacks.adam_state_monitor import AdamStateMonitor
    from lightning_mp.callbacks.gradient_underflow_monitor import GradientUnderflowMonitor
    from lightning_mp.callbacks.instability_report import InstabilityReport
    from lightning_mp.callbacks.loss_scale_monitor import LossScaleMonitor
    from lightning_mp.callbacks.monitor import (
        Alarm,
        InstabilityError,
        InstabilityMonitor,
        InstabilityWarning,
    )
    from lightning_mp.callbacks.non_finite_locator import NonFiniteLocator
    from lightning_mp.callbacks.precision_preflight import PrecisionPreflight
    from lightning_mp.callbacks.spike_guard import SpikeGuard
    from lightning_mp.callbacks.tensor_collector import TensorCollector

__all__ = [
    "ActivationRangeMonitor",
    "AdamStateMonitor",
    "Alarm",
    "GradientUnderflowMonitor",
    "InstabilityError",
    "InstabilityMonitor",
    "InstabilityReport",
    "InstabilityWarning",
    "LossScaleMonitor",
    "NonFiniteLocator",
    "PrecisionPreflight",
    "SpikeGuard",
    "TensorCollector",
]

_NAMES_OF = {
    "activation_range_monitor": ("ActivationRangeMonitor",),
    "adam_state_monitor": ("AdamStateMonitor",),
    "gradient_underflow_monitor": ("GradientUnderflowMonitor",),
    "instability_report": ("InstabilityReport",),
    "loss_scale_monitor": ("LossScaleMonitor",),
    "monitor": ("Alarm", "InstabilityError", "InstabilityMonitor", "InstabilityWarning"),
    "non_finite_locator": ("NonFiniteLocator",),
    "precision_preflight": ("PrecisionPreflight",),
    "spike_guard": ("SpikeGuard",),
    "tensor_collector": ("TensorCollector",),
}
# `lightning-mp report` reads a report's data with modules from here, and needs no torch.
__getattr__, __dir__ = lazy_names(__name__, _NAMES_OF)
