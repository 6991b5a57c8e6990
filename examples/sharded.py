"""Shards of fp32, compute in fp16, on two ranks: `python -m examples.sharded` (FSDP 2)."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from examples.data import letters
from lightning_mp import ModelParallelBalancedAMP


class Reader(pl.LightningModule):
    """A network that shards itself where the plugin says in what dtype."""

    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Linear(256, 128), nn.LayerNorm(128), nn.GELU()
        self.network = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, 26))

    def configure_model(self) -> None:
        """Shard: norms for themselves, in fp32; then the rest."""
        plugin, mesh = self.trainer.precision_plugin, self.device_mesh["data_parallel"]
        plugin.shard_fp32_modules(self, mesh)
        fully_shard(self.network, mesh=mesh, mp_policy=plugin.mp_policy)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]).float(), batch[1])
        # Each rank has the loss of its own batch.
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> float:
    """Train on every device there is, or on two CPU ranks, and return the last loss."""
    pl.seed_everything(0, verbose=False)
    devices = torch.cuda.device_count() if torch.cuda.device_count() > 1 else 2
    accelerator = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    plugin, strategy = ModelParallelBalancedAMP(half="fp16"), ModelParallelStrategy(devices, 1)
    settings = {"max_epochs": 3, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        accelerator=accelerator, devices=devices, strategy=strategy, plugins=plugin,
        gradient_clip_val=1.0, **settings,
    )  # fmt: skip
    trainer.fit(Reader(), DataLoader(TensorDataset(*letters()), batch_size=64, shuffle=True))
    loss = float(trainer.callback_metrics["loss"])
    # Every rank runs this far, and would print.
    if trainer.is_global_zero:
        print(f"{loss:.3f} is the loss of {devices} ranks; a guess among 26 costs 3.26")
    return loss


if __name__ == "__main__":
    main()
