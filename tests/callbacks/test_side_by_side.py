"""Two monitors of one class have separate states, files and pages, and only one acts on a step."""

import functools
import inspect
import json
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_mp import (
    ActivationRangeMonitor,
    AdamStateMonitor,
    GradientUnderflowMonitor,
    InstabilityReport,
    LossScaleMonitor,
    NonFiniteLocator,
    SpikeGuard,
    TensorCollector,
)
from lightning_mp.callbacks.monitor import Alarm, InstabilityMonitor
from tests.callbacks.models import Watched, watch
from tests.callbacks.spike_models import PlantedModel, StepRecorder, fit, kinds, make_batches

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),  # Lightning
    pytest.mark.filterwarnings("ignore:.SpikeGuard.action='skip'.. reads one flag"),
]

SPIKE = 30
SHORT: dict[str, Any] = {"window_steps": 16, "judge_after_steps": 8}


def test_state_key_contains_arguments_that_differ_from_their_defaults() -> None:
    assert SpikeGuard().state_key == SpikeGuard(action="warn").state_key == "SpikeGuard"
    assert TensorCollector(include=["*"], collect=["gradients"]).state_key == "TensorCollector"
    strict = SpikeGuard(z_threshold=4, action="skip")
    assert strict.state_key == "SpikeGuard{'action': 'skip', 'z_threshold': 4.0}"
    reports = [InstabilityReport(), InstabilityReport(filename="b.html")]
    assert reports[0].state_key != reports[1].state_key


# Another value than the default, of every argument of every monitor.
OTHERS: dict[type[InstabilityMonitor], dict[str, Any]] = {
    SpikeGuard: {
        **{"action": "skip", "z_threshold": 5.0, "window_steps": 96, "judge_after_steps": 32},
        **{"patience": 3, "rewind_steps": 7, "skip_batches": 9, "max_rewinds": 1},
        **{"checkpoint_every_n_steps": 3, "dirpath": "a", "rewind_storage": "disk"},
        **{"rewind_memory_gb": 1.0, "rewind_lr_factor": 0.5, "save_batch": True},
        "repeat_after_steps": 5,
    },
    InstabilityReport: {
        **{"dirpath": "a", "filename": "b.html", "every_n_seconds": 3.0, "max_tensors": 5},
        **{"alert": "https://hooks.example/T0KEN", "log_artifact": False},
    },
    TensorCollector: {
        **{"include": ["re:a"], "collect": ["weights"], "reductions": ["norm"]},
        **{"every_n_steps": 3, "dirpath": "a", "log": True},
    },
    LossScaleMonitor: {
        **{"max_skip_rate": 0.5, "window_steps": 3, "calibration_steps": 1, "min_scale": 2.0},
        "repeat_after_steps": 5,
    },
    NonFiniteLocator: {
        **{"repeated": 5, "near_limit": 0.5, "check_gradients": False, "action": "stop"},
        **{"max_replays": 1, "save_batch": True, "repeat_after_steps": 5},
    },
    GradientUnderflowMonitor: {
        **{"warn_share": 0.02, "alarm_share": 0.5, "every_n_steps": 3, "baseline_samples": 3},
        "repeat_after_steps": 5,
    },
    AdamStateMonitor: {
        **{
            "max_update_rms": 3.0,
            "max_below_epsilon": 0.5,
            "zero_run_steps": 5,
            "min_ratio": 0.1,
            "max_stagnant": 0.3,
        },
        **{"max_ratio": 5.0, "every_n_steps": 3, "baseline_samples": 3, "repeat_after_steps": 5},
    },
    ActivationRangeMonitor: {
        **{"modules": ["a"], "backward": True, "min_headroom_bits": 3.0, "calls_per_step": 2},
        **{"max_attention_logit": 5.0, "every_n_steps": 3, "baseline_samples": 3},
        "repeat_after_steps": 5,
    },
}


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__name__)
def test_every_argument_changes_the_key(kind: type[InstabilityMonitor]) -> None:
    others = OTHERS[kind]
    assert set(others) == set(inspect.signature(kind).parameters)
    monitors = [kind(), *(kind(**{name: value}) for name, value in others.items())]
    assert len({monitor.state_key for monitor in monitors}) == len(others) + 1
    pl.Trainer(accelerator="cpu", logger=False, callbacks=[monitors[0], monitors[-1]])
    assert not any("T0KEN" in monitor.state_key for monitor in monitors)
    assert [kind(**others).state_key for _ in range(2)] == [kind(**others).state_key] * 2


