"""Optimizers for half precision and a guard for Adam's epsilon; usable in any training loop."""

from lightning_mp.optim.adam_epsilon import check_adam_epsilon, guard_adam_epsilon
from lightning_mp.optim.epsilon_report import EpsilonReport, epsilon_report
from lightning_mp.optim.fp32_states import keep_fp32_states
from lightning_mp.optim.safe_adamw import SafeAdamW

__all__ = [
    "EpsilonReport",
    "SafeAdamW",
    "check_adam_epsilon",
    "epsilon_report",
    "guard_adam_epsilon",
    "keep_fp32_states",
]
