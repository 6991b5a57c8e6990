"""Effect of half precision on Adam's epsilon and second moments.

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
    """Values of epsilon and second moments in the dtypes that an optimizer uses.

    `str(report)` summarizes the report in one sentence.

    Args:
        eps: The configured epsilon.
        stored_eps: Epsilon rounded to `math_dtype`.
        state_dtype: The dtype in which `v` is stored between steps.
        math_dtype: The dtype to which a step rounds intermediate results.
        beta2: Decay rate of `v`.
        survives: Whether `stored_eps` is positive. Otherwise a zero gradient gives 0/0 = NaN.
        blow_up_gradient: The largest |g| whose square leaves `v` at 0; 0 if this does no harm.
        overflow_gradient: The smallest |g| for which `v` becomes inf in one step. The weight then
            never changes again.
        largest_step: The largest |update| / lr for gradients of constant size; 1 in exact
            arithmetic. Rounding of a `v` of one subnormal step adds a factor of up to sqrt(1.5).
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
        """Whether no constant gradient causes a larger update than in exact arithmetic."""
        return self.survives and self.largest_step <= 1

    def __str__(self) -> str:
        if not self.survives:
            small = f" and |gradient| <= {self.blow_up_gradient:.3g} gives infinite updates"
            return (
                f"eps={self.eps:g} is 0 in {self.math_dtype}: zero gradients give NaN updates"
                f"{small if self.blow_up_gradient else ''}; keep states in fp32"
            )
        if not self.is_safe:
            return (
                f"second moments in {self.state_dtype} stay 0 for |gradient| <= "
                f"{self.blow_up_gradient:.3g}, so updates grow to {self.largest_step:.3g} times "
                f"the learning rate with eps={self.eps:g}; keep states in fp32"
            )
        return (
            f"eps={self.eps:g} is effective in {self.math_dtype}; keep |gradient| below "
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
    """Compute whether Adam's epsilon survives in a dtype and where its second moment fails.

    With fp16 states and the default eps=1e-8, Adam turns every weight with a zero gradient into
    NaN at step 1, and every weight with |g| < 5.46e-3 into inf (NaN below 3e-7, where `m` is 0
    too). A larger epsilon is no cure: the largest one-step update is 9.2e4 times the learning rate
    at 3e-8, 4.6e4 at 1e-7, 5.4e3 at 1e-6 and 55 at 1e-4.

    The update is m / (sqrt(v) + eps), both bias-corrected. The first step sets `v` to
    (1 - beta2) g^2, which

    - flushes to 0 for |g| <= sqrt(2^-25 / (1 - beta2)) in fp16: 5.46e-3 at beta2=.999, 7.7e-4 at
      .95, 1.73e-2 at .9999. The update is then |g| / eps, with eps rounded to the same dtype;
    - overflows for |g| >= sqrt(65520 / (1 - beta2)), 8094 at beta2=.999. Gradients that stay above
      sqrt(65520) = 256 overflow `v` eventually: |g|=300 after 1331 steps.

    torch's `fused=True` computes in fp32 and stores in fp16. Epsilon survives and a single step is
    right, but `v` restarts from 0 in every step while the bias correction approaches 1, so the
    update grows to 1 / sqrt(1 - beta2) learning rates: 9.7 after 100 steps, 30.7 after 3000.

    bf16 has the range of fp32, so epsilon and small `v` survive and the report is safe. Its 8 bits
    of precision have another effect: at beta2=.999 and g=1, `v` stalls at 0.5 (fused: 0.25)
    instead of 1.

    Args:
        eps: Term added to the root of the second moment, at least 0.
        beta2: Decay rate of `v` in [0, 1); 0 represents the sum of Adagrad.
        state_dtype: The dtype in which `v` is stored.
        math_dtype: The dtype in which a step computes; `None` means `state_dtype`, as in torch's
            single-tensor and foreach optimizers. `fused=True` computes in fp32, except for Adagrad
            on a CPU before torch 2.15.

    Raises:
        ValueError: `eps` or `beta2` is out of range.

    References:
        - Adam, arXiv:1412.6980
        - NaN after few steps of `16-true` with Adam, Lightning#20619
    """
    math_dtype = math_dtype or state_dtype
    stored = rounded(eps, math_dtype)
    # The first step sets v to gain * g^2.
    flushed, gain = largest_flushed(state_dtype), 1 - beta2
    gradient = math.sqrt(flushed / gain)
    # Math in a wider dtype than the states still has this step's v, which storing it drops.
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
