"""What all monitors share: alarms, their history, and how they reach people and loggers."""

import math
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp._foreign import check_trainer
from lightning_mp.callbacks._step.training_state import step_of
from lightning_mp.callbacks.history import Alarm, History
from lightning_mp.callbacks.side_by_side import check_peers, state_for, state_key_of

__all__ = ["InstabilityMonitor", "InstabilityWarning"]


class InstabilityWarning(UserWarning):
    """A monitor's alarm. `warnings.filterwarnings("error", category=...)` makes it stop a run."""


@explains_arguments()
class InstabilityMonitor(pl.Callback):
    """Raises alarms: as warnings, as metrics `instability/<kind>`, and in `history`.

    An alarm of one kind about one tensor is repeated after `repeat_after_steps` steps at the
    earliest, so that a long run is not buried in one sentence.

    Monitors of one class with different arguments can stand side by side, each with a state of its
    own in checkpoints. Their metrics have the same names.

    Args:
        repeat_after_steps: Steps until the same alarm may be raised again.
    """

    def __init__(self, *, repeat_after_steps: int = 1000) -> None:
        self._check_at_least(1, repeat_after_steps=repeat_after_steps)
        self.repeat_after_steps = repeat_after_steps
        self.history = History()
        self._raised: dict[tuple[str, str | None], int] = {}  # the step of the last alarm
        self._state_key = ""

    def _check_at_least(self, least: int, **values: object) -> None:
        for name, value in values.items():
            if type(value) is not int or value < least:
                raise ValueError(
                    f"Passed `{type(self).__name__}({name}={value!r})`. `{name}` must be an "
                    f"integer of at least {least}. Leave it out for the default."
                )

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a Trainer of `pytorch_lightning`, and two monitors that act on one step."""
        check_trainer(trainer, self)
        check_peers(self, trainer)

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
        step: int | None = None,
        severity: Literal["info", "warning", "error"] = "warning",
        tensor: str | None = None,
        value: float | None = None,
        threshold: float | None = None,
    ) -> Alarm | None:
        """Raise an alarm, unless the same was raised a short while ago.

        Args:
            trainer: The trainer.
            kind: The rule that was broken.
            message: What was seen: tensor, number and threshold, with a full stop at its end.
            remedy: What to set, as a sentence.
            step: Where it happened; the step of now if `None`.
            severity: `"info"` for what was done; nothing is warned of.
            tensor: The parameter or module.
            value: What was measured.
            threshold: What it was held against.

        Returns:
            The alarm, `None` where it was held back.
        """
        step = step_of(trainer) if step is None else step
        last = self._raised.get((kind, tensor))
        if severity != "info" and last is not None and 0 <= step - last < self.repeat_after_steps:
            return None
        self._raised[kind, tensor] = step
        text = f"Step {step}: {message} {remedy}".strip()
        alarm = Alarm(
            step=step,
            monitor=type(self).__name__,
            kind=kind,
            severity=severity,
            message=text,
            remedy=remedy,
            tensor=tensor,
            value=value,
            threshold=threshold,
        )
        self.history.add_alarm(alarm)
        if severity != "info":
            rank_zero_warn(text, category=InstabilityWarning)
        is_plottable = value is not None and math.isfinite(value)
        self.log_metrics(trainer, {f"instability/{kind}": value if is_plottable else 1.0}, step)
        return alarm

    def log_metrics(self, trainer: pl.Trainer, metrics: dict[str, Any], step: int) -> None:
        """Send plain numbers to every logger, under the step that they come from."""
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    @property
    @override
    def state_key(self) -> str:
        """The key of its state in checkpoints."""
        # Lightning asks for it at every hook.
        self._state_key = self._state_key or state_key_of(self)
        return self._state_key

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on from the state of the same monitor with other arguments."""
        state = state_for(self, trainer, checkpoint)
        if state is not None:
            self.load_state_dict(state)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the alarms and curves so far, and when each alarm was raised last."""
        raised = [[kind, tensor, step] for (kind, tensor), step in self._raised.items()]
        return {"history": self.history.to_dict(), "raised": raised}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.history = History.from_dict(state_dict["history"])
        self._raised = {(kind, tensor): step for kind, tensor, step in state_dict["raised"]}
