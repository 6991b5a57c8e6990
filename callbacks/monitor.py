"""Base class of all monitors: alarms, their history, warnings, and metrics for loggers."""

import copy
import dataclasses
import functools
import hashlib
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_mp._arguments import explains_arguments, keeps_arguments
from lightning_mp._foreign import check_trainer
from lightning_mp.callbacks._rules.records import (
    Alarm,
    History,
    Learning,
    Sample,
    Severity,
    StepFacts,
    Verdict,
)
from lightning_mp.callbacks._step.recorder import (
    FactsRecorder,
    facts_of,
    never_raising,
    recorder_of,
)
from lightning_mp.callbacks._step.training_state import (
    Moment,
    TrainingStep,
    numbers_of,
    step_of,
    tags_of,
)
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.callbacks._words.wording import words_for

__all__ = ["Alarm", "History", "InstabilityError", "InstabilityMonitor", "InstabilityWarning"]

# Alarms that follow once `NonFiniteLocator` has named the module, weight or batch at fault.
_FOLLOWS = frozenset(
    f"{what}_non_finite" for what in ("activation", "output_gradient", "buffer", "optimizer_state")
) | {"non_finite_loss", "non_finite_gradient", "non_finite_run"}
_WITH = " with "  # precedes the digest of arguments in a key


@functools.cache  # Lightning reads the key of a monitor many times before `setup`
def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of the keyword-only arguments of a function."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def _clipping(trainer: pl.Trainer) -> dict[str, str]:
    """Return the words around `gradient_clip_val` in a remedy."""
    # Lightning refuses a `gradient_clip_val` of the Trainer in manual optimization.
    is_manual = not trainer.lightning_module.automatic_optimization
    is_by_value = trainer.gradient_clip_algorithm == "value"
    return {
        "clipper": "self.clip_gradients(optimizer, " if is_manual else "Trainer(",
        "by_norm": ", gradient_clip_algorithm='norm'" if is_by_value else "",
    }


class InstabilityWarning(UserWarning):
    """A monitor's alarm. `warnings.filterwarnings("error", category=...)` makes it stop a run."""


class InstabilityError(FloatingPointError):
    """Ends training before a step that would do harm; raised by monitors with `action="raise"`.

    Args:
        alarm: The alarm that was raised.
    """

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(alarm)  # not the message: exceptions are pickled by their arguments
        self.alarm = alarm

    def __str__(self) -> str:
        """Return the message of the alarm."""
        return self.alarm.message


