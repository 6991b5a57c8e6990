"""Renders the data of a report as one self-contained HTML page."""

import base64
import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from lightning_mp.callbacks._report.data import HISTOGRAM

__all__ = ["MAP_TITLES", "headline", "rendered", "report_page"]

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


def report_page(data: dict[str, Any]) -> str:
    """Return the page for the result of `report_data`, which may come from JSON."""
    # Names and messages come from users' code. The template escapes them, and the script inserts
    # them as text. A content security policy forbids other scripts and all requests.
    script = "".join(_asset(f"{name}.js") for name in ("base", "lines", "heat"))
    counts, run = data["counts"], data["run"]
    monitors = ", ".join(run["monitors"]) or "none except this report"
    return rendered(
        "page.html",
        data=data,
        level="error" if counts["error"] else "warning" if counts["warning"] else "fine",
        headline=headline(data),
        facts=[*_run_times(run), *run["facts"], ("Monitors", monitors)],
        preflight=_preflight(run),
        shown=_SHOWN_ALARMS,
        charts=Markup(_json(_chart_data(data))),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def rendered(name: str, **fields: Any) -> str:
    """Return the HTML of a template with the style of all pages; fields are escaped."""
    style = Markup(_asset("page.css"))
    return _ENVIRONMENT.get_template(name).render(style=style, **fields)


def _asset(name: str) -> str:
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


def _marked_up(message: str) -> Markup:
    """Return escaped text in which names in backticks are code."""
    # Escaped first, because a name may contain markup.
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(message))))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _preflight(run: dict[str, Any]) -> str:
    """Return the name of the page of `PrecisionPreflight` in the same folder, if there is one."""
    name = run.get("preflight")
    return name if isinstance(name, str) and name == Path(name).name else ""


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


def _place(alarm: dict[str, Any]) -> str:
    parts = {"epoch": alarm["epoch"], "batch": alarm["batch_idx"], "rank": alarm["rank"]}
    return ", ".join(f"{name} {at:,}" for name, at in parts.items() if at is not None)


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


_ENVIRONMENT = Environment(
    loader=FunctionLoader(_asset),
    autoescape=True,
    undefined=StrictUndefined,  # missing data raise an error
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.globals |= {"signs": _SIGNS, "nouns": _NOUNS}
_ENVIRONMENT.filters |= {"counted": _counted, "marked_up": _marked_up, "place": _place}
