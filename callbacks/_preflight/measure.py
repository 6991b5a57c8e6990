"""Measures the errors of half precision, module by module, against gradient noise.

The error of a parameter's gradient in half precision, against fp32, is divided by the noise of that
gradient: the relative difference between the gradients of the two halves of the batch. An error far
below the noise does not matter to training.
"""

import math
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from lightning_mp.callbacks._preflight.result import ModuleError, Preflight, ranked
from lightning_mp.callbacks._preflight.runs import Run, Runs
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.gradient_cache._served.arguments import is_array, open_tree, rows_of
from lightning_mp.numerics.floats import HALF_DTYPES, ulps
from lightning_mp.precision._weights.half_module import is_compiled

__all__ = ["error_of", "module_errors", "relative"]

_ROUNDING = 0.01  # largest relative change of a gradient when rows change their order
_NEGLIGIBLE = 1e-5  # size of a gradient, relative to the median over parameters
# Noise of a gradient that is the same in all batches, except for rounding. A bias of a BatchNorm
# that the loss reads directly has such a gradient.
_NO_NOISE = 1e-4


def module_errors(runs: Runs) -> tuple[Preflight, Run, dict[str, float]]:
    """Return the errors of half precision, the run in fp32, and the noise of each gradient."""
    whole = runs.in_fp32(records=True)
    if not math.isfinite(whole.loss):
        is_lost = not all(p.isfinite().all() for p in runs.module.parameters())
        key = "preflight_weights" if is_lost else "preflight_not_finite"
        raise ValueError(usage(key, loss=whole.loss))
    noise = _noise(runs, whole)
    half = runs.in_half(records=True)
    is_any_compiled = any(is_compiled(module) for module in runs.module.modules())
    notes = ["Compiled modules were compared in eager mode."] if is_any_compiled else []
    modules: list[ModuleError] = []
    for path, module in runs.named_modules():
        if path not in whole.calls or path not in half.calls:
            continue
        try:
            error = _module_error(runs, path, type(module).__name__, whole, half)
            modules.append(replace(error, order=len(modules)))
        except Exception as failure:  # some modules need state that their parent prepares
            reason = (str(failure).splitlines() or [type(failure).__name__])[0][:100]
            notes.append(f"`{path}` could not run alone: {reason}")
    ratio, worst = error_of(whole, half, noise)
    losses, stagnant = (whole.loss, half.loss), _stagnant(runs)
    found = Preflight(
        runs.half, losses, ratio, worst, ranked(modules), stagnant=stagnant, notes=tuple(notes[:3])
    )
    return found, whole, noise


def error_of(whole: Run, half: Run, noise: dict[str, float]) -> tuple[float, str]:
    """Return the largest error of a gradient relative to its noise, and its parameter."""
    if not math.isfinite(half.loss):
        return math.inf, "the loss"
    sizes = {name: float(g.square().mean().sqrt()) for name, g in whole.gradients.items()}
    # The gradient of a bias before BatchNorm is 0 except for rounding.
    least = _NEGLIGIBLE * median(sizes.values()) if sizes else 0.0
    ratios = {
        name: relative(half.gradients.get(name, torch.zeros_like(g)), g) / noise[name]
        for name, g in whole.gradients.items()
        if noise.get(name, 0.0) > _NO_NOISE and sizes[name] > least
    }
    return max(((ratio, name) for name, ratio in ratios.items()), default=(0.0, ""))