@explains_arguments(checks={"repeat_after_steps": "[1, inf)"})
class InstabilityMonitor(Learning, pl.Callback):
    """Raises alarms: as warnings, as metrics `instability/<kind>`, and in `history`.

    An alarm of the same kind about the same tensor is raised again after `repeat_after_steps` steps
    at the earliest.

    A Trainer may have several monitors of one class with different arguments. Each has its own
    state in checkpoints; their metrics have the same names.

    Args:
        repeat_after_steps: Steps until the same alarm may be raised again.
    """

    needs_gradient_norm = False  # whether facts of every step contain the gradient norm
    moment: Moment = "before step"  # when to observe: "before step" or "batch end"
    every_step = False  # whether `judge` is also called for steps without an observation
    samples = 0  # observations so far
    save_batch = False  # whether to save the batches of steps with an alarm of any monitor
    keeps: tuple[str, ...] = ()  # attributes that are saved in checkpoints, besides rules
    _arguments: Mapping[str, Any] = {}  # arguments that differ from their defaults
    _key = ""  # key of the state in checkpoints, once there is a Trainer

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            cls.__init__ = keeps_arguments(cls.__init__)  # type: ignore[method-assign]
        if "on_exception" in vars(cls):
            cls.on_exception = never_raising(cls.on_exception)  # type: ignore[method-assign]

    def __init__(self, *, repeat_after_steps: int = 1000) -> None:
        self.repeat_after_steps = repeat_after_steps
        self.history = History()
        self._raised: dict[tuple[str, str | None], int] = {}  # step of the last alarm
        self.recorder = FactsRecorder()  # the Trainer's recorder, once there is a Trainer
        self._fresh: dict[str, Any] | None = None  # the state before the first run

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_trainer(trainer, self)
        peers = self._peers(trainer)
        self._settle_key(peers)
        # A monitor that skips a step hides it from monitors after it, so only the last one may.
        if any(getattr(peer, "action", None) in ("skip", "rewind") for peer in peers[:-1]):
            passed = ", ".join(f"{type(peer).__name__}(action={peer.action!r})" for peer in peers)
            raise MisconfigurationException(usage("peers", peers=passed))
        if stage == "fit":
            self.recorder = recorder_of(trainer)
            # State from a checkpoint is loaded after this.
            self.history.forget_from(step_of(trainer))
            if self._fresh is None:
                self._fresh = copy.deepcopy(self.state_dict())
            elif step_of(trainer) == 0:  # the state is that of an earlier run
                self.load_state_dict(self._fresh)

    def observe(self, step: TrainingStep) -> Tensor | None:
        """Return measurements of a step as a tensor on the device, without a host sync."""
        return None

    def judge(self, sample: Sample) -> Iterable[Verdict]:
        """Return verdicts on an observation; called on the host, one or two steps later."""
        return []

    def _before_error(self) -> None:
        """Called on all ranks before a monitor raises an error on the current step."""

    @property
    def alarms(self) -> list[Alarm]:
        """The alarms raised so far, oldest first."""
        return self.history.alarms

    def alarm(
        self,
        trainer: pl.Trainer,
        kind: str,
        message: str,
        remedy: str,
        *,
        facts: StepFacts | None = None,
        severity: Severity = "warning",
        tensor: str | None = None,
        value: float | None = None,
        threshold: float | None = None,
    ) -> Alarm | None:
        """Raise an alarm; return `None` if the same alarm was raised recently.

        The arguments are the fields of `Alarm`. `facts` belong to the step of the alarm; the
        default is the current step. Severity `"info"` is recorded without a warning.
        """
        verdict = Verdict(kind, value, threshold, severity, tensor, words=(message, remedy))
        return self.say(trainer, verdict, facts)

    def say(
        self, trainer: pl.Trainer, verdict: Verdict, facts: StepFacts | None = None
    ) -> Alarm | None:
        """Raise the alarm of a verdict; see `alarm`."""
        facts = facts or self.recorder.now or facts_of(trainer)
        if verdict.rank is not None:
            facts = dataclasses.replace(facts, rank=verdict.rank)
        # A step before that of the last alarm belongs to another run, in which the alarm is new.
        key, is_note = (verdict.kind, verdict.tensor), verdict.severity == "info"
        last = self._raised.get(key)
        if last is not None and 0 <= facts.step - last < self.repeat_after_steps and not is_note:
            return None
        self._raised[key] = facts.step
        cause = self.recorder.located
        if cause is not None and verdict.kind in _FOLLOWS and cause.step <= facts.step:
            verdict = verdict.given(located=cause.tensor, located_step=cause.step)
            verdict = dataclasses.replace(verdict, remedies=("follows",), severity="info")
            is_note = True
        fields = numbers_of(trainer, facts) | _clipping(trainer)
        message, remedy = words_for(verdict, tags_of(trainer, facts), **fields)
        keeper = None if is_note else self.recorder.batches
        alarm = Alarm(
            step=facts.step,
            epoch=facts.epoch,
            batch_idx=facts.batch_idx,
            rank=facts.rank,
            monitor=type(self).__name__,
            kind=verdict.kind,
            severity=verdict.severity,
            tensor=verdict.tensor,
            # numpy numbers in a checkpoint would be arbitrary objects.
            value=None if verdict.value is None else float(verdict.value),
            threshold=None if verdict.threshold is None else float(verdict.threshold),
            message=message,
            remedy=remedy,
            batch_path=None if keeper is None else keeper.save(trainer, facts),
        )
        saved = usage("batch_saved", path=alarm.batch_path) if alarm.batch_path else ""
        text = " ".join(filter(None, (f"{alarm.place}:", message, remedy, saved)))
        alarm = dataclasses.replace(alarm, message=text)
        self.history.add_alarm(alarm)
        if alarm.kind == "non_finite" and alarm.tensor is not None:
            self.recorder.located = alarm
        if not is_note:
            rank_zero_warn(alarm.message, category=InstabilityWarning)
        # Loggers plot nothing for NaN; 1 marks the step.
        value = 1.0 if alarm.value is None or not math.isfinite(alarm.value) else alarm.value
        self.log_metrics(trainer, {f"instability/{alarm.kind}": value}, facts.step)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, InstabilityMonitor):
                callback.on_alarm(trainer, alarm)
        return alarm

    def on_alarm(self, trainer: pl.Trainer, alarm: Alarm) -> None:
        """Called for every alarm of any monitor of the Trainer, on the rank that raises it."""

    def record(self, metrics: Mapping[str, float], facts: StepFacts, every: int = 1) -> None:
        """Add the finite numbers of a step to the curves; names of optimizer 1 end in `_1`.

        Every `every` steps, loggers receive the numbers as `instability/<name>`; 0 means never.
        """
        suffix = f"_{facts.optimizer}" if facts.optimizer else ""
        finite = {f"{k}{suffix}": v for k, v in metrics.items() if math.isfinite(v)}
        for name, value in finite.items():
            self.history.add_point(name, facts.step, value)
        # Like Lightning's loggers, log the last one of every 50 steps.
        if finite and every and (facts.step + 1) % every == 0:
            named = {f"instability/{name}": value for name, value in finite.items()}
            self.log_metrics(self.recorder.trainer, named, facts.step)

    def log_metrics(self, trainer: pl.Trainer, metrics: dict[str, Any], step: int) -> None:
        """Send numbers to every logger with the step of their measurement.

        With `Trainer(log_every_n_steps=0)` nothing is sent, as in Lightning itself.
        """
        if trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            return
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    @property
    @override
    def state_key(self) -> str:
        """The key of the monitor's state in checkpoints; it depends on the arguments.

        Only arguments that differ from their defaults enter the key, so that a new argument does
        not change it. URLs, and arguments without an attribute of their name, enter as a digest.
        """
        # Without a Trainer, the key distinguishes objects by their addresses.
        return self._key or self._make_key(str)

    def _make_key(self, stable: Callable[[str], str]) -> str:
        defaults: dict[str, Any] = {}
        for base in reversed(type(self).__mro__):  # a subclass may have defaults of its own
            defaults |= _defaults(base.__init__)  # type: ignore[misc]
        # Lightning sets two of its own methods as attributes.
        names = [name for name in defaults if name not in ("log", "log_dict")]
        kept = {name: getattr(self, name) for name in names if hasattr(self, name)}
        shown = {name: value for name, value in kept.items() if "://" not in repr(value)}
        changed = {name: value for name, value in shown.items() if value != defaults[name]}
        key = stable(self._generate_state_key(**changed) if changed else type(self).__qualname__)
        rest = {name: value for name, value in self._arguments.items() if name not in shown}
        digest = hashlib.sha256(stable(repr(rest)).encode()).hexdigest()[:12]
        return f"{key}{_WITH}{digest}" if rest else key

    def _settle_key(self, peers: list[Any]) -> None:
        """Choose a key that is the same in every process; number equal monitors."""
        key = self._make_key(lambda text: re.sub(r" at 0x[0-9a-fA-F]+", "", text))
        keys = itertools.chain([key], (f"{key} #{number}" for number in itertools.count(2)))
        taken = {peer._key for peer in peers if peer is not self}
        self._key = self._key or next(each for each in keys if each not in taken)

    def _peers(self, trainer: pl.Trainer) -> list[Any]:
        return [c for c in trainer.callbacks if type(c) is type(self)]  # type: ignore[attr-defined]

    @override
    def on_load_checkpoint(self, trainer: pl.Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        # Lightning has loaded a state under exactly this key, if there is one. Otherwise load the
        # state under the key of earlier versions, which had no digest. If an argument has changed,
        # load the only unclaimed state of the class, unless another monitor also lacks a state.
        states, peers = checkpoint.get("callbacks", {}), self._peers(trainer)
        claimed, name = {peer.state_key for peer in peers}, type(self).__qualname__
        free = [k for k in states if k not in claimed and re.split("[{ ]", str(k))[0] == name]
        lost = {p: p.state_key.partition(_WITH)[0] for p in peers if p.state_key not in states}
        found = [k for k in free if lost.get(self) == k and [*lost.values()].count(k) == 1]
        if found or ([*lost] == [self] and len(free) == 1):
            # A copy, because other callbacks read the same checkpoint.
            self.load_state_dict(copy.deepcopy(states[(found or free)[0]]))

    @override
    def learnt(self) -> Iterable[str]:
        return self.keeps

    def _rules(self) -> dict[str, Learning]:
        return {name: each for name, each in vars(self).items() if isinstance(each, Learning)}

    @override
    def state_dict(self) -> dict[str, Any]:
        if self.recorder.trainer is not None:
            self.recorder.catch_up()
        located = self.recorder.located
        return {
            "history": self.history.to_dict(),
            "raised": [[*key, step] for key, step in self._raised.items()],
            "highest_rates": [list(pair) for pair in self.recorder.highest_rates.items()],
            "located": None if located is None else dataclasses.asdict(located),
            **super().state_dict(),
            **{name: rule.state_dict() for name, rule in self._rules().items()},
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.history = History.from_dict(state_dict["history"])
        self.recorder.highest_rates = dict(state_dict.get("highest_rates", {}))
        located = state_dict.get("located")
        self.recorder.located = None if located is None else Alarm(**located)
        self._raised = {(kind, tensor): step for kind, tensor, step in state_dict["raised"]}
        # Checkpoints of 0.1 store the state of rules among the attributes of the monitor.
        flat = {name: value for name, value in state_dict.items() if name != "samples"}
        for name, rule in self._rules().items():
            rule.load_state_dict(state_dict.get(name, flat))
