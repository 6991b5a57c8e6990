"""callbacks of lightning-mp; imported as `lightning_mp.callbacks`."""

if __name__ != "lightning_mp.callbacks":
    raise ImportError(
        f"Passed `import {__name__}`. This folder is installed as `lightning_mp.callbacks`: "
        "write `import lightning_mp.callbacks`."
    )

from lightning_mp.callbacks.activation_range_monitor import ActivationRangeMonitor
from lightning_mp.callbacks.adam_state_monitor import AdamStateMonitor
from lightning_mp.callbacks.gradient_underflow_monitor import GradientUnderflowMonitor
from lightning_mp.callbacks.history import Alarm
from lightning_mp.callbacks.instability_report import InstabilityReport
from lightning_mp.callbacks.loss_scale_monitor import LossScaleMonitor
from lightning_mp.callbacks.monitor import InstabilityMonitor, InstabilityWarning
from lightning_mp.callbacks.non_finite_locator import NonFiniteLocator
from lightning_mp.callbacks.spike_guard import SpikeGuard

__all__ = [
    "ActivationRangeMonitor",
    "AdamStateMonitor",
    "Alarm",
    "GradientUnderflowMonitor",
    "InstabilityMonitor",
    "InstabilityReport",
    "InstabilityWarning",
    "LossScaleMonitor",
    "NonFiniteLocator",
    "SpikeGuard",
]