def _tell(url: str, alarm: Alarm) -> None:
    """An alert."""


def alerts() -> list[Any]:
    """Return different receivers of alarms, some of which look alike."""
    told: list[list[Alarm]] = [[], []]
    urls = [f"https://hooks.example/{token}" for token in ("T0KEN", "OTHER")]
    partials = [functools.partial(_tell, url) for url in urls]
    lambdas = [lambda alarm, url=url: _tell(url, alarm) for url in urls]
    return [*urls, *partials, *lambdas, *(each.append for each in told), print, None]


def test_reports_with_different_alerts_have_separate_states(tmp_path: Path) -> None:
    def run(**options: Any) -> tuple[list[str], list[int]]:
        reports = [InstabilityReport(dirpath=str(tmp_path / "a"), alert=each) for each in alerts()]
        trainer = watch(Watched(steps=3), reports, **options)
        trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
        return [report.state_key for report in reports], [len(r._starts) for r in reports]

    keys, _ = run()
    assert len(set(keys)) == len(keys) == 10
    assert not any("T0KEN" in key or "0x" in key for key in keys)
    assert b"T0KEN" not in (tmp_path / "last.ckpt").read_bytes()
    again, starts = run(max_epochs=2, ckpt_path=str(tmp_path / "last.ckpt"))
    assert again == keys
    assert starts == [2] * 10


class ByPlace(InstabilityMonitor):
    """Has no attributes with the names of its arguments."""

    def __init__(self, limit: float = 3.0, *names: str, **rest: Any) -> None:
        super().__init__()
        self.given = (limit, names, rest)


def test_key_of_a_users_monitor_depends_on_all_arguments() -> None:
    made = [ByPlace(), ByPlace(4.0), ByPlace(4.0, "a"), ByPlace(4.0, "a", most=1), ByPlace(most=1)]
    keys = [monitor.state_key for monitor in [*made, ByPlace(torch.zeros(3))]]  # type: ignore[arg-type]
    assert len(set(keys)) == 6
    assert keys[0] == "ByPlace"
    assert re.fullmatch(r"ByPlace with [0-9a-f]{12}", keys[1])
    assert ByPlace(4.0, "a", most=1).state_key == keys[3]
    assert ByPlace(3.0).state_key == ByPlace(limit=3).state_key == "ByPlace"
    assert (
        str(inspect.signature(ByPlace)) == "(limit: float = 3.0, *names: str, **rest: Any) -> None"
    )


class Posts(InstabilityMonitor):
    """Stores a URL in an attribute."""

    def __init__(self, *, url: str = "", limit: float = 1.0) -> None:
        super().__init__()
        self.url, self.limit = url, limit


def test_key_of_a_users_monitor_shows_no_url() -> None:
    made = [Posts(url=f"https://hooks.example/{token}", limit=2.0) for token in ("T0KEN", "OTHER")]
    keys = [monitor.state_key for monitor in made]
    assert keys[0] != keys[1]
    assert all(re.fullmatch(r"Posts\{'limit': 2.0\} with [0-9a-f]{12}", key) for key in keys)
    assert Posts(limit=2.0).state_key == "Posts{'limit': 2.0}"


# Keys of version 0.1.0 for these arguments, for which it had no attributes.
OLDER: dict[str, tuple[Any, str]] = {
    "guard": (
        lambda: SpikeGuard(**SHORT, patience=3, skip_batches=9, dirpath="a"),
        "SpikeGuard{'window_steps': 16, 'judge_after_steps': 8, 'patience': 3}",
    ),
    "report": (
        lambda: InstabilityReport(max_tensors=9, alert="https://hooks.example/T0KEN"),
        "InstabilityReport{'max_tensors': 9}",
    ),
    "plain": (lambda: SpikeGuard(rewind_steps=5), "SpikeGuard"),
}


@pytest.mark.slow
@pytest.mark.parametrize("names", [["guard"], ["report"], ["plain"], ["guard", "plain", "report"]])
def test_state_of_an_earlier_version_is_found_by_its_key(tmp_path: Path, names: list[str]) -> None:
    path = tmp_path / "last.ckpt"
    options = {"default_root_dir": tmp_path, "max_epochs": 1}
    saved = [OLDER[name][0]() for name in names]
    fit(PlantedModel(), make_batches(20), *saved, **options).save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=False)
    states = checkpoint["callbacks"]
    for monitor, name in zip(saved, names, strict=True):
        assert monitor.state_key != OLDER[name][1]
        states[OLDER[name][1]] = states.pop(monitor.state_key)
    torch.save(checkpoint, path)
    again = [OLDER[name][0]() for name in names]
    fit(PlantedModel(), make_batches(20), *again, **options, ckpt_path=path)
    for ours, theirs in zip(again, saved, strict=True):
        assert ours.history.curves["loss"] == theirs.history.curves["loss"]
        assert len(ours.history.curves["loss"]) == 20


