"""Without a terminal, the demo prints lines instead of a progress bar."""

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from examples.glyph_clip.progress import LineProgress

SILENT = {"enable_model_summary": False, "enable_checkpointing": False, "logger": False}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("seconds", "steps"), [(0.0, [1, 2, 3]), (1e9, [3])])
def test_lines_are_printed_at_an_interval_and_at_the_end(
    seconds: float, steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = LineProgress(every_n_seconds=seconds)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=3, callbacks=progress, enable_progress_bar=False, **SILENT
    )
    trainer.fit(BoringModel())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Step")]
    assert [line.split(":")[0] for line in lines] == [f"Step {step} of 3" for step in steps]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_terminal_shows_only_the_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    progress = LineProgress(every_n_seconds=0.0)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=2, callbacks=progress, enable_progress_bar=False, **SILENT
    )
    trainer.fit(BoringModel())
    assert "Step" not in capsys.readouterr().out
