"""Precision plugins for `Trainer(plugins=...)` and their components."""

from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.fsdp import FSDPBalancedAMP
from lightning_mp.precision.inf_clamp import InfClamp
from lightning_mp.precision.loss_scale_config import LossScaleConfig
from lightning_mp.precision.loss_scaler import LossScaler
from lightning_mp.precision.model_parallel import ModelParallelBalancedAMP
from lightning_mp.precision.op_policy import OpPolicy
from lightning_mp.precision.pure_fp16 import PureFP16

__all__ = [
    "BalancedAMP",
    "FSDPBalancedAMP",
    "InfClamp",
    "LossScaleConfig",
    "LossScaler",
    "ModelParallelBalancedAMP",
    "OpPolicy",
    "PureFP16",
]
