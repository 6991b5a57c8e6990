"""Two monitors of one class: states, files and pages stay apart, and one step is acted on once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_mp import ActivationRangeMonitor, InstabilityReport, SpikeGuard
from tests.callbacks.models import Watched, watch
from tests.callbacks.spike_models import PlantedModel, StepRecorder, fit, kinds, make_batches

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),  # Lightning
    pytest.mark.filterwarnings("ignore:.SpikeGuard.action='skip'.. reads one flag"),
]

SPIKE = 30
SHORT: dict[str, Any] = {"window_steps": 16, "judge_after_steps": 8}


def test_state_key_is_made_of_what_is_not_at_its_default() -> None:
    assert SpikeGuard().state_key == SpikeGuard(action="warn").state_key == "SpikeGuard"
    strict = SpikeGuard(z_threshold=4, action="skip")
    assert strict.state_key == "SpikeGuard{'action': 'skip', 'z_threshold': 4.0}"
    reports = [InstabilityReport(), InstabilityReport(filename="b.html")]
    assert reports[0].state_key != reports[1].state_key


@pytest.mark.slow
def test_guards_with_different_arguments_resume_each_from_its_own_state(tmp_path: Path) -> None:
    def guards() -> list[SpikeGuard]:
        return [SpikeGuard(**SHORT), SpikeGuard(window_steps=24, judge_after_steps=8)]

    first = guards()
    trainer = fit(PlantedModel({SPIKE: "explosion"}), make_batches(40), *first)
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    saved = [guard.state_dict() for guard in first]
    assert [kinds(guard) for guard in first] == [[(SPIKE, "loss_spike")]] * 2
    again = guards()
    options = {"max_epochs": 1, "ckpt_path": tmp_path / "last.ckpt"}
    fit(PlantedModel(), make_batches(40), *again, **options)  # has ended: restores, and no more
    windows = []
    for guard, state in zip(again, saved, strict=True):
        assert guard.state_dict()["history"] == state["history"]
        windows.append(guard.state_dict()["windows"][0]["values"])
        assert torch.equal(windows[-1], state["windows"][0]["values"])
    assert [window.shape[1] for window in windows] == [16, 24]


@pytest.mark.slow
def test_guard_with_another_argument_goes_on_from_the_state_of_before(tmp_path: Path) -> None:
    trainer = fit(PlantedModel({SPIKE: "spike"}), make_batches(40), SpikeGuard(**SHORT))
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    options = {"max_epochs": 1, "ckpt_path": tmp_path / "last.ckpt"}
    changed = SpikeGuard(**SHORT, z_threshold=8.0)
    fit(PlantedModel(), make_batches(40), changed, **options)
    assert kinds(changed) == [(SPIKE, "loss_spike")]
    # Which of two it was before cannot be known, so that both start anew.
    pair = [SpikeGuard(**SHORT, z_threshold=z) for z in (8.0, 9.0)]
    fit(PlantedModel(), make_batches(40), *pair, **options)
    assert [kinds(guard) for guard in pair] == [[], []]


def test_guards_that_are_equal_are_refused() -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `SpikeGuard`"):
        fit(PlantedModel(), make_batches(1), SpikeGuard(), SpikeGuard())


@pytest.mark.parametrize(
    "actions", [("skip", "warn"), ("skip", "rewind"), ("rewind", "stop"), ("warn", "skip", "stop")]
)
def test_guards_of_which_not_the_last_acts_are_refused(actions: tuple[Any, ...]) -> None:
    passed = r", ".join(rf"SpikeGuard\(action='{action}'\)" for action in actions)
    with pytest.raises(MisconfigurationException, match=passed + r".*Pass `action='warn'`"):
        fit(PlantedModel(), make_batches(1), *[SpikeGuard(action=action) for action in actions])


@pytest.mark.slow
def test_guard_that_skips_after_one_that_warns_skips_what_both_report() -> None:
    pair = [SpikeGuard(**SHORT), SpikeGuard(**SHORT, action="skip")]
    recorder = StepRecorder()
    fit(PlantedModel({SPIKE: "spike"}), make_batches(SPIKE + 5), *pair, recorder)
    assert [kinds(guard) for guard in pair] == [[(SPIKE, "loss_spike")]] * 2
    assert [step for step, moved in enumerate(recorder.moved) if not moved] == [SPIKE]


@pytest.mark.parametrize("name", ["second.html", "instability.html"])
def test_reports_write_what_each_recorded_to_files_of_their_own(tmp_path: Path, name: str) -> None:
    reports = [
        InstabilityReport(dirpath=str(tmp_path)),
        InstabilityReport(dirpath=str(tmp_path), filename=name, max_tensors=3),
    ]
    watch(Watched(steps=3), reports)
    assert len({report.path for report in reports}) == 2
    for report in reports:
        assert report.path is not None
        assert report.path.is_file()
        data = json.loads(report.path.with_suffix(".json").read_text())
        assert data["curves"]["loss"]["steps"] == [0, 1, 2]
        assert data["run"]["monitors"] == []  # no report is a monitor of another


def test_page_shows_the_maps_of_both_monitors(tmp_path: Path) -> None:
    monitors = [
        ActivationRangeMonitor(modules=[name], every_n_steps=1)
        for name in ("network.0", "network.2")
    ]
    watch(Watched(steps=2), [*monitors, InstabilityReport(dirpath=str(tmp_path))])
    data = json.loads((tmp_path / "instability.json").read_text())
    rows = {heat["name"]: heat["rows"] for heat in data["maps"] if "zero_share" in heat["name"]}
    assert rows == {
        "activation_zero_share": ["network.0"],
        "activation_zero_share_2": ["network.2"],
    }
