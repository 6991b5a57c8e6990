"""Base class of monitors that measure tensors every N steps."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.callbacks._step.training_state import TrainingStep
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.callbacks.monitor import InstabilityMonitor
from lightning_mp.numerics.async_readback import send
from lightning_mp.numerics.tensor_stats import StatField, TensorStats, stored_numels, tensor_stats

__all__ = ["SamplingMonitor", "merge_ranks", "merge_rows", "pack_stats"]


@explains_arguments(checks={"every_n_steps baseline_samples": "[1, inf)"})
class SamplingMonitor(InstabilityMonitor):
    """Observes every N-th step, and more steps at the start."""

    keeps: tuple[str, ...] = ("samples",)
    _until = -1  # last step of additional samples
    _has_warned = False  # whether `warn_unmeasured` has warned

    def __init__(
        self, every_n_steps: int, baseline_samples: int = 10, repeat_after_steps: int = 1000
    ) -> None:
        super().__init__(repeat_after_steps=repeat_after_steps)
        self.every_n_steps = every_n_steps
        self.baseline_samples = baseline_samples

    def is_due(self, step: int) -> bool:
        """Return whether to observe a step."""
        # The first samples are the baseline of each tensor.
        is_early = self.samples < self.baseline_samples
        every = max(self.every_n_steps // 5, 1) if is_early else self.every_n_steps
        return step % every == 0 or step <= self._until

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._until = -1

    def warn_unmeasured(self, step: TrainingStep) -> None:
        """Warn once if a step was due, but no module was measured."""
        # Without gradients, `training_step` has skipped the batch.
        if self.is_due(step.facts.step) and step.found.gradients and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(usage("unmeasured", callback=type(self).__name__))

    def sample_again(self, step: int) -> None:
        """Ask for a second sample after a step, whose own sample arrives a step or two later."""
        self._until = step + 4


def pack_stats(
    tensors: Sequence[Tensor], *, scale: float | Tensor = 1.0, unscale: float | Tensor = 1.0
) -> Tensor:
    """Return `tensor_stats` with one more column: the number of stored values of each tensor."""
    stats_NK = tensor_stats(tensors, scale=scale, unscale=unscale)
    # Ranks hold shards of different sizes.
    numels_N = torch.tensor(stored_numels(tensors), dtype=stats_NK.dtype)
    return torch.cat([stats_NK, send(numels_N, stats_NK.device)[:, None]], dim=1)


def merge_rows(rows_RxK: Tensor) -> Tensor:
    """Merge rows of `pack_stats` as if their tensors were parts of one tensor: [*x, K]."""
    merged_xK = rows_RxK.sum(dim=0)
    merged_xK[..., StatField.AMAX] = rows_RxK[..., StatField.AMAX].amax(dim=0)
    return merged_xK


def merge_ranks(names: Sequence[str], packed_WNK: np.ndarray[Any, Any]) -> TensorStats:
    """Merge the packed statistics of all ranks as if each rank held a part of every tensor."""
    merged = merge_rows(torch.from_numpy(packed_WNK)).numpy()
    return TensorStats(names, merged[:, -1].astype(int).tolist(), merged[:, :-1])
