"""Statistics of the next step of Adam, and rules for its second moment.

Legend: `N` parameters, `K` columns of `AdamField`.
"""

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.callbacks._rules.ranges import ALIVE, ROUNDING, origin_of
from lightning_mp.callbacks._rules.records import Learning, Verdict
from lightning_mp.numerics.floats import HALF_DTYPES, state_dtype
from lightning_mp.numerics.tensor_stats import local_shard, stored_values

__all__ = [
    "AdamField",
    "AdamNumbers",
    "AdamStateRule",
    "adam_statistics",
    "has_second_moments",
    "quantized_states",
]

_BLOCK = 2**16  # values per block, so that a dozen passes stay in the cache of a CPU
_SMALLEST = 1e-18  # its square is still normal in fp32
_ALL = 0.99  # share of a tensor that raises an alarm without a baseline
_MEMORY = 0.1  # share of the 1 / (1 - beta2) steps after which the RMS is meaningful


class AdamField(IntEnum):
    """Columns of `adam_statistics`. They are sums, so that shards can be added."""

    NUMEL = 0
    NON_ZERO = 1  # number of nonzero gradient values
    SQUARED_RATIO = 2  # sum of `g^2 / max(v_hat, eps^2)`
    BELOW_EPSILON = 3  # number of values with `sqrt(v_hat) < eps` and a nonzero gradient
    SQUARED_UPDATE = 4  # sum of `(lr * m_hat / (sqrt(v_hat) + eps))^2`
    SQUARED_WEIGHT = 5
    SQUARED_GRADIENT = 6
    SECOND_MOMENT = 7  # sum of `v` after the step, without bias correction
    STAGNANT = 8  # number of half weights that a nonzero update leaves unchanged
    NON_FINITE = 9  # 1 if a sum is NaN or inf; all sums above are then 0
    BAD_STATE = 10  # 1 if gradient and weight are finite, so that the state is non-finite
    STEP = 11  # step count after this step; the maximum over shards, not the sum


