"""A model and data for the configurations that the doctor checks."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import ContrastiveLoss


class CLIP(pl.LightningModule):
    """Two small towers.

    Args:
        norm: Name of the norm in the image tower.
        frozen: Whether the norm is in eval mode.
        width: Width of the hidden layers.
        compiled: Whether the image tower is compiled.
        fused: Whether AdamW has the fused kernel.
        optimizers: Number of optimizers.
    """

    def __init__(
        self,
        norm: str = "LayerNorm",
        frozen: bool = False,
        width: int = 16,
        compiled: bool = False,
        fused: bool = False,
        optimizers: int = 1,
    ) -> None:
        super().__init__()
        layers = nn.Linear(8, width), getattr(nn, norm)(width), nn.Linear(width, 8)
        self.visual = nn.Sequential(*layers)
        layers[1].train(not frozen)
        self.text = nn.Linear(8, 8)
        self.fused, self.optimizers_count = fused, optimizers
        if compiled:
            self.visual.compile(backend="eager")
        self.loss = ContrastiveLoss()

    def configure_model(self) -> None:
        """Shard nothing; `ModelParallelStrategy` needs the hook."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        image, text = (F.normalize(t(x), dim=-1) for t, x in zip((self.visual, self.text), batch))  # noqa: B905
        return self.loss(image, text, 10.0)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        count = self.optimizers_count
        return [torch.optim.AdamW(self.parameters(), fused=self.fused) for _ in range(count)]


def _read(rows: list[int]) -> None:
    # As from a worker, which would keep the port of this process open.
    error = f"FileNotFoundError: images/{rows[0]}.png"
    raise RuntimeError(f"Caught an error in a worker.\nOriginal Traceback:\n  ...\n{error}\n")


class Pairs(pl.LightningDataModule):
    """Random pairs.

    Args:
        rows: Number of pairs.
        width: Width of an image.
        missing: Whether the files of the images are missing.
        drop_last: Whether a short last batch is left out.
    """

    def __init__(
        self, rows: int = 64, width: int = 8, missing: bool = False, drop_last: bool = False
    ) -> None:
        super().__init__()
        self.rows, self.width, self.missing, self.drop_last = rows, width, missing, drop_last

    def train_dataloader(self) -> DataLoader:
        """Return batches of 16."""
        if self.missing:
            return DataLoader(range(self.rows), 16, collate_fn=_read)
        sides = torch.randn(self.rows, self.width), torch.randn(self.rows, 8)
        return DataLoader(TensorDataset(*sides), batch_size=16, drop_last=self.drop_last)
