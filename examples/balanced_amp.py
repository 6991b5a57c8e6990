"""Recognize letters in fp16 with fp32 weights: `python -m examples.balanced_amp`."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.data import FONTS, letters
from lightning_mp import BalancedAMP, LossScaleMonitor


class Reader(pl.LightningModule):
    """A small CNN without any code for mixed precision."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, 2)
        self.network = nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(1152, 26))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        # In fp32: the gradient of an fp16 loss is the loss scale, which overflows from 2^16 on.
        return F.cross_entropy(self.network(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> float:
    """Train on nine fonts; return the accuracy on the tenth."""
    pl.seed_everything(0)
    model, train = Reader(), TensorDataset(*letters(FONTS[:5] + FONTS[6:]))
    plugin, callbacks = BalancedAMP(half="fp16"), [LossScaleMonitor()]
    settings = {"max_epochs": 3, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(plugins=plugin, callbacks=callbacks, **settings)
    trainer.fit(model, DataLoader(train, batch_size=64, shuffle=True))
    images, labels = letters((FONTS[5],))
    # Use the running statistics of BatchNorm.
    share = float((model.eval().network(images).argmax(1) == labels).float().mean())
    print(f"{share:.1%} of the letters of {FONTS[5]}, a font that was not trained on")
    return share


if __name__ == "__main__":
    main()
