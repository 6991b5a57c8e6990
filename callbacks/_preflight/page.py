"""Presents a preflight: verdict, table and YAML of the remedy as text, and all of it as a page."""

import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from lightning_mp.callbacks._preflight.result import ModuleError, Preflight, Remedy
from lightning_mp.callbacks._report.page import rendered

__all__ = ["preflight_page", "settings_of", "table_of", "verdict_in_words"]

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_OURS = ("BalancedAMP", "PureFP16")
_TABLE_ROWS, _PLOT_ROWS = 8, 40  # modules in the table as text, and in the plot
_LOW, _HIGH = -6.0, 1.0  # powers of ten on the axis
_LEFT, _WIDTH, _HEIGHT = 330, 560, 20  # width of names and axis, height of a row


def verdict_in_words(found: Preflight, plugin: str) -> str:
    half = _NAMES[found.half]
    if found.is_clean:
        where = f" (`{found.worst}`)" if found.worst else ""  # no gradient has noise
        return (
            f"{plugin} is safe for this model: errors of {half} are at most "
            f"{_percent(found.ratio)} of the gradient noise{where}."
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
    if remedy.loss_scale is not None:
        return f"an initial loss scale of {remedy.loss_scale:g}"
    lists = {kind: [n for k, n in remedy.names if k == kind] for kind, _ in remedy.names}
    words = [] if remedy.half is None else [f"`BalancedAMP(half='{_NAMES[remedy.half]}')`"]
    return " and ".join(words + [f"`{k}: [{', '.join(names)}]`" for k, names in lists.items()])


def table_of(found: Preflight) -> str:
    """Return a table of the modules with the largest own errors, as text."""
    half = _NAMES[found.half]
    rows = [head_of(found), *(cells_of(found, each) for each in found.modules[:_TABLE_ROWS])]
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


def settings_of(found: Preflight, plugin: Any) -> str:
    """Return the YAML of the remedy; empty if no remedy is needed or none was found."""
    remedy, kind = found.remedy, type(plugin).__name__
    if not found.stagnates and not found.is_mended:
        return ""
    kept = _OURS if remedy.half is None else _OURS[:1]  # plugins of which the settings are kept
    is_ours = kind in kept and not found.stagnates
    wanted: dict[str, Any] = {"half": _NAMES[found.half]}
    wanted |= _passed_to(plugin) if is_ours else {}
    if found.is_mended:
        wanted |= _changed(remedy, plugin)
    if found.is_mended and remedy.half is not None:
        wanted["half"] = _NAMES[remedy.half]
        wanted.pop("loss_scale", None)  # it belongs to the other dtype
    if kind == "MixedPrecision":
        wanted["weights"] = "full"  # O1, as Lightning's own mixed precision
    name = kind if is_ours else "BalancedAMP"
    lines = {"trainer": {"plugins": [{"class_path": name, "init_args": wanted}]}}
    text: str = yaml.safe_dump(lines, sort_keys=False)
    return text if kind in _OURS else f"# Without `precision:`.\n{text}"


def _changed(remedy: Remedy, plugin: Any) -> dict[str, Any]:
    """Return the arguments of a plugin that a remedy sets or extends."""
    if remedy.loss_scale is not None:
        config = getattr(getattr(plugin, "scaler", None), "config", None)
        if not getattr(config, "dynamic", True):
            return {"loss_scale": remedy.loss_scale}
        passed = _passed_to(plugin).get("loss_scale")
        others = passed if isinstance(passed, dict) else {}
        return {"loss_scale": {**others, "init_scale": remedy.loss_scale}}
    policy = getattr(plugin, "policy", None)
    own = {
        "fp32_modules": getattr(plugin, "fp32_modules", ["norm"]),
        "fp32_ops": getattr(policy, "fp32_ops", ()),
        "inf_clamp": getattr(getattr(plugin, "inf_clamp", None), "modules", ()),
    }
    names = {kind: [*own[kind], *getattr(remedy, kind)] for kind, _ in remedy.names}
    changed = {kind: [*dict.fromkeys(each)] for kind, each in names.items()}
    half_ops = getattr(policy, "half_ops", ())
    if any(op in remedy.fp32_ops for op in half_ops):  # an op cannot be in both lists
        changed["half_ops"] = [op for op in half_ops if op not in remedy.fp32_ops]
    return changed


def _passed_to(plugin: Any) -> dict[str, Any]:
    """Return the arguments that the user passed to a plugin of this package, as in YAML."""
    return {name: _yaml_value(value) for name, value in getattr(plugin, "_arguments", {}).items()}


def _yaml_value(value: Any) -> Any:
    if is_dataclass(value):
        given = ((each, getattr(value, each.name)) for each in fields(value))
        return {each.name: v for each, v in given if v != each.default}
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _percent(ratio: float) -> str:
    return f"{ratio:.2%}" if ratio < 0.1 else f"{ratio:.0%}"


def preflight_page(found: Preflight, title: str, verdict: str, settings: str) -> str:
    """Return a self-contained page of HTML without scripts; `settings` is YAML or empty."""
    # The modules with the largest errors, in the order of the model.
    plotted = sorted(found.modules[:_PLOT_ROWS], key=lambda each: each.order)
    return rendered(
        "preflight.html",
        **{"found": found, "title": title, "verdict": verdict, "settings": settings},
        half=_NAMES[found.half],
        unit=torch.finfo(found.half).eps / 2,
        before=f"{found.ratio:.2%}" if math.isfinite(found.ratio) else "not finite",
        plotted=plotted,
        mending={*found.remedy.fp32_modules, *found.remedy.inf_clamp},
        powers=range(int(_LOW), int(_HIGH) + 1),
        **{"x": _x, "left": _LEFT, "width": _WIDTH, "height": _HEIGHT},
        bottom=_HEIGHT * (len(plotted) + 1),
        head=head_of(found),
        rows=[cells_of(found, each) for each in found.modules],
    )


def _x(error: float, shift: int = 0) -> str:
    """Return the position of an error on the logarithmic axis."""
    power = _HIGH if not math.isfinite(error) else math.log10(max(error, 1e-30))
    x = _LEFT + _WIDTH * (min(max(power, _LOW), _HIGH) - _LOW) / (_HIGH - _LOW)
    return f"{x + shift:.1f}"
