r"""The criterion that training in half precision reaches the loss of fp32, for all such tests.

A bound of 1% on the final loss of one run means nothing: a run in bf16 ends 1.2% below fp32 on one
CPU and 1.3% above on another, because sums have another order. For AdamW on the same model, which
ends within 0.01%, 1% is far too much. So the bound is measured on the machine of the test.

The measure is training in fp32 in which every operation reads operands that are rounded to the
bits of the half dtype (`Rounded`). It has the unavoidable cost and the scatter of half precision,
and shares no code with a plugin. (fp32 itself scatters less: starts that differ by a relative 1e-6
end 3e-6 apart.) Let f be the final losses in fp32, r with rounding and h with a plugin, for n_r and
n_h seeds. Each ratio is of one seed, so that differences between seeds cancel:

.. math::
    e = \mathrm{mean} \log(h / f), \quad
    c = \mathrm{mean} \log(r / f), \quad
    \sigma = \mathrm{sd} \log(r / f), \quad
    |e| \le |c| + t \, \sigma \sqrt{1 / n_h + 1 / n_r}

t is the quantile of Student's distribution with n_r - 1 degrees of freedom at `false_alarm`, the
probability that a plugin fails that only rounds. The scatter of the plugin's own runs is not used,
because a defect that scatters would raise its own bound.

Example:
    PARITY = Parity(train)  # train(seed, plugin) -> the loss over all data, in fp32, at the end
    verdict = PARITY.judge(lambda: BalancedAMP(half="bf16"), "bf16")
    assert verdict.holds, verdict
"""

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

BITS = {"fp16": 11, "bf16": 8}  # bits of a significand, with the leading bit
Write = Literal["fp32", "stochastic", "nearest"]


class Train(Protocol):
    """Trains from a seed with a precision plugin, `None` for fp32; returns the final loss.

    The loss must be positive, computed in fp32 with the final weights, and over enough data to
    measure their quality.
    """

    def __call__(self, seed: int, plugin: Any) -> float: ...


@dataclass(frozen=True)
class Verdict:
    """Result of `Parity.judge`; its string contains all numbers."""

    half: str
    excess: float  # e of the rule; NaN where a run has diverged
    cost: float  # |c|
    noise: float  # sigma
    quantile: float  # t
    losses: Sequence[float]
    in_fp32: Sequence[float]
    rounded: Sequence[float]

    @property
    def bound(self) -> float:
        """Return the largest accepted magnitude of the excess."""
        spread = math.sqrt(1 / len(self.losses) + 1 / len(self.rounded))
        return self.cost + self.quantile * self.noise * spread

    @property
    def holds(self) -> bool:
        """Return whether the runs reached the loss of fp32."""
        return abs(self.excess) <= self.bound

    def __str__(self) -> str:
        seeds, references = len(self.losses), len(self.rounded)
        listed = [", ".join(f"{x:.6g}" for x in each) for each in (self.losses, self.in_fp32)]
        return (
            f"the end loss is {self.excess:+.4%} off that of fp32, as a mean over {seeds} seeds, "
            f"where {self.bound:.4%} is allowed: rounding to {self.half} costs {self.cost:.4%} and "
            f"scatters by {self.noise:.4%} a run, over {references} seeds, of which "
            f"{self.quantile:.2f} standard errors count. Losses {listed[0]}; in fp32 {listed[1]}."
        )


