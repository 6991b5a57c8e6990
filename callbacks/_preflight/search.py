"""Finds the settings that fix the errors of half precision by running the step with each."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_mp.callbacks._preflight.measure import error_of, module_errors, relative
from lightning_mp.callbacks._preflight.ops import Fp32Work
from lightning_mp.callbacks._preflight.result import MATTERS, Preflight, Remedy
from lightning_mp.callbacks._preflight.runs import Run, Runs
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.precision._choice.module_selection import select_norms
from lightning_mp.precision._choice.residual_stream import find_residual_stream

__all__ = ["preflight_step"]

_TRIED = 8  # tried modules with the largest own errors, and tried ops
_CLAMPED = 4  # tried clamps of modules whose output exceeds fp16
_MOST = 4  # modules and ops of a remedy
# Tried factors of the loss scale.
_SCALES = (2.0**-12, 2.0**-8, 2.0**-4, 2.0**4, 2.0**8, 2.0**12)
_HIGHEST = 2.0**24
_FP16_MAX = torch.finfo(torch.float16).max


def preflight_step(
    runs: Runs, before: Preflight | None, agree: Callable[[Any], Any]
) -> Preflight | None:
    """Return the result with one more step; `None` if the batch has no gradient noise."""
    measured, failure = None, None
    try:
        measured = module_errors(runs)
    except Exception as error:
        failure = error
    # All ranks leave together, because the others would wait for a rank that is missing.
    agreed = runs.trainer.strategy.reduce_boolean_decision
    if not agreed(measured is not None, all=True) or measured is None:
        raise failure or RuntimeError(usage("preflight_rank"))
    found, whole, noise = measured
    if not agreed(bool(noise), all=True):
        return None
    trials = _Trials(runs, whole, noise, agree, dict(before.tried) if before else {})
    is_bad = agree(found.ratio) >= MATTERS
    if is_bad and found.half == torch.float16:
        fresh = [s for s in (runs.scale * f for f in _SCALES) if 1 <= s <= _HIGHEST]
        # The scales of earlier steps again, because one scale must fit all steps.
        for scale in [r.loss_scale for r in trials.tried if r.loss_scale] or fresh:
            trials.ratio(Remedy(loss_scale=scale))
    all_found = found if before is None else found.merged(before)
    all_found = replace(all_found, tried=trials.tried)
    if is_bad and agree(all_found.best_scale) is None:
        all_found = cheapest_remedy(trials, all_found)
    return trials.proved(all_found)


@dataclass(frozen=True)
class _Trials:
    """Runs of one step with remedies."""

    runs: Runs
    whole: Run  # in fp32
    noise: dict[str, float]  # gradient noise of each parameter
    agree: Callable[[Any], Any]  # returns the value of rank 0, so that all ranks make equal runs
    tried: dict[Remedy, float]  # the worst ratio with each remedy, also in earlier steps

    def ratio(self, remedy: Remedy) -> float:
        """Return the worst ratio with a remedy so far; inf if a step fails with it."""
        try:
            whole = self.whole
            if remedy.half is not None and self.runs.is_true_half:
                whole = self.runs.in_fp32(unrounded=True)
            value = error_of(whole, self.runs.in_half(remedy), self.noise)[0]
        except Exception:  # for example, a weight that a module in half precision shares
            value = math.inf
        self.tried[remedy] = max(float(self.agree(value)), self.tried.get(remedy, 0.0))
        return self.tried[remedy]

    def work(self, remedy: Remedy) -> float:
        """Return the work in fp32 of the step with a remedy; inf if it cannot be counted."""
        try:
            with Fp32Work() as work:
                self.runs.in_half(remedy)
            value = work.total
        except Exception:  # a tensor subclass may not support dispatch modes
            value = math.inf
        return float(self.agree(value))

    def proved(self, found: Preflight) -> Preflight:
        """Return the result with its remedy and the errors of this step with that remedy."""
        scale = self.agree(found.best_scale)
        if scale is not None:
            found = replace(found, remedy=scale, mended=found.tried[scale])
        if found.mended is None:
            return found
        ratio, run = self.ratio(found.remedy), self.runs.in_half(found.remedy, records=True)
        errors = {
            path: relative(call.output.float(), self.whole.calls[path].output.float())
            for path, call in run.calls.items()
            if path in self.whole.calls
        }
        modules = tuple(replace(each, mended=errors.get(each.path)) for each in found.modules)
        return replace(found, mended=max(ratio, found.mended), modules=modules)


def cheapest_remedy(trials: _Trials, found: Preflight) -> Preflight:
    """Return the result with the remedy that needs the least work in fp32."""
    remedy = found.remedy  # remedy of the earlier steps
    ratio = trials.ratio(remedy)
    if ratio < MATTERS:
        return replace(found, mended=max(ratio, found.mended or 0.0))
    if not remedy.names:
        remedy = Remedy(half=found.half if trials.runs.lacks_settings else None)
        ratio = trials.ratio(remedy)
    callers: dict[str, tuple[str, ...]] = trials.agree(trials.runs.rounding_ops())
    # A clamp computes nothing in fp32, so it is the cheapest remedy.
    for options in (_clamps(trials.runs, found), _fp32(trials.runs, found, callers)):
        remedy, ratio = _extended(trials, remedy, ratio, trials.agree(options))
    remedy, ratio = _reduced(trials, remedy, ratio)
    for other in (Remedy(half=half) for half in trials.runs.other_halves()):
        if ratio >= MATTERS and (ratio_of_other := trials.ratio(other)) < MATTERS:
            remedy, ratio = other, ratio_of_other
    if remedy == Remedy():
        return found
    used = {op: callers[op] for op in remedy.fp32_ops if op in callers}
    return replace(found, remedy=remedy, mended=ratio, callers=used)


def _extended(
    trials: _Trials, remedy: Remedy, ratio: float, options: list[Remedy]
) -> tuple[Remedy, float]:
    """Return a remedy with the options that fix the step, and its ratio."""
    while ratio >= MATTERS and len(remedy.names) < _MOST:
        left = [option for option in options if not remedy.includes(option)]
        results = {option: trials.ratio(remedy | option) for option in left}
        least = min(results.values(), default=math.inf)
        if math.isinf(least) and len(left) > 1:  # several modules overflow
            together = Remedy().with_names([n for option in left[:_MOST] for n in option.names])
            least = trials.ratio(remedy | together)
            results = {together: least}
        if not least < 0.8 * ratio:
            break
        good = [option for option in results if results[option] < max(MATTERS, 1.5 * least)]
        if len(good) > 1:
            work = {option: trials.work(remedy | option) for option in good}
            good.sort(key=work.__getitem__)  # stable, so the option with the larger error wins ties
        remedy, ratio = remedy | good[0], results[good[0]]
    return remedy, ratio


def _reduced(trials: _Trials, remedy: Remedy, ratio: float) -> tuple[Remedy, float]:
    """Remove the parts of a remedy that are not needed."""
    for each in remedy.names if len(remedy.names) > 1 else ():
        less = remedy.with_names([other for other in remedy.names if other != each])
        if (found := trials.ratio(less)) < MATTERS:
            remedy, ratio = less, found
    return remedy, ratio


def _clamps(runs: Runs, found: Preflight) -> list[Remedy]:
    """Return clamps of the modules whose output exceeds fp16, in the order of the model."""
    if found.half != torch.float16:
        return []
    over = [m for m in found.modules if _FP16_MAX < m.largest < math.inf]
    paths = [m.path for m in sorted(over, key=lambda m: m.order)]
    options = [Remedy(inf_clamp=(path,)) for path in paths[:_CLAMPED]]
    if paths and find_residual_stream(runs.module).writers:
        options.append(Remedy(inf_clamp=("auto",)))
    return options


def _fp32(runs: Runs, found: Preflight, callers: dict[str, tuple[str, ...]]) -> list[Remedy]:
    """Return modules in fp32, by their own errors, and ops of these modules and of the step."""
    # Under autocast, the op policy computes norms in fp32, and `fp32_modules` adds nothing.
    is_mixed = runs.lacks_settings or not runs.is_true_half
    norms = select_norms(runs.module) if is_mixed else {}
    tried = [each.path for each in found.modules if each.path not in norms]
    ranked = [path for path in tried if not runs.is_most(path)]
    # A parent may overflow before it calls the module that then has the largest error.
    parents = [path for path in ranked[_TRIED:] if ranked[0].startswith(f"{path}.")]
    paths = ranked[:_TRIED] + parents
    ops = [
        op
        for path in (*paths[:1], "", *paths[1:])
        for op, modules in callers.items()
        if any(m == path or (path and m.startswith(f"{path}.")) for m in modules)
    ]
    modules = [Remedy(fp32_modules=(path,)) for path in paths]
    return modules + [Remedy(fp32_ops=(op,)) for op in [*dict.fromkeys(ops)][:_TRIED]]
