"""Renders the data of a report as one self-contained HTML page."""

import base64
import hashlib
import json
import re
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from lightning_mp.callbacks._report.data import HISTOGRAM

__all__ = ["MAP_TITLES", "asset", "marked_up", "report_page"]

# Name of a curve -> title and axis.
_TIME_LINES = {
    "loss": ("Loss", "auto"),
    "gradient_norm": ("Gradient norm, before clipping", "log"),
    "loss_scale": ("Loss scale", "log2"),
    "skipped": ("Skipped steps, cumulative", "count"),
}
# Name of a heat map -> title.
MAP_TITLES = {
    "gradient_zero_share": "Gradients: share of values that are exactly zero",
    "gradient_headroom_bits": "Gradients: headroom up to the largest fp16 number, in bits",
    "update_rms": "Adam: gradient relative to the second moment (RMS)",
    "update_to_weight": "Adam: norm of the next update relative to the norm of the weights",
    "weight_rms": "Weights: RMS of each parameter",
    "feature_spread": "Features: spread, 0 if all samples have the same direction",
    "activation_zero_share": "Activations: share of values that are exactly zero",
    "activation_headroom_bits": "Activations: headroom up to the largest number, in bits",
    "norm_input_headroom_bits": "Inputs of norms: headroom up to the largest number, in bits",
    "norm_input_zero_share": "Inputs of norms: share of values that are exactly zero",
    "attention_logit": "Attention: largest logit",
    "attention_entropy": "Attention: entropy relative to its maximum",
    "output_logit": "Output logits: largest value",
    "output_log_z": "Output logits: log Z (RMS)",
    "expert_load": "Experts: share of the tokens, 1 for an even split",
    "output_gradient_zero_share": "Gradients of outputs: share of values that are exactly zero",
    "output_gradient_headroom_bits": "Gradients of outputs: headroom up to the largest number, "
    "in bits",
}
_SIGNS = {"error": "◆", "warning": "▲", "info": "●", "fine": "✓"}
_NOUNS = {"error": "error", "warning": "warning", "info": "note"}
_SHOWN_ALARMS = 20
_WIDE = ' class="wide"'
_NO_MAPS = (
    '<p class="none">There are none. GradientUnderflowMonitor, ActivationRangeMonitor and '
    "AdamStateMonitor record them.</p>"
)


def report_page(data: dict[str, Any]) -> str:
    """Return the page for the result of `report_data`, which may come from JSON."""
    # Names and messages come from users' code, so they are escaped here, and the script inserts
    # them as text. A content security policy forbids other scripts and all requests.
    script = "".join(asset(f"{name}.js") for name in ("base", "lines", "heat"))
    return Template(asset("page.html")).substitute(
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        title=escape(data["run"]["title"]),
        style=asset("page.css"),
        verdicts=_verdicts(data),
        facts=_facts_list(data["run"]),
        preflight=_preflight(data["run"]),
        alarms=_alarms(data),
        no_maps="" if data["maps"] else _NO_MAPS,
        data=_json(_chart_data(data)),
        script=script,
    )


def asset(name: str) -> str:
    return files("lightning_mp.callbacks._report").joinpath(name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """Return JSON that cannot end the script element around it."""
    # The two separators end a line in JavaScript before ES2019, but not in JSON.
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def headline(data: dict[str, Any]) -> str:
    """Return the result of the run in one line, not escaped."""
    counts, first, steps = data["counts"], data["first"], data["run"]["steps"]
    named = [_counted(counts[kind], kind) for kind in ("error", "warning") if counts[kind]]
    if first is None:
        return f"No alarms in {_counted(steps, 'step')}."
    return f"{', '.join(named)}; first at step {first['step']:,}: {first['message']}"


def marked_up(message: str) -> str:
    """Return escaped text in which names in backticks are code."""
    # Escaped first, because a name may contain markup.
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(message))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _verdicts(data: dict[str, Any]) -> str:
    counts, end = data["counts"], data["run"]["end"]
    level = "error" if counts["error"] else "warning" if counts["warning"] else "fine"
    lines = [(level, marked_up(headline(data)))]
    if end["how"] == "failed":
        lines.append(("error", f"Ended by <code>{escape(end.get('exception', 'unknown'))}</code>"))
    return "\n".join(
        f'<p class="verdict {level}"><span aria-hidden="true">{_SIGNS[level]}</span> {text}</p>'
        for level, text in lines
    )


def _facts_list(run: dict[str, Any]) -> str:
    monitors = ", ".join(run["monitors"]) or "none except this report"
    return "\n".join(
        f"<div{_WIDE if len(value) > 90 else ''}><dt>{escape(label)}</dt>"
        f"<dd>{escape(value)}</dd></div>"
        for label, value in [*_run_times(run), *run["facts"], ("Monitors", monitors)]
    )


def _preflight(run: dict[str, Any]) -> str:
    """Return a link to the page of `PrecisionPreflight` in the same folder."""
    name = run.get("preflight")
    if not isinstance(name, str) or name != Path(name).name:
        return ""
    return f' <a href="./{escape(quote(name))}">Precision preflight</a>'