class Parity:
    """Judges plugins by the final losses of one kind of training.

    The runs to compare with are trained when they are first needed, and kept.

    Args:
        train: The training.
        references: Number of seeds in fp32 and with rounding; at least 3. t is large for few seeds:
            28 for 4, 7.9 for 8.
        seeds: Number of these seeds for a plugin; at least 3.
        false_alarm: Probability that a plugin fails that only rounds.
    """

    def __init__(
        self, train: Train, *, references: int = 8, seeds: int = 3, false_alarm: float = 1e-4
    ) -> None:
        if not 3 <= seeds <= references:
            raise ValueError(f"Passed `Parity({references=}, {seeds=})`. 3 <= seeds <= references.")
        self.train = train
        self.references, self.seeds, self.false_alarm = references, seeds, false_alarm
        self._kept: dict[Any, list[float]] = {}

    def in_fp32(self) -> list[float]:
        """Return the final losses without a plugin."""
        return self._ends("fp32", lambda: None)

    def rounded(self, half: str, write: Write = "fp32") -> list[float]:
        """Return the final losses with `Rounded(half, write)`."""
        return self._ends((half, write), lambda: Rounded(half, write))

    def judge(
        self,
        make_plugin: Callable[[], Any],
        half: str,
        *,
        write: Write = "fp32",
        train: Train | None = None,
    ) -> Verdict:
        """Train with new plugins, and compare.

        Args:
            make_plugin: Makes a plugin for each run.
            half: Half-precision dtype of the plugin, `"fp16"` or `"bf16"`.
            write: Rounding of written weights by the plugin, see `Rounded`.
            train: An equivalent training, such as with the fused variant of an optimizer.
        """
        losses = [(train or self.train)(seed, make_plugin()) for seed in range(self.seeds)]
        costs = _log_ratios(self.rounded(half, write), self.in_fp32())
        return Verdict(
            half=half,
            excess=statistics.fmean(_log_ratios(losses, self.in_fp32())),
            cost=abs(statistics.fmean(costs)),
            noise=statistics.stdev(costs),
            quantile=student_quantile(self.references - 1, self.false_alarm),
            losses=losses,
            in_fp32=self.in_fp32()[: self.seeds],
            rounded=self.rounded(half, write),
        )

    def _ends(self, key: Any, make_plugin: Callable[[], Any]) -> list[float]:
        if key not in self._kept:
            self._kept[key] = [self.train(each, make_plugin()) for each in range(self.references)]
        return self._kept[key]


class Rounded(Precision):
    """Trains in fp32 on operands with the significand of a half dtype: the least cost of half.

    Forward and backward are rounded, the optimizer is not. Exponents keep the range of fp32, so
    nothing overflows, nothing underflows, and no loss scale is needed.

    Args:
        half: `"fp16"` or `"bf16"`.
        write: Written weights stay in `"fp32"`, or are rounded stochastically (`"stochastic"`) or
            to `"nearest"`, as by a plugin without residuals.
    """

    def __init__(self, half: str, write: Write = "fp32") -> None:
        self.write = write
        self._rounding = _Rounding(24 - BITS[half])

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        with self._rounding:
            yield

    def backward(self, *args: Any, **kwargs: Any) -> None:
        # Manual optimization runs backward and step inside the context of the forward.
        with _disable_current_modes(), self._rounding:
            super().backward(*args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            result = super().optimizer_step(optimizer, *args, **kwargs)
            for group in optimizer.param_groups if self.write != "fp32" else ():
                for p in group["params"]:
                    is_random = self.write == "stochastic"
                    p.data.copy_(self._rounding.round(p.data, is_random))
        return result


class _Rounding(TorchDispatchMode):
    """Rounds the inputs of operations, except of views and in-place writes.

    Args:
        dropped_bits: Number of significand bits that are dropped.
    """

    def __init__(self, dropped_bits: int) -> None:
        super().__init__()
        self._step = 1 << dropped_bits
        self._generator = torch.Generator().manual_seed(0)

    def round(self, value: Any, is_random: bool = False) -> Any:
        """Return rounded fp32 tensors, with ties away from 0; return other values unchanged."""
        if isinstance(value, list | tuple):
            return [self.round(each) for each in value]
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        bits = value.view(torch.int32)
        if is_random:
            bits = bits + torch.randint(self._step, bits.shape, generator=self._generator).int()
        else:
            bits = bits + self._step // 2
        return bits.bitwise_and_(-self._step).view(torch.float32)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable and not func.is_view:
            args = [self.round(each) for each in args]
        return func(*args, **(kwargs or {}))


def _log_ratios(losses: Sequence[float], in_fp32: Sequence[float]) -> list[float]:
    """Return log(loss / loss in fp32) of every seed; NaN if a loss is not positive."""
    pairs = zip(losses, in_fp32, strict=False)
    return [math.log(a / b) if 0 < a < math.inf else math.nan for a, b in pairs]


@functools.cache
def student_quantile(freedom: int, probability: float) -> float:
    """Return the t that |T| exceeds with a given probability, by degrees of freedom.

    T is sqrt(freedom) tan(angle), where angles have a density proportional to cos^(freedom - 1).
    """
    angles = torch.linspace(0, math.pi / 2, 1_000_001, dtype=torch.float64)
    density = angles.cos() ** (freedom - 1)
    beyond = density.flip(0).cumsum(0).flip(0) / density.sum()
    angle = angles[int((beyond > probability).sum()) - 1].item()
    return math.sqrt(freedom) * math.tan(angle)
