"""Locate the module that produces a NaN: `python -m examples.locate_nan`."""

import warnings

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.balanced_amp import Reader
from examples.data import letters
from lightning_mp import BalancedAMP, InstabilityWarning, NonFiniteLocator


class Rooted(nn.Module):
    """Produces a NaN after 20 training steps: the square root of a negative number."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return (x - 0.01).sqrt() if self.training and self.steps > 20 else x


def main() -> str:
    """Train until the failure; return the module that the locator names."""
    torch.manual_seed(0)
    model, locator = Reader(), NonFiniteLocator(action="stop")
    model.network.insert(3, Rooted())
    # bf16 has no loss scale, which would skip the step as an overflow.
    plugin = BalancedAMP(half="bf16")
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(plugins=plugin, callbacks=locator, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstabilityWarning)  # printed below
        trainer.fit(model, DataLoader(TensorDataset(*letters()), batch_size=64))
    print(locator.alarms[0].message)
    return str(locator.alarms[0].tensor)


if __name__ == "__main__":
    main()