def _noise(runs: Runs, whole: Run) -> dict[str, float]:
    """Return the relative difference of each gradient between the two halves of the batch."""
    tree, rows = open_tree(runs.batch), rows_of(runs.batch) or 0
    if rows < 2:
        return {}

    def gradients(of: list[int]) -> dict[str, Tensor]:
        leaves = [
            leaf.value[of] if is_array(leaf.value) and len(leaf.value) == rows else leaf.value
            for leaf in tree.leaves
        ]
        return runs.in_fp32(tree.rebuild(leaves)).gradients

    half, order = rows // 2, [*range(rows)]
    first, second = gradients(order[:half]), gradients(order[half : 2 * half])
    noise = {name: relative(second[name], g) for name, g in first.items() if name in second}
    # The noise of a single number, as of a logit scale, may be small by chance.
    single = [name for name, value in noise.items() if value > 0 and first[name].numel() == 1]
    noise |= {name: max(noise[name], median(noise.values())) for name in single}
    # Another order of rows changes only rounding. A gradient that then changes is pure rounding
    # error, for example of a bias before BatchNorm, unless the order of rows has a meaning.
    turned = gradients(order[::-1])
    changes = {
        name: relative(turned[name], g) for name, g in whole.gradients.items() if name in turned
    }
    if changes and median(changes.values()) < _ROUNDING / 10:
        noise = {name: value for name, value in noise.items() if changes.get(name, 0) < _ROUNDING}
    return noise


def _module_error(runs: Runs, path: str, kind: str, whole: Run, half: Run) -> ModuleError:
    """Return the errors of a module on fp32 inputs, rounded to the dtypes of the half run."""
    call, cotangent = whole.calls[path].rounded_like(half.calls[path]), half.cotangents.get(path)
    reference = whole.cotangents.get(path)
    if reference is not None:
        cotangent = reference * runs.scale
    exact, *exact_gradients = runs.alone(path, call, cotangent, half=False)
    rounded, *gradients = runs.alone(path, call, cotangent, half=True)
    of_both = zip(gradients, exact_gradients, strict=True)
    pairs = [(g, e) for g, e in of_both if e.numel() and g.shape == e.shape]
    # All gradients together, because one gradient may be 0 except for rounding.
    together = [torch.cat([x.flatten() for x in each]) for each in zip(*pairs, strict=True)]
    smallest = torch.finfo(runs.half).tiny  # smallest normal number
    lost = [float(((g == 0) & (e != 0)).float().mean()) for g, e in pairs]
    subnormal = [float(((g != 0) & (g.abs() < smallest)).float().mean()) for g, _ in pairs]
    handed, true = half.calls[path].output.float(), whole.calls[path].output.float()
    return ModuleError(
        path,
        kind,
        output=relative(rounded, exact),
        gradient=relative(*together) if pairs else 0.0,
        handed=relative(handed, true),
        largest=float(true.abs().max()) if exact.numel() else 0.0,
        underflow=max(lost, default=0.0),
        subnormal=max(subnormal, default=0.0),
    )


def _stagnant(runs: Runs) -> float:
    """Return the share of half weights that an update of the learning rate leaves unchanged."""
    if getattr(runs.plugin, "write_back", "nearest") != "nearest":
        return 0.0
    still = count = 0.0
    for optimizer in runs.trainer.optimizers:
        if "Adam" not in type(optimizer).__name__:  # Adam's updates are about the learning rate
            continue
        for group in optimizer.param_groups:
            # A schedule keeps the learning rate after the warm-up in the group.
            lr = max(float(group.get(key, 0.0)) for key in ("lr", "initial_lr", "max_lr"))
            for p in group["params"]:
                if p.requires_grad and p.dtype in HALF_DTYPES and lr > 0:
                    # An update below half a unit in the last place rounds back to the weight.
                    still += float((lr < ulps(p) / 2).float().sum())
                    count += p.numel()
    return still / count if count else 0.0


def relative(value: Tensor, exact: Tensor) -> float:
    """Return the root mean square of the difference over that of the exact value."""
    if value.shape != exact.shape or not exact.numel():
        return 0.0
    if not bool(value.isfinite().all()):
        return math.inf
    difference = float((value.double() - exact.double()).square().mean().sqrt())
    norm = float(exact.double().square().mean().sqrt())
    return difference / norm if norm > 0 and math.isfinite(norm) else difference
