"""Callbacks that watch for instability; imported as `lightning_mp.callbacks`."""

# In a clone, `import callbacks` would define every class a second time.
if __name__ != "lightning_mp.callbacks":
    raise ImportError(
        f"Passed `import {__name__}`. This folder is installed as `lightning_mp.callbacks`: "
        "write `import lightning_mp.callbacks`."
    )

from typing import TYPE_CHECKING

from lightning_mp._lazy import lazy_names

if TYPE_CHECKING:  # the only list of names; `lazy_names` reads it
    from lightning_mp.callbacks.activation_range_monitor import (
        ActivationRangeMonitor as ActivationRangeMonitor,
    )
    from lightning_mp.callbacks.adam_state_monitor import AdamStateMonitor as AdamStateMonitor
    from lightning_mp.callbacks.gradient_underflow_monitor import (
        GradientUnderflowMonitor as GradientUnderflowMonitor,
    )
    from lightning_mp.callbacks.instability_report import InstabilityReport as InstabilityReport
    from lightning_mp.callbacks.loss_scale_monitor import LossScaleMonitor as LossScaleMonitor
    from lightning_mp.callbacks.monitor import Alarm as Alarm
    from lightning_mp.callbacks.monitor import InstabilityError as InstabilityError
    from lightning_mp.callbacks.monitor import InstabilityMonitor as InstabilityMonitor
    from lightning_mp.callbacks.monitor import InstabilityWarning as InstabilityWarning
    from lightning_mp.callbacks.non_finite_locator import NonFiniteLocator as NonFiniteLocator
    from lightning_mp.callbacks.parameter_monitor import ParameterMonitor as ParameterMonitor
    from lightning_mp.callbacks.precision_preflight import PrecisionPreflight as PrecisionPreflight
    from lightning_mp.callbacks.representation_monitor import (
        RepresentationMonitor as RepresentationMonitor,
    )
    from lightning_mp.callbacks.spike_guard import SpikeGuard as SpikeGuard
    from lightning_mp.callbacks.tensor_collector import TensorCollector as TensorCollector

# Lazy, so that `lightning-mp report` does not import torch.
__getattr__, __dir__, __all__ = lazy_names(__name__)
