"""Describes a preflight: the verdict, a table of modules, and the YAML of the remedy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from lightning_mp.callbacks._preflight.result import ModuleError, Preflight, Remedy

__all__ = ["cells_of", "head_of", "settings_of", "table_of", "verdict_in_words"]

_ROWS = 8
_NAMES = {"torch.float16": "fp16", "torch.bfloat16": "bf16"}
_OURS = ("BalancedAMP", "PureFP16")


def verdict_in_words(found: Preflight, plugin: str) -> str:
    """Return the result in one or two sentences."""
    half = _NAMES[str(found.half)]
    if found.is_clean:
        return (
            f"{plugin} is safe for this model: errors of {half} are at most "
            f"{_percent(found.ratio)} of the gradient noise (`{found.worst}`)."
        )
    if found.stagnates and found.mended is None:
        return (
            f"{_percent(found.stagnant)} of the weights are stagnant: an update of the size of the "
            f"learning rate is below half a unit in the last place of {half}. Keep fp32 weights, "
            "with `BalancedAMP`."
        )
    harm = (
        f"{half} adds errors of {_percent(found.ratio)} of the gradient noise to `{found.worst}`."
    )
    if not math.isfinite(found.ratio):
        harm = f"In {half}, {found.worst} is not finite."
    if found.is_mended and found.mended is not None:
        return (
            f"{harm} With {_settings_in_words(found.remedy)} the largest error is "
            f"{_percent(found.mended)} of the noise."
        )
    return (
        f"{harm} No module or op in fp32, no clamp and no other dtype fixes it: check what "
        "`training_step` computes itself."
    )


def _settings_in_words(remedy: Remedy) -> str:
    if remedy.half is not None:
        return f"`BalancedAMP(half='{_NAMES[str(remedy.half)]}')`"
    if remedy.loss_scale is not None:
        return f"an initial loss scale of {remedy.loss_scale:g}"
    lists = {kind: [n for k, n in remedy.names if k == kind] for kind, _ in remedy.names}
    return " and ".join(f"`{kind}: [{', '.join(names)}]`" for kind, names in lists.items())


def table_of(found: Preflight) -> str:
    """Return a table of the modules with the largest own errors, as text."""
    half = _NAMES[str(found.half)]
    rows = [head_of(found), *(cells_of(found, each) for each in found.modules[:_ROWS])]
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for cell, *rest in rows:
        right = [c.rjust(width) for c, width in zip(rest, widths, strict=True)]
        lines.append("  ".join([cell.ljust(first), *right]))
    whole, rounded = found.losses
    lines.append(f"The loss is {whole:.6g} in fp32 and {rounded:.6g} in {half}.")
    for op, callers in found.callers.items():
        named = ", ".join(f"`{each or 'training_step'}`" for each in callers[:3])
        more = f" and {len(callers) - 3} more" if len(callers) > 3 else ""
        lines.append(f"`{op}` rounds in {named}{more}.")
    return "\n".join(lines)


def head_of(found: Preflight) -> tuple[str, ...]:
    """Return the head of the table of modules."""
    mended = () if found.mended is None else ("with settings",)
    errors = ("module", "own error", "of gradients", "in the run")
    return (*errors, *mended, "largest output", "underflow", "subnormal")


def cells_of(found: Preflight, each: ModuleError) -> tuple[str, ...]:
    """Return the row of a module below `head_of`."""
    errors: list[float | None] = [each.output, each.gradient, each.handed]
    errors += [] if found.mended is None else [each.mended]
    cells = ["" if error is None else f"{error:.1e}" for error in errors]
    shares = f"{each.underflow:.0%}", f"{each.subnormal:.0%}"
    return (f"{each.path} ({each.kind})", *cells, f"{each.largest:.3g}", *shares)


def settings_of(found: Preflight, plugin: str, arguments: dict[str, Any]) -> str:
    """Return the YAML of the remedy; empty if no remedy is needed or none was found.

    `arguments` of the plugin are those that a remedy extends; `is_dynamic` tells whether its loss
    scale moves, `passed` are the arguments that the user passed.
    """
    remedy = found.remedy
    if not found.stagnates and not found.is_mended:
        return ""
    is_ours = plugin in _OURS and not found.stagnates and remedy.half is None
    half = found.half if remedy.half is None else remedy.half
    wanted: dict[str, Any] = {"half": _NAMES[str(half)], **(arguments["passed"] if is_ours else {})}
    if found.is_mended and remedy.half is None:
        wanted |= _changed(remedy, arguments)
    if plugin in ("MixedPrecision", "Precision") and remedy.half is None:
        wanted["weights"] = "full"  # O1, as Lightning's own mixed precision
    name = plugin if is_ours else "BalancedAMP"
    lines = {"trainer": {"plugins": [{"class_path": name, "init_args": wanted}]}}
    text: str = yaml.safe_dump(lines, sort_keys=False)
    return text if plugin in _OURS else f"# Without `precision:`.\n{text}"


def _changed(remedy: Remedy, arguments: dict[str, Any]) -> dict[str, Any]:
    if remedy.loss_scale is not None:
        if not arguments["is_dynamic"]:
            return {"loss_scale": remedy.loss_scale}
        passed = arguments["passed"].get("loss_scale")
        others = passed if isinstance(passed, dict) else {}
        return {"loss_scale": {**others, "init_scale": remedy.loss_scale}}
    changed = {
        kind: [*dict.fromkeys([*arguments[kind], *getattr(remedy, kind)])]
        for kind, _ in remedy.names
    }
    moved = [op for op in arguments["half_ops"] if op in remedy.fp32_ops]
    if moved:  # an op cannot be in both lists
        changed["half_ops"] = [op for op in arguments["half_ops"] if op not in moved]
    return changed


def _percent(ratio: float) -> str:
    return f"{ratio:.2%}" if ratio < 0.1 else f"{ratio:.0%}"
