"""What a training step was, in numbers. Imports nothing."""

from dataclasses import dataclass

__all__ = ["StepFacts"]


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One step of one optimizer. While it is under way, what is not known yet is `None`.

    The rank is the one to look at: whose loss was the highest (NaN counts as highest) where ranks
    exchange them, with shards the one with the largest gradient; else this one. The loss is
    unscaled, the mean of micro-batches, and of ranks where they exchange it; in manual optimization
    the sum of what was backpropagated since the last step.
    """

    step: int  # optimizer steps tried before, the axis of Lightning's loggers
    global_step: int  # optimizer steps completed before
    epoch: int  # counted from 0
    batch_idx: int  # the batch of the epoch; of several accumulated ones the last
    rank: int
    optimizer: int = 0
    optimizer_name: str = ""
    lr: float | None = None  # of its first group
    highest_lr: float | None = None  # of this optimizer so far
    loss: float | None = None
    gradient_norm: float | None = None  # of all its unscaled gradients, before clipping
    largest_gradient: str | None = None  # the parameter with the largest gradient norm
    largest_gradient_norm: float | None = None
    loss_scale: float | None = None  # what the step was made with; `None` without one
    next_loss_scale: float | None = None  # what the scaler made of it
    skipped: bool | None = None  # by the loss scaler or the precision plugin

    @property
    def is_rate_ending(self) -> bool:
        """Whether a schedule has lowered the learning rate to less than a tenth."""
        lr, highest = self.lr, self.highest_lr
        return lr is not None and highest is not None and lr < 0.1 * highest