def _run_times(run: dict[str, Any]) -> list[tuple[str, str]]:
    started, *resumed = run["starts"] or [{"step": 0, "time": "not yet"}]
    end = run["end"]
    ended = f"No: still running or killed; this page was written at {run['written']}"
    if end["how"] != "running":
        how = "preempted by SIGTERM" if end["how"] == "preempted" else end["how"]
        ended = f"{how[:1].upper()}{how[1:]}, {end['time']}"
    times = [("Steps", f"{run['steps']:,}"), ("Started", started["time"])]
    # A preemptible run may be resumed hundreds of times.
    times += [("Resumed", f"at step {each['step']:,}, {each['time']}") for each in resumed[-5:]]
    return [*times, ("Ended", ended)]


def _alarms(data: dict[str, Any]) -> str:
    alarms, counts = data["alarms"], data["counts"]
    if not alarms:
        return '<p class="none">There are none.</p>'
    lines = ['<div class="filters" role="group" aria-label="Show alarms of these levels">']
    lines += [
        f'<button type="button" class="{kind}" data-level="{kind}" aria-pressed="true">'
        f'<span aria-hidden="true">{_SIGNS[kind]}</span> {_counted(count, _NOUNS[kind])}</button>'
        for kind, count in counts.items()
        if count
    ]
    lines.append("</div>")
    total = sum(counts.values())
    if total > len(alarms):
        lines.append(f"<p>These are the first and latest {len(alarms)} of {total:,} alarms.</p>")
    shown = "\n".join(_alarm_item(index, alarm) for index, alarm in enumerate(alarms))
    lines.append(f'<ol class="alarms">\n{shown}\n</ol>')
    if len(alarms) > _SHOWN_ALARMS:
        lines.append(f'<button type="button" id="unfold">Show all {len(alarms)}</button>')
    return "\n".join(lines)


def _alarm_item(index: int, alarm: dict[str, Any]) -> str:
    level = alarm["severity"]
    tensor = ""
    if alarm["tensor"]:
        name = escape(alarm["tensor"])
        # The style cuts long names at their beginning by writing from right to left.
        tensor = f'<code class="tensor" tabindex="0" title="{name}"><bdi>{name}</bdi></code>'
    fold = " later" if index >= _SHOWN_ALARMS else ""
    return (
        f'<li id="alarm-{index}" class="alarm {level}{fold}" data-level="{level}">'
        f'<p class="what"><span class="level">{_SIGNS[level]} {_NOUNS[level]}</span> '
        f'<a href="#timelines" data-step="{alarm["step"]}">Step {alarm["step"]:,}</a> '
        f"{_place(alarm)}"
        f'<span class="kind">{escape(alarm["kind"].replace("_", " "))}</span>{tensor}'
        f'<span class="by">{escape(alarm["monitor"])}</span></p>'
        f"<p>{marked_up(alarm['message'])}</p>"
        + (f'<p class="remedy">{marked_up(alarm["remedy"])}</p>' if alarm["remedy"] else "")
        + "</li>"
    )


def _place(alarm: dict[str, Any]) -> str:
    parts = {"epoch": alarm["epoch"], "batch": alarm["batch_idx"], "rank": alarm["rank"]}
    known = ", ".join(f"{name} {at:,}" for name, at in parts.items() if at is not None)
    return f'<span class="place">{known}</span> ' if known else ""


def _chart_data(data: dict[str, Any]) -> dict[str, Any]:
    curves, run = data["curves"], data["run"]
    lines = [_chart(name, curves.get(name), *each) for name, each in _TIME_LINES.items()]
    others = sorted(set(curves) - set(_TIME_LINES))
    more = [_chart(name, curves[name], name.replace("_", " ").capitalize()) for name in others]
    absent = {
        "loss": "No loss has been recorded.",
        "gradient_norm": "No gradient norm has been recorded.",
        "loss_scale": "This run has no loss scale.",
        "skipped": f"No step of {run['steps']:,} was skipped for overflow.",
    }
    if not run["has_loss_scale"]:
        absent["skipped"] = "Without a loss scale, no step is skipped for overflow."
    elif run["steps"]:
        absent["loss_scale"] = "No loss scale has been recorded."
    alarms = ((a["step"], a["severity"], f"{a['kind']}: {a['message']}") for a in data["alarms"])
    return {
        "steps": run["steps"],
        "absent": absent,
        "lines": lines,
        "more": more,
        # Short texts for the marks in charts; the list of alarms has the full messages.
        "alarms": [[step, severity, text[:90]] for step, severity, text in alarms],
        "maps": [{**each, "title": _map_title(each["name"])} for each in data["maps"]],
    }


def _chart(name: str, curve: Any, title: str, axis: str = "auto") -> dict[str, Any]:
    unit = "share" if name.endswith("share") else "number"
    return {"title": title, "unit": unit, "axis": axis, "curve": curve, "name": name}


def _map_title(name: str) -> str:
    """Return the title of a heat map, with its number if several maps have the same name."""
    if name.startswith(HISTOGRAM):
        return f"{name[:1].upper()}{name[1:]}: share of values by power of two"
    base, _, number = name.rpartition("_")
    # A name may itself end with a number.
    if number.isdigit() and base in MAP_TITLES:
        return f"{MAP_TITLES[base]} ({number})"
    return MAP_TITLES.get(name, name)
