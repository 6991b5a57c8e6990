"""What a preflight says: a verdict, the modules, and the lines of YAML that mend it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from lightning_mp.callbacks._preflight.measure import ModuleError, Preflight

__all__ = ["HEAD", "cells_of", "settings_of", "table_of", "verdict_of"]

_ROWS = 8
HEAD = ("module", "own error", "of gradients", "in the run", "largest output", "underflow")
_NAMES = {"torch.float16": "fp16", "torch.bfloat16": "bf16"}


def verdict_of(found: Preflight, plugin: str) -> str:
    """Return the result in one sentence."""
    half = _NAMES[str(found.half)]
    if found.is_clean:
        return (
            f"{plugin} is safe for this model: errors of {half} are at most "
            f"{_share(found.ratio)} of the gradient noise (`{found.worst}`)."
        )
    if found.ratio < math.inf:
        harm = (
            f"{half} adds errors of {_share(found.ratio)} of the gradient noise to `{found.worst}`"
        )
    else:
        harm = f"{found.worst} is not finite in {half}"
    if found.stagnant and found.fp32_modules == () and found.ratio < found.limit:
        return (
            f"{_share(found.stagnant)} of the weights stand still: an update as large as the "
            f"learning rate is below half a unit in the last place of {half}. Keep fp32 weights, "
            "with `BalancedAMP`."
        )
    if found.mended is not None and found.loss_scale is not None:
        scale = f"{found.loss_scale:g}"
        return f"{harm}, and {_share(found.mended)} at an initial loss scale of {scale}."
    if found.mended is not None and found.mended < found.limit:
        names = ", ".join(f"`{each}`" for each in found.fp32_modules)
        return f"{harm}, and {_share(found.mended)} with {names} in fp32."
    if found.in_bf16 is not None and found.in_bf16 < found.limit:
        return f"{harm}, and {_share(found.in_bf16)} in bf16. Train in bf16."
    return f"{harm}. No module in fp32 mends it: look at what `training_step` computes itself."


def table_of(found: Preflight) -> str:
    """Return the modules with the largest errors of their own, as text."""
    half = _NAMES[str(found.half)]
    rows = [cells_of(each) for each in found.modules[:_ROWS]]
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    lines = [
        "  ".join(
            [cell.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))]
        )
        for cell, *rest in (HEAD, *rows)
    ]
    whole, rounded = found.losses
    lines.append(f"The loss is {whole:.6g} in fp32 and {rounded:.6g} in {half}.")
    return "\n".join(lines)


def cells_of(each: ModuleError) -> tuple[str, ...]:
    """Return the row of a module under `HEAD`."""
    return (
        f"{each.path} ({each.kind})",
        f"{each.output:.1e}",
        f"{each.gradient:.1e}",
        f"{each.handed:.1e}",
        f"{each.largest:.3g}",
        f"{each.underflow:.0%}",
    )


def settings_of(found: Preflight, plugin: str, arguments: dict[str, Any]) -> str:
    """Return the lines of YAML that mend what was found; empty where nothing was.

    Args:
        found: The result.
        plugin: The name of the precision plugin's class.
        arguments: What it was given, `half` and `fp32_modules` among it.
    """
    changed: dict[str, Any] = {}
    if found.mended is not None and found.loss_scale is not None:
        changed["loss_scale"] = {"init_scale": found.loss_scale}
        if not arguments.get("is_dynamic", True):
            changed["loss_scale"] = found.loss_scale
    elif found.mended is not None and found.mended < found.limit:
        changed["fp32_modules"] = _joined(arguments.get("fp32_modules", ["norm"]), found)
    elif found.in_bf16 is not None and found.in_bf16 < found.limit:
        changed["half"] = "bf16"
    if not changed and not found.stagnant >= found.stagnates:
        return ""
    is_ours = plugin in ("BalancedAMP", "PureFP16") and found.stagnant < found.stagnates
    wanted = {"half": arguments["half"], **changed}
    # O1, as Lightning's own mixed precision.
    is_mixed = plugin in ("MixedPrecision", "Precision")
    name = plugin if is_ours else "BalancedAMP"
    if is_mixed:
        wanted["weights"] = "full"
    lines = {"trainer": {"plugins": [{"class_path": name, "init_args": wanted}]}}
    text: str = yaml.safe_dump(lines, sort_keys=False)
    return text if is_ours else f"# Without `precision:`.\n{text}"


def _joined(before: Sequence[str], found: Preflight) -> list[str]:
    return list(dict.fromkeys([*before, *found.fp32_modules]))


def _share(ratio: float) -> str:
    return f"{ratio:.2%}" if ratio < 0.1 else f"{ratio:.0%}"
