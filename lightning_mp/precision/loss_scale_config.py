"""How a loss scale starts, moves and gives up."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from lightning_mp._arguments import Check, check_arguments, explains_arguments, refuse_values

__all__ = ["SCALES", "LossScaleConfig"]

# Within these, a scale and its inverse are both normal fp32 numbers: no inverse overflows to inf,
# as that of 2^-128 does, and none is a subnormal that a GPU may flush to zero.
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
    """How the loss scale starts, moves and gives up.

    torch's `GradScaler` has no floor: 166 overflowing steps in a row take its scale to 0.0, and on
    the way, at 2^-128, it starts to write inf into weights as if nothing had happened. The defaults
    here are its rule with a floor of 1 and a ceiling of 2^24.

    Args:
        init_scale: The scale of the first step. `None` for 2^10 where gradients of weights are
            computed in fp16, which holds |g| < 64 there, else 2^16; within the limits.
        growth_factor: Multiplies the scale after `growth_interval` good steps. Powers of two keep
            every unscaled gradient exact.
        backoff_factor: Multiplies the scale after an overflowing step.
        growth_interval: Good steps in a row between two growths.
        warmup_interval: The same until the first overflow, while the largest gradient is not yet
            known and the scale can only be too low. `None` for 20 or `growth_interval`, whichever
            is less, where gradients of weights are computed in fp16, else `growth_interval`.
        min_scale: The floor. At least 2^-126, as the fp32 inverse of 2^-128 is inf.
        max_scale: The ceiling.
        hysteresis: Overflowing steps that it takes to lower the scale. The first `hysteresis - 1`
            of them after the start or after a growth are skipped at an unchanged scale; every later
            one lowers it, until the next growth refills the allowance. Good steps alone do not, as
            in Megatron, which like DeepSpeed uses 2; at the ceiling, `growth_interval` of them do.
        patience: Skipped steps in a row at the floor until `FloatingPointError`: there no lower
            scale is left to cure them.
        dynamic: `False` keeps `init_scale` for good, whatever the limits: overflowing steps are
            still skipped, and every one counts for `patience`.

    Raises:
        ValueError: If a value is out of range, or `min_scale <= init_scale <= max_scale` is not so.

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
            reason = "A dynamic scale starts within its limits. Move it, or the limit in its way."
            refuse_values(self, reason, **{name: getattr(self, name) for name in names})

    @classmethod
    @check_arguments(loss_scale=Check(SCALES, fix="Write `loss_scale='dynamic'`."))
    def parse(
        cls,
        loss_scale: "Literal['dynamic'] | float | LossScaleConfig",
        gradients_dtype: torch.dtype = torch.float32,
    ) -> "LossScaleConfig":
        """Make the configuration, without `None`, that a plugin's `loss_scale` stands for.

        Args:
            loss_scale: "dynamic"; a positive number for a static scale; or a configuration.
            gradients_dtype: The dtype that a backward computes gradients of weights in.
        """
        if loss_scale == "dynamic":
            loss_scale = cls()
        elif not isinstance(loss_scale, LossScaleConfig):
            loss_scale = cls(init_scale=float(loss_scale), dynamic=False)
        return loss_scale.resolve(gradients_dtype)

    def resolve(self, gradients_dtype: torch.dtype = torch.float32) -> "LossScaleConfig":
        """Return a copy with a number for each `None`, by the dtype that gradients are made in.

        fp16 gradients overflow where |g| * scale is above 65504. At 2^16 they hold |g| < 1 and no
        more, and every halving on the way down would cost a skipped step. At 2^10 they hold
        |g| < 64 and still keep |g| > 2.9e-11: of gradients drawn from N(0, 1e-7), 0.02% vanish,
        against 23.4% without a scale. Doubled every 20 good steps up to the first overflow, the
        scale is 2^16 after 120 steps and at the ceiling of 2^24 after 280, for one skipped step.
        """
        is_half = gradients_dtype == torch.float16
        start, warmup = self.init_scale, self.warmup_interval
        if start is None:
            start = min(max(2.0**10 if is_half else 2.0**16, self.min_scale), self.max_scale)
        if warmup is None:
            warmup = min(20, self.growth_interval) if is_half else self.growth_interval
        return replace(self, init_scale=start, warmup_interval=warmup)
