"""Configuration of the loss scale."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from lightning_mp._arguments import Check, check_arguments, explains_arguments, refuse_values

__all__ = ["SCALES", "LossScaleConfig"]

# In this range a scale and its inverse are normal fp32 numbers: no inverse overflows to inf, as the
# inverse of 2^-128 does, and none is a subnormal that a GPU may flush to zero.
SCALES = "[2**-126, 2**126]"


@explains_arguments(
    checks={
        "init_scale min_scale max_scale": SCALES,
        "growth_factor": "(1, inf)",  # with a factor of 1 the scale would never move
        "backoff_factor": "(0, 1)",
        "growth_interval warmup_interval hysteresis patience": "[1, inf)",
    }
)
@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Initial value, growth, backoff and limits of the loss scale.

    torch's `GradScaler` has no floor: 166 consecutive overflows take its scale to 0.0, and from
    2^-128 on it silently writes inf into weights. The defaults follow the rule of `GradScaler` with
    a floor of 1 and a ceiling of 2^24.

    Args:
        init_scale: Scale of the first step. `None` means 2^10 where weight gradients are computed
            in fp16, which then represents |g| < 64, else 2^16; clipped to the limits.
        growth_factor: Factor of the scale after `growth_interval` good steps. Powers of two keep
            unscaled gradients exact.
        backoff_factor: Factor of the scale after a step with overflow.
        growth_interval: Number of consecutive good steps between two growths.
        warmup_interval: The growth interval until the first overflow, while the largest gradient is
            unknown. `None` means `min(20, growth_interval)` where weight gradients are computed in
            fp16, else `growth_interval`.
        min_scale: Floor of the scale; at least 2^-126, because the fp32 inverse of 2^-128 is inf.
        max_scale: Ceiling of the scale.
        hysteresis: Number of overflows that lower the scale. After the start and after every
            growth, the first `hysteresis - 1` overflows skip the step at an unchanged scale, and
            every further overflow lowers the scale. Only a growth (at the ceiling:
            `growth_interval` good steps) restores the allowance, as in Megatron. Megatron and
            DeepSpeed use 2.
        patience: Number of consecutive skipped steps at the floor that raises `FloatingPointError`.
        dynamic: `False` keeps the scale at `init_scale` regardless of the limits. Steps with
            overflow are still skipped and count for `patience`.

    Raises:
        ValueError: A value is out of range, or `min_scale <= init_scale <= max_scale` is violated.

    References:
        Mixed Precision Training, arXiv:1710.03740.
    """

    init_scale: float | None = None
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    warmup_interval: int | None = None
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    hysteresis: int = 1
    patience: int = 20
    dynamic: bool = True

    def __post_init__(self) -> None:
        start = self.min_scale if self.init_scale is None else self.init_scale
        if self.dynamic and not self.min_scale <= start <= self.max_scale:
            names = ("init_scale", "min_scale", "max_scale")
            reason = "`init_scale` must be between `min_scale` and `max_scale`. Change one of them."
            refuse_values(self, reason, **{name: getattr(self, name) for name in names})

    @classmethod
    @check_arguments(loss_scale=Check(SCALES, fix="Write `loss_scale='dynamic'`."))
    def parse(
        cls,
        loss_scale: "Literal['dynamic'] | float | LossScaleConfig",
        gradients_dtype: torch.dtype = torch.float32,
    ) -> "LossScaleConfig":
        """Return the resolved configuration for the `loss_scale` argument of a plugin."""
        if loss_scale == "dynamic":
            loss_scale = cls()
        elif not isinstance(loss_scale, LossScaleConfig):
            loss_scale = cls(init_scale=float(loss_scale), dynamic=False)
        return loss_scale.resolve(gradients_dtype)

    def resolve(self, gradients_dtype: torch.dtype = torch.float32) -> "LossScaleConfig":
        """Return a copy in which every `None` is replaced, depending on the dtype of gradients.

        In fp16 a scale of 2^16 represents only |g| < 1, and every halving costs a skipped step. A
        scale of 2^10 represents 2.9e-11 < |g| < 64: 0.02% of gradients drawn from N(0, 1e-7)
        underflow. Doubling every 20 good steps until the first overflow reaches 2^16 after 120
        steps and the ceiling of 2^24 after 280, at the cost of one skipped step.
        """
        is_half = gradients_dtype == torch.float16
        start, warmup = self.init_scale, self.warmup_interval
        if start is None:
            start = min(max(2.0**10 if is_half else 2.0**16, self.min_scale), self.max_scale)
        if warmup is None:
            warmup = min(20, self.growth_interval) if is_half else self.growth_interval
        return replace(self, init_scale=start, warmup_interval=warmup)
