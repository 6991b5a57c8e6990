"""What a training step was, in numbers. Imports nothing."""

from dataclasses import dataclass

__all__ = ["StepFacts"]


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One step of one optimizer. While it is under way, what is not known yet is `None`.

    Args:
        step: Optimizer steps tried before, the axis of Lightning's loggers.
        global_step: Optimizer steps completed before.
        epoch: Counted from 0.
        batch_idx: The batch of the epoch; of several accumulated ones the last.
        rank: The rank whose loss was the highest (NaN counts as highest) where ranks exchange them,
            with shards the one with the largest gradient; else this one.
        optimizer: Its index.
        optimizer_name: Its class.
        lr: The learning rate of its first group.
        highest_lr: The highest one of this optimizer so far.
        loss: Unscaled; the mean of micro-batches, and of ranks where they exchange it. In manual
            optimization the sum of what was backpropagated since the last step.
        gradient_norm: Of all its unscaled gradients, before clipping.
        largest_gradient: The parameter with the largest gradient norm.
        largest_gradient_norm: That norm.
        loss_scale: What the step was made with; `None` without one.
        next_loss_scale: What the scaler made of it.
        skipped: Whether the loss scaler or the precision plugin skipped the step.
    """

    step: int
    global_step: int
    epoch: int
    batch_idx: int
    rank: int
    optimizer: int = 0
    optimizer_name: str = ""
    lr: float | None = None
    highest_lr: float | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    largest_gradient: str | None = None
    largest_gradient_norm: float | None = None
    loss_scale: float | None = None
    next_loss_scale: float | None = None
    skipped: bool | None = None

    @property
    def is_rate_ending(self) -> bool:
        """Whether a schedule has lowered the learning rate to less than a tenth."""
        return (
            self.lr is not None and self.highest_lr is not None and self.lr < 0.1 * self.highest_lr
        )
