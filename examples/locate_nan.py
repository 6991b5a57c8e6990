"""A planted NaN, and who made it: `python -m examples.locate_nan`."""

import warnings

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.balanced_amp import Reader
from examples.data import letters
from lightning_mp import BalancedAMP, InstabilityWarning, NonFiniteLocator


class Rooted(nn.Module):
    """Takes a root, whose derivative at 0 is infinite: blank pixels are 0."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the root of the distance from a threshold that moves."""
        return (x - 0.01).sqrt() if self.training and self.steps > 20 else x

    steps = 0


class Planted(Reader):
    """Grows a NaN after 20 steps: the root of what is below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.network.insert(3, Rooted())

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        """Count."""
        self.network[3].steps += 1


def main() -> str:
    """Train until it fails, and return the module that the locator names."""
    torch.manual_seed(0)
    locator = NonFiniteLocator(action="stop")
    trainer = pl.Trainer(
        plugins=BalancedAMP(half="bf16"), callbacks=locator, max_epochs=1, logger=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstabilityWarning)  # printed below
        trainer.fit(Planted(), DataLoader(TensorDataset(*letters()), batch_size=64))
    print(locator.alarms[0].message)
    return str(locator.alarms[0].tensor)


if __name__ == "__main__":
    main()
