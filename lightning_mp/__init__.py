"""Low-precision and large-batch training plugins for PyTorch Lightning.

Every public name can be imported from here. Names are loaded on first use, so that
`import lightning_mp` takes milliseconds and losses and optimizers do not import Lightning.
`Trainer(strategy="inf_cl")` works as soon as the package is imported.
"""

import os
from typing import TYPE_CHECKING

from lightning_mp._lazy import lazy_names
from lightning_mp._registration import register_strategies

if TYPE_CHECKING:  # the only list of public names; `lazy_names` reads it, too
    # `mypy --strict` treats only imports with `as` as re-exports.
    from lightning_mp import callbacks as callbacks
    from lightning_mp import cli as cli
    from lightning_mp import contrastive as contrastive
    from lightning_mp import gradient_cache as gradient_cache
    from lightning_mp import metrics as metrics
    from lightning_mp import numerics as numerics
    from lightning_mp import optim as optim
    from lightning_mp import precision as precision
    from lightning_mp import strategies as strategies

    # Lazy, because reading the version takes longer than this whole import.
    from lightning_mp._version import __version__ as __version__
    from lightning_mp.callbacks import ActivationRangeMonitor as ActivationRangeMonitor
    from lightning_mp.callbacks import AdamStateMonitor as AdamStateMonitor
    from lightning_mp.callbacks import Alarm as Alarm
    from lightning_mp.callbacks import GradientUnderflowMonitor as GradientUnderflowMonitor
    from lightning_mp.callbacks import InstabilityError as InstabilityError
    from lightning_mp.callbacks import InstabilityMonitor as InstabilityMonitor
    from lightning_mp.callbacks import InstabilityReport as InstabilityReport
    from lightning_mp.callbacks import InstabilityWarning as InstabilityWarning
    from lightning_mp.callbacks import LossScaleMonitor as LossScaleMonitor
    from lightning_mp.callbacks import NonFiniteLocator as NonFiniteLocator
    from lightning_mp.callbacks import ParameterMonitor as ParameterMonitor
    from lightning_mp.callbacks import PrecisionPreflight as PrecisionPreflight
    from lightning_mp.callbacks import RepresentationMonitor as RepresentationMonitor
    from lightning_mp.callbacks import SpikeGuard as SpikeGuard
    from lightning_mp.callbacks import TensorCollector as TensorCollector

    # Not from `cli`, whose commands do not import Lightning.
    from lightning_mp.cli.lightning_cli import LightningMPCLI as LightningMPCLI
    from lightning_mp.contrastive import ClipLoss as ClipLoss
    from lightning_mp.contrastive import ContrastiveLoss as ContrastiveLoss
    from lightning_mp.contrastive import LossStatistics as LossStatistics
    from lightning_mp.contrastive import MatryoshkaLoss as MatryoshkaLoss
    from lightning_mp.contrastive import SigLipLoss as SigLipLoss
    from lightning_mp.contrastive import SigmoidContrastiveLoss as SigmoidContrastiveLoss
    from lightning_mp.gradient_cache import GradientCache as GradientCache
    from lightning_mp.metrics import ContrastiveRecall as ContrastiveRecall
    from lightning_mp.metrics import ZeroShotAccuracy as ZeroShotAccuracy
    from lightning_mp.optim import EpsilonReport as EpsilonReport
    from lightning_mp.optim import SafeAdamW as SafeAdamW
    from lightning_mp.optim import check_adam_epsilon as check_adam_epsilon
    from lightning_mp.optim import epsilon_report as epsilon_report
    from lightning_mp.optim import guard_adam_epsilon as guard_adam_epsilon
    from lightning_mp.optim import keep_fp32_states as keep_fp32_states
    from lightning_mp.precision import BalancedAMP as BalancedAMP
    from lightning_mp.precision import FSDPBalancedAMP as FSDPBalancedAMP
    from lightning_mp.precision import InfClamp as InfClamp
    from lightning_mp.precision import LossScaleConfig as LossScaleConfig
    from lightning_mp.precision import ModelParallelBalancedAMP as ModelParallelBalancedAMP
    from lightning_mp.precision import OpPolicy as OpPolicy
    from lightning_mp.precision import PureFP16 as PureFP16
    from lightning_mp.strategies import InfCLModelParallelStrategy as InfCLModelParallelStrategy
    from lightning_mp.strategies import InfCLStrategy as InfCLStrategy

__getattr__, __dir__, __all__ = lazy_names(__name__)

# In a checkout without symlinks (git on Windows, an unpacked zip) the symlinks are text files, and
# `callbacks` and `strategies` are found one folder up.
if os.path.isfile(os.path.join(__path__[0], "callbacks")):
    __path__.append(os.path.dirname(__path__[0]))

register_strategies()
