"""What half precision leaves of Adam's epsilon and of its second moments.

Legend: `g` gradient, `m` first moment, `v` second moment.
"""

import math
from dataclasses import dataclass

import torch

from lightning_mp._arguments import Check, check_arguments
from lightning_mp.numerics.floats import largest_flushed, rounded, smallest_overflowing

__all__ = ["EpsilonReport", "epsilon_report"]


@dataclass(frozen=True, kw_only=True)
class EpsilonReport:
    """What is left of epsilon and of second moments in the dtypes that an optimizer uses.

    `str(report)` says it in one sentence.

    Args:
        eps: Epsilon as it was set.
        stored_eps: Epsilon where `v` is 0, in the dtype of the step's math.
        state_dtype: The dtype that `v` rests in between steps.
        math_dtype: The dtype that a step rounds its intermediate results to.
        beta2: How much of `v` a step keeps.
        survives: Whether `stored_eps` is above 0. If not, a zero gradient gives 0/0 = NaN.
        blow_up_gradient: The largest |g| whose square leaves `v` at 0; 0 where none does harm.
        overflow_gradient: The smallest |g| that takes `v` to inf in one step. There the weight
            stands still for good.
        largest_step: The largest |update| / lr that gradients of constant size meet, 1 in Adam's
            formula. A `v` that is but one subnormal step high adds up to sqrt(1.5) by rounding.
    """

    eps: float
    stored_eps: float
    state_dtype: torch.dtype
    math_dtype: torch.dtype
    beta2: float
    survives: bool
    blow_up_gradient: float
    overflow_gradient: float
    largest_step: float

    @property
    def is_safe(self) -> bool:
        """Whether no constant gradient is met by a larger update than the formula's."""
        return self.survives and self.largest_step <= 1

    def __str__(self) -> str:
        if not self.survives:
            small = f" and |gradient| <= {self.blow_up_gradient:.3g} infinite ones"
            return (
                f"eps={self.eps:g} is 0 in {self.math_dtype}: zero gradients give NaN updates"
                f"{small if self.blow_up_gradient else ''}; keep states in fp32"
            )
        if not self.is_safe:
            return (
                f"second moments in {self.state_dtype} stay 0 where |gradient| <= "
                f"{self.blow_up_gradient:.3g}, so that with eps={self.eps:g} updates grow to "
                f"{self.largest_step:.3g} times the learning rate; keep states in fp32"
            )
        return (
            f"eps={self.eps:g} does its work in {self.math_dtype}; keep |gradient| below "
            f"{self.overflow_gradient:.4g}, where second moments overflow"
        )


@check_arguments(
    eps=Check("[0, inf)", fix="Pass the optimizer's epsilon, such as 1e-8."),
    beta2=Check("[0, 1)", fix="Pass the optimizer's decay of second moments, such as 0.999."),
)
def epsilon_report(
    *,
    eps: float,
    beta2: float,
    state_dtype: torch.dtype,
    math_dtype: torch.dtype | None = None,
) -> EpsilonReport:
    """Say whether Adam's epsilon survives in a format, and where its second moment fails.

    With fp16 states and its default eps=1e-8, Adam turns every weight with a zero gradient into
    NaN at step 1, and every weight with |g| < 5.46e-3 into inf, or into NaN below 3e-7, where `m`
    is 0 too. A larger epsilon does not cure it: the largest one-step update is 9.2e4 learning rates
    at 3e-8, 4.6e4 at 1e-7, 5.4e3 at 1e-6 and 55 at 1e-4.

    The update is m / (sqrt(v) + eps), both bias-corrected. From 0, `v` becomes (1 - beta2) g^2, and

    - is flushed to 0 up to |g| = sqrt(2^-25 / (1 - beta2)) in fp16, where 2^-25, half the smallest
      subnormal, is the largest number that rounds to 0: 5.46e-3 at beta2=.999, 7.7e-4 at .95,
      1.73e-2 at .9999. There the update is |g| / eps, with eps rounded to the same format;
    - is inf from |g| = sqrt(65520 / (1 - beta2)) on, as 65520 is the smallest number that rounds to
      inf in fp16: 8094 at beta2=.999. (Gradients that stay above sqrt(65520) = 256 take it there
      in the end: |g|=300 after 1331 steps.)

    torch's `fused=True` computes in fp32 and stores in fp16. Then epsilon survives and one step is
    right, but `v` starts from 0 again every step while the bias correction goes to 1, and the
    update grows to 1 / sqrt(1 - beta2) learning rates: 9.7 after 100 steps, 30.7 after 3000.

    bf16 has fp32's range: epsilon and small `v` survive, and the report is a good one. Its 8 bits
    have another fault: at beta2=.999 and g=1, `v` stalls at 0.5 (fused: at 0.25) in place of 1.

    Args:
        eps: Epsilon, added to the root of the second moment; at least 0.
        beta2: How much of `v` a step keeps, at least 0 and below 1; 0 stands for Adagrad's sum.
        state_dtype: The dtype that `v` rests in.
        math_dtype: The dtype that a step computes in; `None` for `state_dtype`, as in torch's
            single-tensor and foreach optimizers. `fused=True` is fp32.

    Raises:
        ValueError: If `eps` or `beta2` is out of range.

    References:
        - Adam, arXiv:1412.6980
        - NaN after few steps of `16-true` with Adam, Lightning#20619
    """
    math_dtype = math_dtype or state_dtype
    stored = rounded(eps, math_dtype)
    # From 0, one step takes v to gain * g^2.
    flushed, gain = largest_flushed(state_dtype), 1 - beta2
    gradient = math.sqrt(flushed / gain)
    # Math that is wider than the states has the v of this step at least, which they then drop.
    root = math.sqrt(flushed) if math_dtype.itemsize > state_dtype.itemsize else 0.0
    denominator = root + stored
    return EpsilonReport(
        eps=eps,
        stored_eps=stored,
        state_dtype=state_dtype,
        math_dtype=math_dtype,
        beta2=beta2,
        survives=stored > 0,
        blow_up_gradient=gradient,
        overflow_gradient=math.sqrt(smallest_overflowing(state_dtype) / gain),
        largest_step=max(1.0, gradient / denominator) if denominator else math.inf,
    )
