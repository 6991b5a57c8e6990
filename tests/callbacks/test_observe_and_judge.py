"""A monitor observes a step on the device and judges it on the host with the facts of the step."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mp.callbacks import (
    ActivationRangeMonitor,
    AdamStateMonitor,
    InstabilityMonitor,
    RepresentationMonitor,
    SpikeGuard,
    TensorCollector,
)
from lightning_mp.callbacks._rules.records import Learning, Sample, Verdict
from lightning_mp.callbacks._step.training_state import TrainingStep
from lightning_mp.numerics.async_readback import AsyncReadback
from tests.callbacks.models import Watched, watch

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_mp.callbacks.InstabilityWarning",
    "ignore:Be aware that when using `ckpt_path`",
)


class Norms(InstabilityMonitor):
    """Sends the norm of the weights of every second step, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, list[float], str]] = []
        self.sent: list[list[float]] = []

    def observe(self, step: TrainingStep) -> Tensor | None:
        if step.facts.step % 2:
            return None
        norm = torch.stack([p.detach().double().norm() for p in step.found.parameters])
        self.sent.append(norm.tolist())
        return step.gather(norm, names=step.found.names)

    def judge(self, sample: Sample) -> list[Verdict]:
        facts, name = sample.facts, sample.context["names"][0]
        self.seen.append((facts.step, sample.array[0].tolist(), name))
        assert facts.loss is not None
        words = ("It is seen.", "Look.")
        return [Verdict("seen", float(sample.array[0, 0]), tensor=name, words=words)]


def test_samples_arrive_unrounded_with_the_facts_of_their_step() -> None:
    monitor = Norms()
    watch(Watched(steps=7), [monitor, SpikeGuard(), AdamStateMonitor(every_n_steps=1)])
    assert [step for step, *_ in monitor.seen] == [0, 2, 4, 6]
    assert [norms for _, norms, _ in monitor.seen] == monitor.sent
    assert monitor.samples == 4
    assert [(a.step, a.kind, a.tensor) for a in monitor.alarms] == [(0, "seen", "network.0.weight")]


def test_pending_samples_are_judged_when_training_ends_or_fails(monkeypatch: Any) -> None:
    monkeypatch.setattr(AsyncReadback, "drain", AsyncReadback.ready)
    monkeypatch.setattr(AsyncReadback, "ready", lambda self: [])

    def fail(module: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            raise RuntimeError("no memory")

    ended, failed = Norms(), Norms()
    watch(Watched(steps=6), [ended])
    with pytest.raises(RuntimeError, match="no memory"):
        watch(Watched(steps=6, sabotage=fail), [failed])
    assert [step for step, *_ in ended.seen] == [step for step, *_ in failed.seen] == [0, 2, 4]


def test_no_hook_survives_a_failure_or_the_batch_of_a_retained_graph(tmp_path: Path) -> None:
    def of_all(module: Any) -> list[Any]:
        parts = [*module.modules(), *module.trainer.optimizers]
        return [v for part in parts for k, v in vars(part).items() if k.endswith("_hooks") and v]

    class Retaining(Watched):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                assert of_all(self)  # the hooks of a sampled step
                raise RuntimeError("no memory")
            loss = super().training_step(batch, batch_idx)
            self.last = (self.network[0].weight * 1.0).sum() + loss  # type: ignore[operator]
            return loss

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward(retain_graph=True)

        def on_train_batch_end(self, *_: Any) -> None:
            before = len(ranges.recorder._pending), ranges.samples
            self.last.backward()
            assert not ranges._sampler._waiting  # its gradients arrive after the sampled step
            assert (len(ranges.recorder._pending), ranges.samples) == before

    ranges = ActivationRangeMonitor(backward=True, every_n_steps=1)
    outputs = TensorCollector(collect=["outputs"], every_n_steps=1, dirpath=str(tmp_path / "t"))
    guard = SpikeGuard(action="skip", judge_after_steps=2)
    features = RepresentationMonitor(modules=["network"], every_n_steps=1)
    model = Retaining(steps=4, make_optimizer=lambda p: torch.optim.AdamW(p, fused=True))
    with pytest.raises(RuntimeError, match="no memory"):
        watch(model, [ranges, outputs, guard, features])
    assert guard._skipper._seen  # it has registered hooks on the optimizer
    assert not of_all(model)


@dataclass(eq=False)
class Counts(Learning):
    """Counts its values."""

    by: int
    _count: int = field(default=0, init=False)

    def add(self) -> None:
        self._count += self.by


class TwoRules(InstabilityMonitor):
    """Holds two rules of one class."""

    every_step = True

    def __init__(self) -> None:
        super().__init__()
        self._fast, self._slow = Counts(10), Counts(1)

    def judge(self, sample: Sample) -> list[Verdict]:
        self._fast.add()
        self._slow.add()
        return []


def test_two_rules_of_one_class_have_separate_states() -> None:
    before, after = TwoRules(), TwoRules()
    watch(Watched(steps=3), [before])
    state = before.state_dict()
    assert (state["_fast"], state["_slow"]) == ({"count": 30}, {"count": 3})
    after.load_state_dict(state)
    assert (after._fast._count, after._slow._count) == (30, 3)


def test_rule_states_of_a_checkpoint_of_0_1_are_loaded() -> None:
    before, after = AdamStateMonitor(every_n_steps=1), AdamStateMonitor(every_n_steps=1)
    watch(Watched(steps=9), [before])
    state = before.state_dict()
    assert state["_rule"]["usual"]
    after.load_state_dict({**{k: v for k, v in state.items() if k != "_rule"}, **state["_rule"]})
    assert after._rule.state_dict() == before._rule.state_dict()