@pytest.mark.slow
def test_guards_with_different_arguments_resume_from_their_own_states(tmp_path: Path) -> None:
    def guards() -> list[SpikeGuard]:
        return [SpikeGuard(**SHORT), SpikeGuard(window_steps=24, judge_after_steps=8)]

    first = guards()
    trainer = fit(PlantedModel({SPIKE: "explosion"}), make_batches(40), *first)
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    saved = [guard.state_dict() for guard in first]
    assert [kinds(guard) for guard in first] == [[(SPIKE, "loss_spike")]] * 2
    again = guards()
    options = {"max_epochs": 1, "ckpt_path": tmp_path / "last.ckpt"}
    fit(PlantedModel(), make_batches(40), *again, **options)  # training has ended: only restores
    windows = []
    for guard, state in zip(again, saved, strict=True):
        assert guard.state_dict()["history"] == state["history"]
        windows.append(guard.state_dict()["windows"][0]["values"])
        assert torch.equal(windows[-1], state["windows"][0]["values"])
    assert [window.shape[1] for window in windows] == [16, 24]


@pytest.mark.slow
def test_guard_with_a_changed_argument_resumes_from_its_state(tmp_path: Path) -> None:
    trainer = fit(PlantedModel({SPIKE: "spike"}), make_batches(40), SpikeGuard(**SHORT))
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    options = {"max_epochs": 1, "ckpt_path": tmp_path / "last.ckpt"}
    changed = SpikeGuard(**SHORT, z_threshold=8.0)
    fit(PlantedModel(), make_batches(40), changed, **options)
    assert kinds(changed) == [(SPIKE, "loss_spike")]
    hidden = SpikeGuard(**SHORT, skip_batches=9)  # an argument without an attribute
    trainer = fit(PlantedModel({SPIKE: "spike"}), make_batches(40), hidden)
    trainer.save_checkpoint(tmp_path / "hidden.ckpt", weights_only=False)
    changed = SpikeGuard(**SHORT, patience=8, skip_batches=11)
    other = {"max_epochs": 1, "ckpt_path": tmp_path / "hidden.ckpt"}
    fit(PlantedModel(), make_batches(40), changed, **other)
    assert kinds(changed) == [(SPIKE, "loss_spike")]
    # The states cannot be assigned to two changed guards, so both start without a state.
    pair = [SpikeGuard(**SHORT, z_threshold=z) for z in (8.0, 9.0)]
    fit(PlantedModel(), make_batches(40), *pair, **options)
    assert [kinds(guard) for guard in pair] == [[], []]


def test_equal_acting_guards_raise_an_error() -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `SpikeGuard`"):
        fit(PlantedModel(), make_batches(1), SpikeGuard(), SpikeGuard())


@pytest.mark.parametrize(
    "actions", [("skip", "warn"), ("skip", "rewind"), ("rewind", "stop"), ("warn", "skip", "stop")]
)
def test_acting_guard_before_another_guard_raises_an_error(actions: tuple[Any, ...]) -> None:
    passed = r", ".join(rf"SpikeGuard\(action='{action}'\)" for action in actions)
    with pytest.raises(MisconfigurationException, match=passed + r".*Pass `action='warn'`"):
        fit(PlantedModel(), make_batches(1), *[SpikeGuard(action=action) for action in actions])


@pytest.mark.slow
def test_guard_that_skips_may_follow_a_guard_that_warns() -> None:
    pair = [SpikeGuard(**SHORT), SpikeGuard(**SHORT, action="skip")]
    recorder = StepRecorder()
    fit(PlantedModel({SPIKE: "spike"}), make_batches(SPIKE + 5), *pair, recorder)
    assert [kinds(guard) for guard in pair] == [[(SPIKE, "loss_spike")]] * 2
    assert [step for step, moved in enumerate(recorder.moved) if not moved] == [SPIKE]


@pytest.mark.parametrize("name", ["second.html", "instability.html"])
def test_reports_write_to_separate_files(tmp_path: Path, name: str) -> None:
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
        assert data["run"]["monitors"] == []  # reports are not listed as monitors


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
