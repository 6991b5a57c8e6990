"""The page of the preflight."""

from pathlib import Path
from typing import Any

from lightning_mp import (
    InstabilityReport,
    PrecisionPreflight,
)
from tests.preflight.models import Sentences, trainer
from tests.preflight.runs import make_words, run_preflight


def test_report_contains_the_result(tmp_path: Path) -> None:
    report = InstabilityReport(dirpath=str(tmp_path))
    trainer("BalancedAMP fp16", [PrecisionPreflight(steps=1), report]).fit(
        make_words(), Sentences()
    )
    page = (tmp_path / "instability.html").read_text()
    assert "BalancedAMP is safe for this model: errors of fp16" in page


def test_page_shows_modules_and_settings_and_the_report_links_to_it(tmp_path: Path) -> None:
    report = InstabilityReport(dirpath=str(tmp_path))
    callback = PrecisionPreflight(steps=2)
    trainer("BalancedAMP fp16", [callback, report]).fit(make_words("cancellation"), Sentences())
    assert callback.path == tmp_path / "preflight.html"
    page = callback.path.read_text()
    assert "<pre>trainer:\n  plugins:" in page
    assert '<text class="name mends"' in page
    assert "</strong> now and <strong>0." in page
    assert page.count("<tr>") == 1 + len(callback.result.modules)  # type: ignore[union-attr]
    assert 'href="./preflight.html"' in (tmp_path / "instability.html").read_text()


def test_page_escapes_module_names(tmp_path: Path) -> None:
    model = make_words()
    model.blocks[1].add_module("<script>", model.blocks[1].weak)
    callback = PrecisionPreflight(steps=1, dirpath=str(tmp_path), stops=True)
    trainer("BalancedAMP fp16", callback).fit(model, Sentences())
    assert "<script>" not in (tmp_path / "preflight.html").read_text()


def test_page_is_not_written_without_a_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    callback = run_preflight(make_words(), "BalancedAMP fp16")
    assert callback.path is None
    assert [*tmp_path.iterdir()] == []
