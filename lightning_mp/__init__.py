"""Low-precision and large-batch training plugins for PyTorch Lightning.

Importing the package registers its strategies, so that `Trainer(strategy="inf_cl")` knows them.
"""

from lightning_mp import strategies
from lightning_mp.contrastive import ContrastiveLoss
from lightning_mp.metrics import ContrastiveRecall
from lightning_mp.optim import SafeAdamW
from lightning_mp.precision import (
    BalancedAMP,
    FSDPBalancedAMP,
    InfClamp,
    LossScaleConfig,
    ModelParallelBalancedAMP,
    OpPolicy,
    PureFP16,
)

__version__ = "0.1.0"

__all__ = [
    "BalancedAMP",
    "ContrastiveLoss",
    "ContrastiveRecall",
    "FSDPBalancedAMP",
    "InfClamp",
    "LossScaleConfig",
    "ModelParallelBalancedAMP",
    "OpPolicy",
    "PureFP16",
    "SafeAdamW",
    "strategies",
]
