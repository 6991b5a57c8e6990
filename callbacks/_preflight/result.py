"""The result of a preflight: errors by module, and the settings that fix them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

__all__ = ["MATTERS", "STAGNANT", "ModuleError", "Preflight", "Remedy", "ranked"]

MATTERS = 0.05  # smallest error that matters, as a share of the gradient noise
STAGNANT = 0.2  # smallest share of stagnant weights that matters


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Settings that fix the errors of half precision, in addition to those of the plugin."""

    fp32_modules: tuple[str, ...] = ()
    fp32_ops: tuple[str, ...] = ()
    inf_clamp: tuple[str, ...] = ()  # modules
    loss_scale: float | None = None  # the initial one
    half: torch.dtype | None = None  # dtype of a `BalancedAMP` in place of the plugin

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """Argument and name of each module and op."""
        kinds = ("fp32_modules", "fp32_ops", "inf_clamp")
        return tuple((kind, name) for kind in kinds for name in getattr(self, kind))

    def with_names(self, names: Sequence[tuple[str, str]]) -> "Remedy":
        """Return a remedy of other modules and ops, with the dtype of this one."""
        lists: Any = {kind: tuple(n for k, n in names if k == kind) for kind, _ in names}
        return Remedy(half=self.half, **lists)

    def __or__(self, other: "Remedy") -> "Remedy":
        return self.with_names(tuple(dict.fromkeys((*self.names, *other.names))))

    def includes(self, other: "Remedy") -> bool:
        """Return whether another remedy adds nothing to this one."""
        return all(
            (kind, name) in self.names
            or (kind == "fp32_modules" and any(name.startswith(f"{m}.") for m in self.fp32_modules))
            for kind, name in other.names
        )


@dataclass(frozen=True)
class ModuleError:
    """Relative errors of one module in half precision."""

    path: str
    kind: str  # class of the module
    output: float  # error of its output when it runs alone on the inputs of the half run
    gradient: float  # error of its gradients for inputs and parameters when it runs alone
    handed: float  # error of its output in the whole run, including errors of its inputs
    largest: float  # largest magnitude of its output in fp32
    underflow: float  # largest share of zeros in a gradient that are not zero in fp32
    subnormal: float  # largest share of subnormal values in a gradient, at the loss scale
    order: int = 0  # position of the module in the model
    mended: float | None = None  # like `handed`, in the run with the remedy, if there is one

    @property
    def own(self) -> float:
        return max(self.output, self.gradient)


@dataclass(frozen=True)
class Preflight:
    """Result of the steps compared so far."""

    half: torch.dtype
    losses: tuple[float, float]  # in fp32 and in half precision
    ratio: float  # largest error of a parameter's gradient, relative to its noise
    worst: str  # name of that parameter
    modules: tuple[ModuleError, ...]  # the largest error first
    remedy: Remedy = field(default_factory=Remedy)
    mended: float | None = None  # the worst ratio with the remedy
    tried: Mapping[Remedy, float] = field(default_factory=dict)  # worst ratio with each remedy
    # For each op of the remedy, the modules that call it in half precision.
    callers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Share of half weights that an update of the size of the learning rate leaves unchanged.
    stagnant: float = 0.0
    notes: tuple[str, ...] = ()  # sentences about modules that could not be measured

    @property
    def is_clean(self) -> bool:
        return self.ratio < MATTERS and not self.stagnates

    @property
    def stagnates(self) -> bool:
        return self.stagnant >= STAGNANT

    @property
    def is_mended(self) -> bool:
        return self.mended is not None and self.mended < MATTERS

    @property
    def best_scale(self) -> Remedy | None:
        """The loss scale at which every step was clean, if there is one."""
        scales = [remedy for remedy in self.tried if remedy.loss_scale is not None]
        best = min(scales, key=self.tried.__getitem__, default=None)
        return best if best is not None and self.tried[best] < MATTERS else None

    def merged(self, before: "Preflight") -> "Preflight":
        """Return the worse of two steps, with the largest errors of each module."""
        worse, less = (self, before) if self.ratio >= before.ratio else (before, self)
        by_path = {each.path: each for each in less.modules}
        modules = [max((m, by_path.get(m.path, m)), key=lambda e: e.own) for m in worse.modules]
        return replace(
            worse,
            modules=ranked(modules),
            stagnant=max(self.stagnant, before.stagnant),
            remedy=before.remedy,
            mended=before.mended,
            callers=before.callers,
        )


def ranked(modules: Sequence[ModuleError]) -> tuple[ModuleError, ...]:
    """Return modules by their own errors; a module whose error a submodule explains comes last."""
    own = {each.path: each.own for each in modules}

    def is_explained(path: str) -> bool:
        return any(p.startswith(f"{path}.") and 10 * e >= own[path] for p, e in own.items())

    return tuple(sorted(modules, key=lambda each: (is_explained(each.path), -each.own)))