def has_second_moments(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Return whether an optimizer has Adam's moments of a parameter."""
    state = optimizer.state.get(parameter, {})
    return "exp_avg" in state and "exp_avg_sq" in state and not _quantized_in(state)


def quantized_states(optimizer: Optimizer) -> list[str]:
    """Return the names of 8-bit states, which cannot be read directly."""
    return next(filter(None, map(_quantized_in, optimizer.state.values())), [])


def _quantized_in(state: dict[str, Any]) -> list[str]:
    tensors = {name: t for name, t in state.items() if isinstance(t, Tensor) and t.numel() > 1}
    # bitsandbytes stores `state1` and `state2` in uint8; torchao uses a tensor subclass.
    eight_bits = (torch.uint8, torch.int8)
    return [n for n, t in tensors.items() if t.dtype in eight_bits or hasattr(t, "codes")]


@torch.no_grad()
def adam_statistics(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    unscale: float | Tensor,
    *,
    keeps_rounding: bool = False,
) -> Tensor:
    r"""Return the statistics of the next step, without changing any tensor.

    .. math::
        v = \beta_2 v + (1 - \beta_2) g^2, \quad \hat v = v / (1 - \beta_2^t), \quad
        m = \beta_1 m + (1 - \beta_1) g, \quad \hat m = m / (1 - \beta_1^t)

    Rows are float64 (fp32 on MPS) on the device of the parameter. The row of a parameter without
    Adam's states or with an empty gradient is zero. With `keeps_rounding`, the optimizer keeps
    rounding errors of half weights, so no weight is stagnant.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    rows = [
        _row(
            groups[id(p)] | ({"write_back": "kept"} if keeps_rounding else {}),
            optimizer.state.get(p, {}),
            p,
            gradient,
            unscale,
        )
        for p, gradient in zip(parameters, gradients, strict=True)
    ]
    return torch.stack(rows)


def _row(
    group: dict[str, Any],
    state: dict[str, Any],
    parameter: Tensor,
    gradient: Tensor,
    unscale: float | Tensor,
) -> Tensor:
    wide = state_dtype(parameter.device)
    if "exp_avg_sq" not in state or not local_shard(gradient).numel():
        return torch.zeros(len(AdamField), dtype=wide, device=parameter.device)
    held = map(local_shard, (parameter, gradient, state["exp_avg"], state["exp_avg_sq"]))
    # Complex values are viewed as real and imaginary parts, as in torch's step.
    tensors = [stored_values(t.to_dense() if t.is_sparse else t) for t in held]
    step = torch.as_tensor(state.get("step", 1), dtype=torch.float32) + 1
    # On a GPU every block takes a dozen kernels, so use one block.
    size = _BLOCK if tensors[0].device.type == "cpu" else max(tensors[0].numel(), 1)
    blocks = zip(*(t.reshape(-1).split(size) for t in tensors), strict=True)
    parts = [_block_sums(group, step, unscale, block) for block in blocks]
    sums = torch.stack(parts).sum(dim=0, dtype=wide)
    # Flagged and set to 0, because one NaN would make the sum over shards NaN.
    is_bad = ~sums.isfinite().all()
    inputs = [AdamField.SQUARED_WEIGHT - 1, AdamField.SQUARED_GRADIENT - 1]
    # Gradient and weights are finite, so the state is the cause.
    is_state_bad = is_bad & sums[inputs].isfinite().all()
    sums = torch.where(is_bad, 0, sums)
    count = torch.full((), tensors[0].numel(), dtype=wide, device=sums.device)
    flags = [is_bad.to(wide), is_state_bad.to(wide), step.to(sums, non_blocking=True)]
    return torch.stack([count, *sums, *flags])


def _block_sums(
    group: dict[str, Any], step: Tensor, unscale: float | Tensor, block: Sequence[Tensor]
) -> Tensor:
    """Return the columns `NON_ZERO` to `STAGNANT` of a block of a parameter, in fp32."""
    beta1, beta2 = (float(b) for b in group["betas"])
    weight, g, m, v = (part.float() for part in block)
    if isinstance(unscale, Tensor) or unscale != 1:
        g = g * unscale
    # Computed before the step, which overwrites the states.
    root = torch.addcmul(v * beta2, g, g, value=1 - beta2).div_(1 - beta2**step).sqrt_()
    update = torch.lerp(m, g, 1 - beta1).div_(root + group["eps"])
    factor = group["lr"] / (1 - beta1**step)
    is_moving = g != 0
    # Steps that keep rounding errors or round stochastically do not stagnate.
    is_rounded = group.get("write_back", "nearest") == "nearest"
    is_still = torch.zeros((), device=g.device)
    if block[0].dtype in HALF_DTYPES and is_rounded:
        stepped = torch.addcmul(weight, update, -factor).to(block[0].dtype)
        is_still = (stepped == block[0]).logical_and_(is_moving)
    second_moment = torch.dot(root, root) * (1 - beta2**step)
    below = (root < max(group["eps"], _SMALLEST)).logical_and_(is_moving)
    ratio = g.div(root.clamp_(min=max(group["eps"], _SMALLEST)))
    sums = [
        is_moving.count_nonzero(),
        torch.dot(ratio, ratio),
        below.count_nonzero(),
        torch.dot(update, update) * factor**2,
        torch.dot(weight, weight),
        torch.dot(g, g),
        second_moment,
        is_still.count_nonzero(),
    ]
    return torch.stack([each.to(torch.float32) for each in sums])


# State of each tensor, as saved in checkpoints.
_UNKNOWN: dict[str, Any] = {
    "samples": 0,
    "rms": 0.0,  # the maximum of the first samples
    "below": 0.0,  # the largest share below epsilon in the first samples
    "newest": (),  # the latest RMS values
    "zero_from": None,  # the step since which the gradient has been zero
    "with": 0,  # samples with a gradient
    "without": 0,  # samples without a gradient before the current run of zeros
    "run": 0,  # samples in the current run of zeros
    "grown": 0,  # samples before which the second moment did not only decay
    "moment": 0.0,  # the second moment at the last sample
    "at": 0,  # Adam's step at the last sample
    "from": 0,  # the step of the first sample
    "is_real": False,  # whether the gradient was ever more than rounding error
}


class AdamNumbers:
    """Measurements of the next update of one tensor, from its row of `adam_statistics`."""

    def __init__(self, name: str, row_K: npt.NDArray[Any]) -> None:
        sums = dict(zip(AdamField, map(float, row_K), strict=True))
        count = max(sums[AdamField.NUMEL], 1.0)
        weight = math.sqrt(sums[AdamField.SQUARED_WEIGHT])
        self.name = name
        self.numel = int(count)
        self.is_judged = sums[AdamField.NUMEL] > 0 and not sums[AdamField.NON_FINITE]
        self.is_zero = not sums[AdamField.NON_ZERO]  # the whole gradient
        self.rms = math.sqrt(sums[AdamField.SQUARED_RATIO] / count)  # of `g / max(sqrt(v), eps)`
        self.gradient_rms = math.sqrt(sums[AdamField.SQUARED_GRADIENT] / count)
        # The share of moving values with `sqrt(v) < eps`.
        self.below_epsilon = sums[AdamField.BELOW_EPSILON] / max(sums[AdamField.NON_ZERO], 1.0)
        # The norm of the update over that of the weights; NaN for weights of 0.
        update = math.sqrt(sums[AdamField.SQUARED_UPDATE])
        self.ratio = update / weight if weight else math.nan
        self.moving, self.stagnant = sums[AdamField.NON_ZERO], sums[AdamField.STAGNANT]
        self.second_moment = sums[AdamField.SECOND_MOMENT]
        self.step = int(sums[AdamField.STEP])  # step count after this step


@dataclass(kw_only=True, eq=False)
class AdamStateRule(Learning):
    """Judges samples of Adam's states; see docs/callbacks/adam-state-monitor.md."""

    baseline_samples: int
    max_update_rms: float
    max_below_epsilon: float
    zero_run_steps: int
    min_ratio: float
    max_ratio: float
    max_stagnant: float
    # Whether the next steps must be sampled to confirm a high RMS.
    wants_more: bool = field(default=False, init=False)
    _usual: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    _highest_rate: float = field(default=0.0, init=False)
    _last_rate: float = field(default=0.0, init=False)
    _suspects: dict[str, int] = field(default_factory=dict, init=False)  # step of a first high RMS

    def judge(
        self,
        step: int,
        tensors: Collection[AdamNumbers],
        *,
        rate: float | None,
        beta2: float,
        eps: float,
        first: Collection[str],
    ) -> list[Verdict]:
        """Add a sample of tensors with finite numbers and return verdicts; prefer `first`."""
        self._highest_rate = max(self._highest_rate, rate or 0.0)
        is_rising, self._last_rate = (rate or 0.0) > self._last_rate, rate or 0.0
        is_silent = all(numbers.is_zero for numbers in tensors)
        moving = [numbers.gradient_rms for numbers in tensors if not numbers.is_zero]
        rounding = ROUNDING * statistics.median(moving) if moving else 0.0
        verdicts = self._judge_stagnant(tensors, rate, is_rising)
        high: list[Verdict] = []
        for numbers in tensors:
            usual = self._usual.setdefault(numbers.name, {**_UNKNOWN, "from": step})
            usual["samples"] += 1
            found = [self._judge_zero_run(step, numbers, usual, beta2, is_silent)]
            newest = usual["newest"] = [*usual["newest"], numbers.rms][-32:]
            is_known = usual["samples"] > self.baseline_samples
            usual["is_real"] |= numbers.gradient_rms > rounding
            # A gradient of pure rounding error is below epsilon in any healthy run.
            if usual["is_real"]:
                found.append(self._judge_epsilon(numbers, usual, eps, is_known))
                # Only a second sample distinguishes a warm-up from a low learning rate.
                knows_rate = is_known or (rate is not None and not is_rising)
                found.append(self._judge_ratio(numbers, rate, is_known, knows_rate))
            verdicts += [replace(verdict, tensor=numbers.name) for verdict in found if verdict]
            if not is_known or numbers.step < _MEMORY / (1 - beta2):
                usual["rms"] = max(usual["rms"], numbers.rms)
                usual["below"] = max(usual["below"], numbers.below_epsilon)
                continue
            limit = max(self._highest_rms(numbers, newest), 1.5 * usual["rms"])
            if numbers.rms > limit:
                high.append(Verdict("update_rms", numbers.rms, limit, tensor=numbers.name))
        dead = {str(verdict.tensor) for verdict in verdicts if verdict.kind == "zero_run"}
        origin = origin_of(dead, [numbers.name for numbers in tensors])
        verdicts.sort(key=lambda v: str(v.tensor).rpartition(".")[0] != origin)
        return verdicts + self._confirm(step, high, first)

    def _highest_rms(self, numbers: AdamNumbers, newest: list[float]) -> float:
        """Return the highest healthy RMS for the size, sparsity and noise of a tensor."""
        # The RMS of few values is noisy, especially as the values of a bias are correlated.
        limit = self.max_update_rms * (1 + 10 / math.sqrt(numbers.numel))
        moving = [rms for rms in newest if rms > 0]
        # If a share q of the samples has a gradient, the second moment is q times its square.
        sparse = math.sqrt(len(newest) / max(len(moving), 1))
        return max(limit * sparse, 3 * statistics.median(moving or [0.0]))

    def _confirm(self, step: int, high: list[Verdict], first: Collection[str]) -> list[Verdict]:
        if not high:
            return []
        names = [str(verdict.tensor) for verdict in high]
        # To ignore single odd batches, the same tensor must be high again within a few steps.
        suspects, self._suspects = self._suspects, dict.fromkeys(names, step)
        confirmed = [v for v in high if step - suspects.get(str(v.tensor), -100) <= 10]
        self.wants_more = not confirmed
        if not confirmed:
            return []
        # `first` contains embeddings, where the RMS rises before the loss (arXiv:2304.13013).
        chosen = [v for v in confirmed if v.tensor in first] or confirmed
        worst = max(chosen, key=lambda v: (v.value or 0) / (v.threshold or 1))
        return [replace(worst, numbers={"count": len(confirmed)})]

    def _judge_epsilon(
        self, numbers: AdamNumbers, usual: dict[str, Any], eps: float, is_known: bool
    ) -> Verdict | None:
        share = numbers.below_epsilon
        # Adam should divide mostly by the size of the gradient, so epsilon is a thousandth of it.
        root = math.sqrt(numbers.second_moment / numbers.numel)
        power = math.floor(math.log10(max(numbers.gradient_rms, root, 1e-30))) - 3
        words = {"eps": eps, "usual": usual["below"], "excess": self.max_below_epsilon}
        words["lower_eps"] = min(eps / 1000, 10.0**power)
        threshold = usual["below"] + self.max_below_epsilon
        if is_known and share > threshold:
            return Verdict("below_epsilon", share, threshold, numbers=words)
        if share < _ALL:
            return None
        return Verdict("below_epsilon", share, _ALL, tags=("all",), numbers=words)

    def _judge_zero_run(
        self, step: int, numbers: AdamNumbers, usual: dict[str, Any], beta2: float, is_silent: bool
    ) -> Verdict | None:
        # Without gradients, the second moment decays by beta2 per step, except for rounding.
        left = usual["moment"] * beta2 ** max(numbers.step - usual["at"], 0)
        has_grown = numbers.second_moment > 1.001 * left
        usual["moment"], usual["at"] = numbers.second_moment, numbers.step
        if has_grown or not numbers.is_zero:
            usual["grown"] += 1
            usual["without"] += usual["run"]
            usual["run"], usual["zero_from"] = 0, None
        if not numbers.is_zero:
            usual["with"] += 1
            return None
        usual["run"] += not is_silent
        if usual["zero_from"] is None:
            usual["zero_from"] = step
        steps = step - usual["zero_from"]
        boost = _boost(steps, beta2)
        seen = max(step - usual["from"], 1)
        if is_silent:  # for example, a loss of exactly 0; judge only the harm of such runs
            is_long = boost >= self.max_update_rms
        else:
            # The row of a rare token has long runs without a gradient. If gradients occur at random
            # with the observed rate, a run of this length has probability exp(-rate * steps).
            had_always = usual["with"] >= 3 and not usual["without"]
            is_long = had_always or math.exp(-usual["grown"] * steps / seen) < ALIVE
        if not usual["grown"] or steps < self.zero_run_steps or not is_long:
            return None
        words = {"boost": boost, "limit": _boost(math.inf, beta2)}
        return Verdict("zero_run", steps, self.zero_run_steps, numbers=words)

    def _judge_stagnant(
        self, tensors: Collection[AdamNumbers], rate: float | None, is_rising: bool
    ) -> list[Verdict]:
        """Judge all weights together, because they share the learning rate and the dtype."""
        moving = sum(numbers.moving for numbers in tensors)
        share = sum(numbers.stagnant for numbers in tensors) / max(moving, 1.0)
        # Neither the beginning of a warm-up nor the end of a schedule is a failure.
        is_used = rate is None or (not is_rising and rate > 1e-3 * self._highest_rate)
        if share <= self.max_stagnant or not is_used:
            return []
        most = max(tensors, key=lambda numbers: numbers.stagnant)
        still = sum(numbers.stagnant > 0.5 * numbers.moving for numbers in tensors)
        verdict = Verdict("stagnant_weights", share, self.max_stagnant, tensor=most.name)
        return [replace(verdict, numbers={"count": still})]

    def _judge_ratio(
        self, numbers: AdamNumbers, rate: float | None, is_known: bool, knows_rate: bool
    ) -> Verdict | None:
        if numbers.is_zero:
            return None
        # A schedule that begins or ends near 0 is no failure.
        is_low = numbers.ratio < self.min_ratio and knows_rate
        is_low = is_low and (rate is None or rate > 1e-3 * self._highest_rate)
        if not is_low and not (is_known and numbers.ratio > self.max_ratio):
            return None
        threshold, tags = (self.min_ratio, ("low",)) if is_low else (self.max_ratio, ())
        words = {"least": self.min_ratio, "most": self.max_ratio}
        return Verdict("update_to_weight", numbers.ratio, threshold, tags=tags, numbers=words)


def _boost(steps: float, beta2: float) -> float:
    """Return the factor by which the first update after a run without gradients is larger."""
    return math.sqrt(1 / (beta2 ** (steps + 1) + 1 - beta2))
