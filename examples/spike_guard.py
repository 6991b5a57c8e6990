"""SpikeGuard skips bad batches that would ruin a run: `python -m examples.spike_guard`."""

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from examples.balanced_amp import Reader
from examples.data import letters
from lightning_mp import AdamStateMonitor, GradientUnderflowMonitor, SafeAdamW, SpikeGuard


class Damaged(Reader):
    """Trains on ten consecutive batches with wrong labels."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        is_bad = self.current_epoch == 3 and 10 <= batch_idx < 20
        return super().training_step([images, 25 - labels if is_bad else labels], batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SafeAdamW(self.parameters(), lr=3e-3)  # supports skipping on the device


def main() -> dict[str, float]:
    """Train with and without skipping; return the mean loss after the bad batches."""
    losses: dict[str, float] = {}
    for action in ("warn", "skip"):
        # Inside the loop, so that the two runs differ only in the action.
        pl.seed_everything(0, verbose=False)
        guard = SpikeGuard(action=action, window_steps=64, judge_after_steps=32)
        monitors = [guard, AdamStateMonitor(every_n_steps=10), GradientUnderflowMonitor()]
        settings = {"max_epochs": 4, "logger": False, "enable_checkpointing": False}
        trainer = pl.Trainer(callbacks=monitors, **settings)
        loader = DataLoader(TensorDataset(*letters()), batch_size=64, shuffle=True)
        trainer.fit(Damaged(), loader)
        bad = 3 * len(loader) + 10
        after = [loss for step, loss in guard.history.curves["loss"] if bad + 10 <= step < bad + 20]
        losses[action] = sum(after) / len(after)
        print(
            f"action={action!r}: loss {losses[action]:.3f} in the ten steps after the bad batches"
        )
    return losses


if __name__ == "__main__":
    main()
