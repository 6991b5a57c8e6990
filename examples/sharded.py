"""FSDP2 with fp32 shards and fp16 compute on two ranks: `python -m examples.sharded`."""

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
    """A network that is sharded with the policies of the plugin."""

    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Linear(256, 128), nn.LayerNorm(128), nn.GELU()
        self.network = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, 26))

    def configure_model(self) -> None:
        """Shard the norms separately in fp32, then the rest."""
        plugin, mesh = self.trainer.precision_plugin, self.device_mesh["data_parallel"]
        plugin.shard_fp32_modules(self, mesh)
        fully_shard(self.network, mesh=mesh, mp_policy=plugin.mp_policy)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]).float(), batch[1])
        # The loss of each rank is that of its own batch.
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> float:
    """Train on all GPUs, or on two CPU ranks; return the last loss."""
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
    # Every rank executes this line; only rank zero prints.
    if trainer.is_global_zero:
        print(f"{loss:.3f} is the loss on {devices} ranks; a uniform guess among 26 has 3.26")
    return loss


if __name__ == "__main__":
    main()
