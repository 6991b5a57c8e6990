"""Letters, recognised in fp16 with fp32 weights: `python -m examples.balanced_amp`."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.data import FONTS, letters
from lightning_mp import BalancedAMP, LossScaleMonitor


class Reader(pl.LightningModule):
    """A small CNN; nothing in it knows of a precision."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, 2)
        self.network = nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(1152, 26))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        # In fp32: the gradient of an fp16 loss is the loss scale itself, inf in fp16 from 2^16 on.
        return F.cross_entropy(self.network(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> float:
    """Train on nine fonts, and return the share of letters that are read in the tenth."""
    pl.seed_everything(0)
    model, train = Reader(), TensorDataset(*letters(FONTS[:5] + FONTS[6:]))
    plugin, callbacks = BalancedAMP(half="fp16"), [LossScaleMonitor()]
    trainer = pl.Trainer(plugins=plugin, callbacks=callbacks, max_epochs=3, logger=False)
    trainer.fit(model, DataLoader(train, batch_size=64, shuffle=True))
    images, labels = letters((FONTS[5],))
    # With the means that BatchNorm has gathered, not those of the test.
    share = float((model.eval().network(images).argmax(1) == labels).float().mean())
    print(f"{share:.1%} of the letters of {FONTS[5]}, which was not in training")
    return share


if __name__ == "__main__":
    main()
