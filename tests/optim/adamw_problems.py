"""Problems for the fused step, and comparisons of its results."""

from itertools import product
from typing import Any

import torch
from torch import Tensor

from lightning_mp.numerics.split_weights import join_weight
from lightning_mp.optim._adamw.foreach import AdamWBatch, AdamWOptions, foreach_adamw_step
from lightning_mp.optim._adamw.fused import fused_adamw_step
from tests.reference.adamw import AdamWReference

__all__ = [
    "BF16",
    "DTYPES",
    "FP16",
    "FP32",
    "OPTIONS",
    "SHAPES",
    "Problem",
    "agreeing_step",
    "disagreement",
    "fresh",
    "make_problem",
    "off_by_one_element",
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Dtypes of weights and of gradients, and `write_back`.
DTYPES = [
    *product((FP16, BF16), (FP16, BF16, FP32), ("kahan", "nearest", "stochastic")),
    *product([FP32], (FP16, BF16, FP32), ("nearest",)),
]
# A block, parts of blocks, one element, and no element.
SHAPES = (33, 31), (), (2, 0), (1024,)
# Some roots of second moments are below this epsilon, and some are above.
OPTIONS: dict[str, Any] = {
    "lr": 0.05, "beta1": 0.9, "beta2": 0.99, "eps": 0.05, "weight_decay": 0.1, "maximize": False,
    "rule": "adam", "write_back": "kahan", "seed": 7, "clip_update_rms": None, "grad_scale": None,
    "found_inf": None,
}  # fmt: skip
# ULP of a weight without and with a residual, relative to the weight.
_STEPS = {FP32: 2.0**-22, FP16: 2.0**-10, BF16: 2.0**-7}
_KAHAN_STEPS = {FP16: 2.0**-20, BF16: 2.0**-14}
# Rounding error of the fp32 math, relative to the largest weight or step.
_ROUNDING = 4e-7


class Problem(AdamWBatch):
    """The tensors of one step, with methods that perform it on a copy."""

    @classmethod
    def of(cls, lists: list[list[Tensor]], steps: list[Tensor]) -> "Problem":
        """Return a problem of `lists`, with copies of the step counts."""
        residuals = lists[4] if len(lists) > 4 else []
        return cls(*lists[:4], residuals, [step.clone() for step in steps])

    def copy(self) -> "Problem":
        """Return a copy with the same layouts, at aligned addresses."""
        return self.map(Tensor.clone)

    def map(self, function: Any) -> "Problem":
        """Return a problem with `function` applied to all tensors except step counts."""
        return Problem.of([[function(t) for t in each] for each in self.lists], self.steps)

    def after(self, step: Any, **options: Any) -> "Problem":
        """Return a copy after a step."""
        copy = self.copy()
        step(copy, AdamWOptions(**{**OPTIONS, **options}))
        return copy

    def weights(self) -> list[Tensor]:
        """Return the fp32 values that weights and residuals represent."""
        if not self.residuals:
            return [p.float() for p in self.params]
        return [join_weight(*pair) for pair in zip(self.params, self.residuals, strict=True)]

    def in_float64(self, **options: Any) -> list[AdamWReference]:
        """Return the weights and moments after a step in float64."""
        options = {**OPTIONS, **options}
        betas = options["beta1"], options["beta2"]
        names = ("lr", "eps", "weight_decay", "clip_update_rms", "rule")
        scale = options["grad_scale"]
        sign = (-1 if options["maximize"] else 1) / (1 if scale is None else scale.double())
        references = []
        for index, weight in enumerate(self.weights()):
            made = AdamWReference(weight, betas=betas, **{name: options[name] for name in names})
            made.exp_avg = self.exp_avgs[index].double()
            made.exp_avg_sq = self.exp_avg_sqs[index].double()
            made.steps = int(self.steps[index]) - 1
            made.step(self.grads[index].double() * sign)
            references.append(made)
        return references

    def is_same(self, other: "Problem") -> bool:
        """Return whether all values are equal; NaN equals NaN."""
        pairs = zip(sum(self.lists, []), sum(other.lists, []), strict=True)
        return all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs)


def make_problem(
    shapes: Any,
    half: torch.dtype = FP32,
    grad: torch.dtype = FP32,
    *,
    has_residuals: bool | None = None,
    device: str = "cpu",
) -> Problem:
    """Return a problem with random data, as in the middle of training."""

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, device=device)

    params = [random(shape).to(half) for shape in shapes]
    residuals = []
    if has_residuals if has_residuals is not None else half != FP32:
        # Up to half a ULP of the weight, in units of the residual.
        part = 0.3 if half == FP16 else 0.3 * 2**-8
        residuals = [(p.float().abs() * part * random(p.shape).tanh()).to(half) for p in params]
    return Problem(
        params,
        [(random(shape) * 0.3).to(grad) for shape in shapes],
        [random(shape) * 0.1 for shape in shapes],
        [0.002 + 0.02 * random(shape).square() for shape in shapes],
        residuals,
        [torch.tensor(float(200 + 3 * index), device=device) for index in range(len(params))],
    )


def fresh(
    half: torch.dtype = FP32,
    grad: torch.dtype = FP32,
    write_back: str = "kahan",
    shapes: Any = SHAPES,
    device: str = "cpu",
) -> Problem:
    """Return a random problem, with residuals for half weights if `write_back` is "kahan"."""
    has_residuals = half != FP32 and write_back == "kahan"
    return make_problem(shapes, half, grad, has_residuals=has_residuals, device=device)


def off_by_one_element(tensor: Tensor) -> Tensor:
    """Return a copy that is aligned to its element size only."""
    longer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return longer[1:].view(tensor.shape).copy_(tensor)


def disagreement(found: Problem, expected: Problem | list[AdamWReference]) -> float:
    """Return the largest difference of moments and weights, relative to the rounding error."""
    if isinstance(expected, Problem):
        weights, moments = expected.weights(), (expected.exp_avgs, expected.exp_avg_sqs)
    else:
        weights = [made.weight for made in expected]
        moments = [made.exp_avg for made in expected], [made.exp_avg_sq for made in expected]
    steps = _KAHAN_STEPS if found.residuals else _STEPS
    step = steps[found.params[0].dtype]
    differences = []
    for mine, other in zip((found.exp_avgs, found.exp_avg_sqs), moments, strict=True):
        expected_values = _joined(other)
        allowed = _ROUNDING * expected_values.abs().amax()
        differences.append(((_joined(mine) - expected_values).abs() / allowed).amax())
    expected_values = _joined(weights)
    allowed = step * expected_values.abs() + _ROUNDING * (1 + expected_values.abs().amax())
    differences.append(((_joined(found.weights()) - expected_values).abs() / allowed).amax())
    return torch.stack(differences).nan_to_num(torch.inf).amax().item()


def agreeing_step(problem: Problem, **options: Any) -> Problem:
    """Return the problem after the fused step, which must agree with float64 and with torch."""
    fused = problem.after(fused_adamw_step, **options)
    assert disagreement(fused, problem.in_float64(**options)) < 1
    if options["write_back"] != "stochastic":
        foreach = problem.after(foreach_adamw_step, **options)
        assert disagreement(fused, foreach) < 1
        pairs = zip(fused.params, foreach.params, strict=True)
        differing = sum((a != b).sum().item() for a, b in pairs if a.dtype != FP32)
        assert differing < 0.01 * sum(p.numel() for p in problem.params)
    return fused


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])
