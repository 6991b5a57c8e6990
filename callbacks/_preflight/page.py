"""Renders a preflight as a page: verdict, settings, a plot of errors by module, and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from string import Template
from typing import TYPE_CHECKING

import torch

from lightning_mp.callbacks._report.page import asset, marked_up
from lightning_mp.callbacks._words.preflight import cells_of, head_of

if TYPE_CHECKING:
    from lightning_mp.callbacks._preflight.result import ModuleError, Preflight

__all__ = ["preflight_page"]

_ROWS = 40  # modules in the plot
_LOW, _HIGH = -6.0, 1.0  # powers of ten on the axis
_LEFT, _WIDTH, _HEIGHT = 330, 560, 20  # width of names and axis, height of a row
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def preflight_page(found: Preflight, title: str, verdict: str, settings: str) -> str:
    """Return a self-contained page of HTML without scripts; `settings` is YAML or empty."""
    rows = [f"<tr>{_table_row('td', cells_of(found, each))}</tr>" for each in found.modules]
    mends = f"<pre>{escape(settings)}</pre></section>" if settings else ""
    if settings and found.mended is not None:
        before = f"{found.ratio:.2%}" if math.isfinite(found.ratio) else "not finite"
        mends = (
            "<p>The largest error of a gradient, as a share of its noise, is "
            f"<strong>{before}</strong> now and <strong>{found.mended:.2%}</strong> in the same "
            f"run with these settings.</p>\n{mends}"
        )
    whole, rounded = found.losses
    return Template(asset("preflight.html")).substitute(
        title=escape(title),
        style=asset("page.css"),
        level="fine" if found.is_clean else "error",
        verdict=marked_up(verdict),
        settings=f"<section><h2>Settings</h2>\n{mends}" if mends else "",
        half="fp16" if found.half == torch.float16 else "bf16",
        unit=f"{_ROUNDING[found.half]:.1e}",
        after="" if found.mended is None else ", and a square is this error with the settings",
        picture=_picture(found),
        head=_table_row("th", head_of(found)),
        rows="\n".join(rows),
        whole=f"{whole:.6g}",
        rounded=f"{rounded:.6g}",
    )


def _table_row(tag: str, cells: Sequence[str]) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)


def _x(error: float) -> float:
    """Return the position of an error on the logarithmic axis."""
    power = _HIGH if not math.isfinite(error) else math.log10(max(error, 1e-30))
    return _LEFT + _WIDTH * (min(max(power, _LOW), _HIGH) - _LOW) / (_HIGH - _LOW)


def _picture(found: Preflight) -> str:
    # The modules with the largest errors, in the order of the model.
    chosen = {each.path for each in found.modules[:_ROWS]}
    shown = [each for each in sorted(found.modules, key=lambda m: m.order) if each.path in chosen]
    bottom = _HEIGHT * (len(shown) + 1)
    parts = [f'<svg class="modules" viewBox="0 0 {_LEFT + _WIDTH + 20} {bottom + 24}" role="img" '
             'aria-label="Errors of half precision by module">']  # fmt: skip
    for power in range(int(_LOW), int(_HIGH) + 1):
        x = _x(10.0**power)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{bottom}"/>')
        label = "1" if power == 0 else f"1e{power}"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
    unit = _x(_ROUNDING[found.half])
    parts.append(f'<line class="unit" x1="{unit:.1f}" x2="{unit:.1f}" y1="4" y2="{bottom}"/>')
    mending = {*found.remedy.fp32_modules, *found.remedy.inf_clamp}
    parts += [_mark(each, at, each.path in mending) for at, each in enumerate(shown, 1)]
    return "\n".join([*parts, "</svg>"])


def _mark(each: ModuleError, at: int, mends: bool) -> str:
    y = _HEIGHT * at
    name = each.path if len(each.path) <= 44 else f"…{each.path[-43:]}"
    kind = " mends" if mends else ""
    after = ""
    if each.mended is not None:
        x = _x(each.mended)
        after = f'<rect class="after" x="{x - 4:.1f}" y="{y - 4}" width="8" height="8"/>'
    return (
        f'<g><title>{escape(each.path)} ({escape(each.kind)}): own {each.own:.1e}, in the run '
        f'{each.handed:.1e}</title>'
        f'<text class="name{kind}" x="{_LEFT - 12}" y="{y + 4}">{escape(name)}</text>'
        f'<circle class="handed" cx="{_x(each.handed):.1f}" cy="{y}" r="5"/>'
        f"{after}"
        f'<circle class="own{kind}" cx="{_x(each.own):.1f}" cy="{y}" r="3.5"/></g>'
    )  # fmt: skip
