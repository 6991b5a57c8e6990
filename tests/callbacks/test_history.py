"""A `History` is bounded, evenly thinned, and restored from checkpoints."""

import copy
import dataclasses
import io
import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_mp.callbacks import Alarm, InstabilityMonitor, InstabilityWarning, SpikeGuard
from lightning_mp.callbacks.monitor import History
from tests.callbacks.models import Watched, watch


def alarm(step: int) -> Alarm:
    return Alarm(
        step=step, monitor="M", kind="k", severity="warning", message="m", remedy="r", value=1.0
    )


def test_long_curves_are_thinned_evenly_and_keep_their_first_point() -> None:
    history = History()
    for step in range(50_000):
        history.add_point("loss", step, step / 2)
    points = history.curves["loss"]
    assert 2048 <= len(points) <= 4096
    assert points[0] == (0, 0.0)
    gaps = {later[0] - earlier[0] for earlier, later in zip(points, points[1:], strict=False)}
    assert gaps == {16}
    assert points[-1][0] > 49_900
    assert all(value == step / 2 for step, value in points)


def test_heat_maps_accept_new_tensors_in_later_columns() -> None:
    history = History()
    history.add_column("share", 0, {"a": 0.1, "b": 0.2})
    history.add_column("share", 5, {"c": 0.3, "a": 0.4})
    heat = history.maps["share"]
    assert heat["names"] == ["a", "b", "c"]
    (first, second) = heat["columns"]
    assert first == (0, [0.1, 0.2])
    assert second[0] == 5
    assert second[1][0] == 0.4
    assert second[1][2] == 0.3
    assert math.isnan(second[1][1])
    for step in range(2000):
        history.add_column("share", step, {"a": 0.0})
    assert 128 <= len(heat["columns"]) <= 256


def test_two_optimizers_share_the_column_of_a_step() -> None:
    history = History()
    for step in range(600):
        history.add_column("m", step, {"a": step})
        history.add_column("m", step, {"b": -step})
    heat = history.maps["m"]
    assert heat["names"] == ["a", "b"]
    assert 128 <= len(heat["columns"]) <= 256
    assert all(column == [step, -step] for step, column in heat["columns"])


def test_steps_that_a_resumed_run_repeats_are_dropped() -> None:
    history = History()
    for step in (0, 5, 9):
        history.add_point("norm", step, float(step))
        history.add_column("m", step, {"a": float(step)})
    history.forget_from(5)
    assert history.curves["norm"] == [(0, 0.0)]
    history.add_point("norm", 5, 7.0)
    history.add_column("m", 9, {"a": 8.0})  # not merged with the dropped column
    assert history.curves["norm"] == [(0, 0.0), (5, 7.0)]
    assert history.maps["m"]["columns"] == [(0, [0.0]), (9, [8.0])]


@pytest.mark.slow
def test_monitor_used_for_a_second_run_forgets_the_first() -> None:
    monitor = SpikeGuard()
    for steps in (9, 4):
        watch(Watched(steps=steps), [monitor])
        assert [step for step, _ in monitor.history.curves["loss"]] == list(range(steps))


def test_first_and_latest_of_many_alarms_are_kept() -> None:
    history = History()
    for step in range(2500):
        history.add_alarm(alarm(step))
    steps = [a.step for a in history.alarms]
    assert len(steps) == 2000
    assert steps[:1000] == list(range(1000))
    assert steps[-1] == 2499


def through_checkpoint(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_history_continues_from_a_checkpoint() -> None:
    whole, half = History(), History()
    for step in range(6000):
        whole.add_point("x", step, step)
        whole.add_column("m", step, {"a": step})
        if step == 3500:
            whole.add_alarm(alarm(step))
            half = History.from_dict(through_checkpoint(whole.to_dict()))
        elif step > 3500:
            half.add_point("x", step, step)
            half.add_column("m", step, {"a": step})
    assert half == whole


def test_state_of_a_history_does_not_change_with_it() -> None:
    history = History()
    for step in range(6000):
        history.add_point("x", step, step)
        history.add_column("m", step, {"a": step})
        history.add_column("m", step, {"b": -step})
        if step in (3500, 3501):  # the last column may grow
            state, then = history.to_dict(), copy.deepcopy(dataclasses.asdict(history))
            assert state == then
    assert state == then


class _Says(InstabilityMonitor):
    """Raises the same alarm in every step."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.alarm(trainer, "odd", "It is odd.", "Make it even.", value=math.nan, tensor="t")
        self.alarm(trainer, "done", "Nothing.", "", severity="info")


def test_alarm_repeats_after_the_given_steps_and_a_note_does_not_warn() -> None:
    monitor = _Says(repeat_after_steps=4)
    with pytest.warns(InstabilityWarning) as caught:
        watch(Watched(steps=10), [monitor])
    texts = [str(w.message) for w in caught if w.category is InstabilityWarning]
    assert texts == [
        f"Step {step}, epoch 0, batch {step}, rank 0: It is odd. Make it even."
        for step in (0, 4, 8)
    ]
    assert len([a for a in monitor.alarms if a.kind == "done"]) == 10
    again = _Says(repeat_after_steps=4)
    again.load_state_dict(through_checkpoint(monitor.state_dict()))
    assert repr(again.state_dict()) == repr(monitor.state_dict())  # NaN is not equal to itself


@pytest.mark.parametrize("value", [0, 1.5, True])
def test_repeat_after_zero_steps_raises_an_error(value: object) -> None:
    with pytest.raises(ValueError, match="repeat_after_steps"):
        InstabilityMonitor(repeat_after_steps=value)  # type: ignore[arg-type]
