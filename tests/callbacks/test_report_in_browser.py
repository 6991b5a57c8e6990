"""The page of a report in a real browser: layout, keyboard, phone and desktop widths."""

import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_mp.callbacks._report.data import report_data
from lightning_mp.callbacks._report.page import report_page
from lightning_mp.callbacks.monitor import Alarm, History

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on the PATH, nor in $CHROMIUM"),
]
WIDTHS = {"phone": 390, "desk": 1440}
LAYERS = 24
STEPS = 400
# Three alarms at one place, one of which is the worst; a single one; two at the right edge.
ALARMS = {100: "warning", 101: "error", 102: "warning", 250: "info", 398: "error", 399: "error"}


def _history() -> History:
    history = History()
    for step in range(STEPS):
        history.add_point("loss", step, 2 + math.cos(step / 30))
        history.add_point("gradient_norm", step, 10.0 ** (step / 100))
        history.add_point("loss_scale", step, 2.0 ** (16 - step // 5))  # to 2^-63
    history.add_point("loss_not_finite", 101, math.nan)
    names = [
        f"model.transformer.encoder.layers.{layer}.attention.self.{part}.weight"
        for layer in range(LAYERS)
        for part in ("query", "value")
    ]
    for step in range(0, STEPS, 10):
        zeros = [row / 100 + step / 1e4 for row in range(len(names))]
        history.add_column("gradient_zero_share", step, dict(zip(names, zeros, strict=True)))
        history.add_column("gradient_headroom_bits", step, dict.fromkeys(names[:9], 16 - step / 40))
    for step, level in ALARMS.items():
        tensor = names[11]
        message, remedy = f"`{tensor}` has 7% zeros.", "Pass `init_scale=65536`."
        history.add_alarm(
            Alarm(
                step=step,
                monitor="GradientUnderflowMonitor",
                kind="gradient_underflow",
                severity=level,  # type: ignore[arg-type]
                message=f"{message} {remedy}",
                remedy=remedy,
                tensor=tensor,
                epoch=0,
                batch_idx=step,
                rank=0,
            )
        )
    return history


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = {
        "title": "GlyphCLIP",
        "steps": STEPS,
        "starts": [{"step": 0, "time": "then"}],
        "written": "now",
        "end": {"how": "failed", "time": "now", "exception": "ValueError: " + "long" * 60},
        "has_loss_scale": True,
        "facts": [["Precision", "BalancedAMP(" + "half=fp16, " * 20 + ")"], ["Device", "cpu"]],
        "monitors": ["GradientUnderflowMonitor"],
    }
    page: Path = tmp_path_factory.mktemp("report") / "instability.html"
    page.write_text(report_page(report_data(_history(), [], run, 100)))
    return page.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    quiet = ["background-networking", "component-update", "sync", "gpu"]
    arguments = ["--no-sandbox", *(f"--disable-{each}" for each in quiet)]
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=CHROMIUM, args=arguments)


@pytest.fixture(params=WIDTHS)
def page(request: pytest.FixtureRequest, browser: Any, address: str) -> Iterator[Any]:
    """Open the page at a width; errors in the page fail the test."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": WIDTHS[request.param], "height": 844})
    opened = context.new_page()
    opened.on("console", lambda message: wrong.append(message.text))
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("requestfailed", lambda failed: wrong.append(failed.url))
    opened.goto(address)
    opened.wait_for_selector("#charts svg path.curve")
    yield opened
    assert wrong == []
    context.close()


def _value(slider: Any) -> str:
    return slider.get_attribute("aria-valuetext")


def test_page_has_no_horizontal_overflow(page: Any) -> None:
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        inside = "[...document.querySelectorAll('figure')].map(f => f.scrollWidth - f.clientWidth)"
        assert max(page.evaluate(inside)) <= 0


def test_labels_of_an_axis_differ(page: Any) -> None:
    axes = page.evaluate(
        """() => [...document.querySelectorAll("svg")].map((svg) => {
          const labels = [...svg.querySelectorAll("text[text-anchor=end]")];
          const x = labels.length && labels[0].getAttribute("x");
          const column = labels.filter((each) => each.getAttribute("x") === x);
          return column.map((each) => each.textContent);
        })"""
    )
    assert any(len(labels) > 2 for labels in axes)
    assert [labels for labels in axes if len(set(labels)) < len(labels)] == []


def test_row_names_show_their_layer(page: Any) -> None:
    page.get_by_role("button", name=f"Show all {2 * LAYERS} rows").click()
    rows = page.locator(".heat").first.locator(".names div")
    assert rows.count() == 2 * LAYERS
    for row in rows.all():
        (layer,) = re.findall(r"\d+", row.get_attribute("title"))
        assert re.findall(r"\d+", row.inner_text()) == [layer]
        assert row.inner_text().endswith(".weight")
        assert row.evaluate("each => each.scrollWidth - each.clientWidth") <= 0


def test_pins_show_their_number_of_alarms(page: Any) -> None:
    chart = page.locator("#charts svg").first
    shown = [int(text) for text in chart.locator("a .count").all_text_contents()]
    assert sum(shown) + chart.locator("a").count() - len(shown) == len(ALARMS)
    assert sorted(shown) == [2, 3]
    right = chart.bounding_box()["x"] + chart.bounding_box()["width"]
    for pin in chart.locator("a text").all():
        box = pin.bounding_box()
        assert box["x"] + box["width"] <= right


def test_time_lines_work_with_the_keyboard(page: Any) -> None:
    loss, norm = page.locator("#charts svg").all()[:2]
    for _ in range(40):  # reachable with Tab alone
        page.keyboard.press("Tab")
        if loss.evaluate("each => each === document.activeElement"):
            break
    assert loss.get_attribute("role") == "slider"
    assert loss.get_attribute("aria-label").startswith("Loss; arrow keys")
    page.keyboard.press("Home")
    assert _value(loss) == "step 0: 3"
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    step = int(loss.get_attribute("aria-valuenow"))
    assert step == 5 * (STEPS // 100)
    assert _value(loss) == f"step {step}: {2 + math.cos(step / 30):.4g}"
    assert _value(norm) == f"step {step}: {10 ** (step / 100):.4g}"  # one cursor for all curves
    page.keyboard.press("ArrowLeft")
    assert int(loss.get_attribute("aria-valuenow")) == step - STEPS // 100
    assert page.locator("#charts svg .cross").first.get_attribute("visibility") == "visible"


def test_heat_map_works_with_the_keyboard(page: Any) -> None:
    heat = page.locator(".heat canvas").first
    readout = page.locator(".readout").first
    heat.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    # The row with alarms comes first, then the row with the most zeros.
    expected = f"{(47 / 100 + 380 / 1e4) * 100:.3g}% at step 380 in model.transformer.encoder."
    assert readout.inner_text().startswith(expected)
    assert "layers.23.attention.self.value.weight" in readout.inner_text()
    assert _value(heat) == readout.inner_text()
    assert heat.get_attribute("aria-valuenow") == "2"
    page.keyboard.press("ArrowUp")
    assert readout.inner_text().startswith("14.8% at step 380 in")


def test_pins_lead_to_their_alarms_with_the_keyboard(page: Any) -> None:
    pin = page.locator("#charts svg a").first
    assert pin.get_attribute("aria-label").startswith("3 alarms from step 100; the worst: ")
    pin.focus()
    page.keyboard.press("Enter")
    alarm = page.locator("#alarm-1")  # the error among the three
    playwright.expect(alarm).to_be_in_viewport()
    assert "Step 101" in alarm.inner_text()
    assert "Pass init_scale=65536." in alarm.inner_text()


def test_printed_page_shows_whole_heat_maps_without_controls(page: Any) -> None:
    page.emulate_media(media="print")
    for control in (".heat-head label", ".readout"):  # the readout would cover the last rows
        assert page.locator(control).count() > 0
        assert not any(each.is_visible() for each in page.locator(control).all())
    assert page.locator(".heat-head + *").first.is_visible()


def test_page_without_scripts_has_alarms_and_facts(browser: Any, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    assert page.locator(".alarm").count() == len(ALARMS)
    assert "The charts need JavaScript" in page.locator("#timelines").inner_text()
    context.close()
