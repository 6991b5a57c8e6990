"""What half precision adds, module by module, and which modules in fp32 mend it.

The yardstick is gradient noise: of each parameter, the error of its gradient in half against that
in fp32, relative to the difference between the gradients of the two halves of the batch. An error
far below the noise does not matter to training.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lightning_mp.callbacks._preflight.runs import Run, Runs
from lightning_mp.gradient_cache._served.arguments import is_array, open_tree, rows_of
from lightning_mp.numerics.floats import HALF_DTYPES

__all__ = ["MATTERS", "ModuleError", "Preflight", "look"]

MATTERS = 0.05
"""The share of the gradient noise from which on an error matters."""

_STAGNANT = 0.2
_ROUNDING = 0.01  # of a gradient, by which the order of rows may change it
_NEGLIGIBLE = 1e-5  # a gradient next to that of the other parameters
_TRIED = 8  # modules, by their own errors
_MOST = 4  # modules that are taken into fp32
_SCALES = (
    2.0**-12,
    2.0**-8,
    2.0**-4,
    2.0**4,
    2.0**8,
    2.0**12,
)  # times the loss scale, that are tried
_HIGHEST = 2.0**24
_SMALLEST = {torch.float16: 2.0**-14, torch.bfloat16: 2.0**-126}  # normal numbers


@dataclass(frozen=True)
class ModuleError:
    """What half does to one module.

    Args:
        path: The module.
        kind: Its class.
        output: The relative error of its output by itself, fed what it is fed in half.
        gradient: The relative error of its gradients for inputs and parameters by itself.
        handed: The relative error of its output in the run, with what others handed in.
        largest: The largest magnitude of its output in fp32.
        underflow: The largest share of zeros in a gradient that are none in fp32.
        subnormal: The largest share of subnormal numbers in a gradient, at the loss scale.
        order: Its place in the model.
    """

    path: str
    kind: str
    output: float
    gradient: float
    handed: float
    largest: float
    underflow: float
    subnormal: float
    order: int = 0

    @property
    def own(self) -> float:
        """The larger of both errors that it makes by itself."""
        return max(self.output, self.gradient)


@dataclass(frozen=True)
class Preflight:
    """What the steps that were looked at have shown.

    Args:
        half: The dtype.
        losses: In fp32, and in half.
        ratio: The largest error of a parameter's gradient relative to its noise.
        worst: The name of that parameter.
        modules: By their own errors, the largest first.
        fp32_modules: Modules whose computation in fp32 mends it.
        mended: The ratio with these, or with the loss scale.
        loss_scale: The initial loss scale that mends it, where one does.
        in_bf16: The ratio under autocast to bf16, where it was tried.
        by_scale: The ratio at other loss scales, the worst of the steps in which it was tried.
        stagnant: The share of half weights that an update of the learning rate leaves as they are.
        notes: What could not be measured.
    """

    half: torch.dtype
    losses: tuple[float, float]
    ratio: float
    worst: str
    modules: tuple[ModuleError, ...]
    fp32_modules: tuple[str, ...] = ()
    mended: float | None = None
    loss_scale: float | None = None
    in_bf16: float | None = None
    by_scale: Mapping[float, float] = field(default_factory=dict)
    stagnant: float = 0.0
    notes: tuple[str, ...] = field(default=())

    limit = MATTERS
    stagnates = _STAGNANT

    @property
    def is_clean(self) -> bool:
        """Whether nothing that matters was found."""
        return self.ratio < MATTERS and self.stagnant < _STAGNANT

    @property
    def best_scale(self) -> float | None:
        """The loss scale at which every step was clean, if there is one."""
        scale = min(self.by_scale, key=self.by_scale.__getitem__, default=0.0)
        return scale if self.by_scale.get(scale, math.inf) < MATTERS else None

    def merged(self, before: "Preflight") -> "Preflight":
        """Return the worse of two steps, with the largest numbers of each module."""
        worse, less = (self, before) if self.ratio >= before.ratio else (before, self)
        by_path = {each.path: each for each in less.modules}
        modules = [
            each if each.path not in by_path or each.own >= by_path[each.path].own
            else by_path[each.path]
            for each in worse.modules
        ]  # fmt: skip
        scales = {**self.by_scale, **before.by_scale}
        return replace(
            worse,
            modules=_ranked(modules),
            by_scale={
                s: max(self.by_scale.get(s, 0.0), before.by_scale.get(s, 0.0)) for s in scales
            },
            stagnant=max(self.stagnant, before.stagnant),
            fp32_modules=before.fp32_modules,
            mended=before.mended,
            in_bf16=before.in_bf16,
        )

    def decided(self) -> "Preflight":
        """Return the result with the loss scale as what mends it, where one does."""
        scale = self.best_scale
        if scale is None:
            return self
        return replace(self, loss_scale=scale, mended=self.by_scale[scale], fp32_modules=())


def look(runs: Runs, before: Preflight | None, agree: Callable[[Any], Any]) -> Preflight | None:
    """Return the result with one more step; `None` where there is nothing to hold it against.

    Args:
        runs: Of the step.
        before: What the steps before have shown.
        agree: Returns what rank 0 has, so that all ranks make the same runs.
    """
    found, whole, noise = module_errors(runs)
    if not noise:
        return None
    is_bad = agree(found.ratio) >= MATTERS
    if is_bad and found.half == torch.float16:
        scales = [s for s in (runs.scale * f for f in _SCALES) if 1 <= s <= _HIGHEST]
        by_scale = {s: agree(_ratio_with(runs, whole, noise, [], s)) for s in scales}
        found = replace(found, by_scale=by_scale)
    all_found = found if before is None else found.merged(before)
    if is_bad and agree(all_found.best_scale) is None:
        return search(runs, all_found, whole, noise, agree)
    return all_found


def module_errors(runs: Runs) -> tuple[Preflight, Run, dict[str, float]]:
    """Return what half adds, the run in fp32, and the gradient noise of each parameter."""
    whole = runs.in_fp32(records=True)
    noise = _noise(runs, whole)
    half = runs.in_half(records=True)
    notes: list[str] = []
    modules: list[ModuleError] = []
    for path, module in runs.named_modules():
        if path not in whole.calls or path not in half.calls:
            continue
        try:
            error = _module_error(runs, path, type(module).__name__, whole, half)
            modules.append(replace(error, order=len(modules)))
        except Exception as failure:  # a module that runs inside of its parent alone
            notes.append(f"`{path}` was not run by itself: {str(failure).splitlines()[0][:100]}")
    ratio, worst = error_of(whole, half, noise)
    assert runs.half is not None
    found = Preflight(
        runs.half,
        (whole.loss, half.loss),
        ratio,
        worst,
        _ranked(modules),
        stagnant=_stagnant(runs),
        notes=tuple(notes[:3]),
    )
    return found, whole, noise


def search(
    runs: Runs,
    found: Preflight,
    whole: Run,
    noise: dict[str, float],
    agree: Callable[[Any], Any] = lambda value: value,
) -> Preflight:
    """Return the result with the modules that mend it in fp32, each tried by a run.

    Args:
        runs: Of a step.
        found: What was measured.
        whole: The run in fp32.
        noise: Of each parameter's gradient.
        agree: Returns what rank 0 has, so that all ranks make the same runs.
    """
    chosen = [*found.fp32_modules]  # what mended the steps before
    best = ratio = agree(_ratio_with(runs, whole, noise, chosen))
    tried = agree(_candidates(runs, found))
    while ratio >= MATTERS and len(chosen) < _MOST:
        results = {
            path: agree(_ratio_with(runs, whole, noise, [*chosen, path]))
            for path in tried
            if not any(f"{path}.".startswith(f"{each}.") for each in chosen)
        }
        least = min(results.values(), default=math.inf)
        if not least < 0.8 * ratio:
            break
        # Of those that mend it, or mend it most, the smallest.
        good = [path for path in results if results[path] < max(MATTERS, 1.5 * least)]
        path = min(good, key=lambda path: (runs.size(path), tried.index(path)))
        chosen.append(path)
        best = ratio = results[path]
    in_bf16 = found.in_bf16
    if ratio >= MATTERS and found.half == torch.float16:
        of_step = agree(error_of(whole, runs.in_autocast(torch.bfloat16), noise)[0])
        in_bf16 = max(of_step, in_bf16 or 0.0)
    if not chosen:
        return replace(found, in_bf16=in_bf16)
    # Where no other module was needed, the worst of all steps.
    mended = max(best, found.mended or 0.0) if found.fp32_modules == tuple(chosen) else best
    return replace(found, fp32_modules=tuple(chosen), mended=mended, in_bf16=in_bf16)


def error_of(whole: Run, half: Run, noise: dict[str, float]) -> tuple[float, str]:
    """Return the largest error of a gradient relative to its noise, and whose it is."""
    if not math.isfinite(half.loss):
        return math.inf, "the loss"
    sizes = {name: float(g.square().mean().sqrt()) for name, g in whole.gradients.items()}
    # Of a bias before BatchNorm, whose gradient is 0, all that there is is rounding.
    least = _NEGLIGIBLE * median(sizes.values()) if sizes else 0.0
    ratios = {
        name: _relative(half.gradients.get(name, torch.zeros_like(g)), g) / max(noise[name], 1e-6)
        for name, g in whole.gradients.items()
        if noise.get(name, 0.0) > 0 and sizes[name] > least
    }
    worst = max(ratios, key=ratios.__getitem__, default="")
    return ratios.get(worst, 0.0), worst


def _ratio_with(
    runs: Runs,
    whole: Run,
    noise: dict[str, float],
    fp32_modules: Sequence[str],
    scale: float | None = None,
) -> float:
    """Return the ratio with some modules in fp32; inf where these cannot run so."""
    try:
        return error_of(whole, runs.in_half(fp32_modules, scale=scale), noise)[0]
    except RuntimeError:  # such as a weight that a module in half shares
        return math.inf


def _candidates(runs: Runs, found: Preflight) -> list[str]:
    """Return the modules to try, by what they add."""
    return [each.path for each in found.modules if not runs.is_most(each.path)][:_TRIED]


def _noise(runs: Runs, whole: Run) -> dict[str, float]:
    """Return the relative difference of each gradient between the halves of the batch."""
    tree = open_tree(runs.batch)
    rows = rows_of(runs.batch) or 0
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
    noise = {name: _relative(second[name], g) for name, g in first.items() if name in second}
    # Rows in another order change nothing but rounding: a gradient that they do change is nothing
    # but rounding, as of a bias before BatchNorm. Unless the order of rows has a meaning.
    turned = gradients(order[::-1])
    changes = {name: _relative(turned[name], whole.gradients[name]) for name in noise}
    if changes and median(changes.values()) < _ROUNDING / 10:
        noise = {name: value for name, value in noise.items() if changes[name] < _ROUNDING}
    return noise


def _module_error(runs: Runs, path: str, kind: str, whole: Run, half: Run) -> ModuleError:
    """Return the error of a module fed values of fp32, rounded to the dtypes that half feeds it."""
    call, cotangent = whole.calls[path].rounded_like(half.calls[path]), half.cotangents.get(path)
    reference = whole.cotangents.get(path)
    if reference is not None:
        cotangent = reference * runs.scale
    exact, *exact_gradients = runs.alone(path, call, cotangent, half=False)
    rounded, *gradients = runs.alone(path, call, cotangent, half=True)
    of_both = zip(gradients, exact_gradients, strict=True)
    pairs = [(g, e) for g, e in of_both if e.numel() and g.shape == e.shape]
    smallest = _SMALLEST.get(runs.half or torch.float16, 0.0)
    return ModuleError(
        path,
        kind,
        _relative(rounded, exact),
        # Of all together: one that is 0 but for rounding says nothing.
        _relative(*(torch.cat([x.flatten() for x in each]) for each in zip(*pairs, strict=True)))
        if pairs
        else 0.0,
        _relative(half.calls[path].output.float(), whole.calls[path].output.float()),
        float(whole.calls[path].output.float().abs().max()) if exact.numel() else 0.0,
        max((_share((g == 0) & (e != 0)) for g, e in pairs), default=0.0),
        max((_share((g != 0) & (g.abs() < smallest)) for g, _ in pairs), default=0.0),
    )


def _stagnant(runs: Runs) -> float:
    """Return the share of half weights at rest that an update as large as the rate leaves as is."""
    if getattr(runs.plugin, "write_back", "nearest") != "nearest":
        return 0.0
    still = count = 0.0
    for optimizer in runs.trainer.optimizers:
        if "Adam" not in type(optimizer).__name__:  # whose updates are about as large as the rate
            continue
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad and p.dtype in HALF_DTYPES and group["lr"] > 0:
                    # Half a unit in the last place: what rounds back to the weight.
                    _, exponent = torch.frexp(p.detach().float())
                    unit = torch.finfo(p.dtype).eps * 2.0 ** (exponent - 1)
                    still += float((group["lr"] < unit / 2).float().sum())
                    count += p.numel()
    return still / count if count else 0.0


def _relative(value: Tensor, exact: Tensor) -> float:
    """Return the root mean square of the difference over that of the exact value."""
    if value.shape != exact.shape or not exact.numel():
        return 0.0
    if not bool(value.isfinite().all()):
        return math.inf
    difference = float((value.double() - exact.double()).square().mean().sqrt())
    norm = float(exact.double().square().mean().sqrt())
    return difference / norm if norm > 0 and math.isfinite(norm) else difference


def _share(mask: Tensor) -> float:
    return float(mask.float().mean())


def _ranked(modules: Sequence[ModuleError]) -> tuple[ModuleError, ...]:
    """Return modules by their own errors, those that a part of theirs explains last."""
    own = {each.path: each.own for each in modules}

    def is_explained(path: str) -> bool:
        return any(p.startswith(f"{path}.") and 10 * e >= own[path] for p, e in own.items())

    return tuple(sorted(modules, key=lambda each: (is_explained(each.path), -each.own)))
