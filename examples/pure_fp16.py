"""Predict characters with fp16 weights and SafeAdamW: `python -m examples.pure_fp16`."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.data import text_windows
from lightning_mp import PureFP16, SafeAdamW


class Writer(pl.LightningModule):
    """Predicts a character from the eight previous ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 24)
        hidden = nn.Linear(8 * 24, 128), nn.LayerNorm(128), nn.GELU()
        self.network = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, 128))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # The loss in fp32; half precision is for the model.
        return F.cross_entropy(self.network(self.embed(batch[:, :8])).float(), batch[:, 8])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # SafeAdamW steps weight and residual directly.
        return SafeAdamW(self.parameters(), lr=3e-3)


def main() -> float:
    """Train; return the loss on held-out text."""
    pl.seed_everything(0)
    model, windows = Writer(), text_windows(12_000, length=9)
    # Clips the fp32, unscaled gradients that the plugin provides.
    settings = {"max_epochs": 3, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(plugins=PureFP16(), gradient_clip_val=1.0, **settings)
    trainer.fit(model, DataLoader(windows[:11_000], batch_size=100, shuffle=True))
    loss = float(model.float().training_step(windows[11_000:], 0).detach())  # fp32 from here on
    print(f"{loss:.2f} nats per character; a uniform guess among 128 has 4.85")
    return loss


if __name__ == "__main__":
    main()
