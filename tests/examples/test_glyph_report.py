"""The demo's report, and the callbacks of its configuration."""

import json
from pathlib import Path

import yaml

from examples.glyph_clip.report import instability_line

CONFIG = Path(__file__).parents[2] / "examples" / "glyph_clip" / "config.yaml"


def test_instability_line_counts_alarms_without_notes(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for counts, expected in (
        ({"error": 0, "warning": 0, "info": 4}, "no alarms"),
        ({"error": 1, "warning": 0, "info": 0}, "1 alarm"),
        ({"error": 1, "warning": 2, "info": 0}, "3 alarms"),
    ):
        page.with_suffix(".json").write_text(json.dumps({"counts": counts}))
        assert instability_line(page) == f"Instability report, {expected}: {page}"


def test_config_turns_on_the_monitors_and_their_report() -> None:
    config = yaml.safe_load(CONFIG.read_text())
    callbacks = {
        each["class_path"]: each.get("init_args") for each in config["trainer"]["callbacks"]
    }
    for name in (
        "ActivationRangeMonitor",
        "AdamStateMonitor",
        "GradientUnderflowMonitor",
        "NonFiniteLocator",
        "SpikeGuard",
    ):
        assert f"lightning_mp.callbacks.{name}" in callbacks
    report = callbacks["lightning_mp.callbacks.InstabilityReport"]
    assert report["dirpath"] == "examples/glyph_clip/output"
