"""The gradient cache in plain torch: `torchrun --nproc-per-node 2 examples/plain_torch.py`."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_mp.contrastive import ContrastiveLoss
from lightning_mp.gradient_cache import GradientCache


class CLIP(nn.Module):
    """Two towers and a loss, without code for the gradient cache."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 24))
        self.text = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 24))
        self.log_scale, self.loss = nn.Parameter(torch.tensor(2.0)), ContrastiveLoss()

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        image, text = F.normalize(self.visual(image)), F.normalize(self.text(text))
        return self.loss(image, text, self.log_scale.exp())


def train(model: CLIP, steps: int) -> float:
    """Train on 50 pairs per rank and step; return the last loss."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cache = GradientCache(micro_batch_size=16)
    for step in range(steps):
        image, text = batch(step)
        optimizer.zero_grad()
        with cache.serving(ddp, ["visual", "text"]):
            loss = ddp(image, text)  # towers: 16 pairs at a time; loss: all pairs
        loss.backward()
        optimizer.step()
    cache.check()  # on a GPU, also verifies the last replays
    return loss.item()


def batch(step: int, rows: int = 50) -> tuple[Tensor, Tensor]:
    """Return pairs of similar vectors."""
    # Different pairs on each rank: equal ones would be each other's negatives.
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    image = torch.randn(rows, 12, generator=generator)
    return image, image + 0.3 * torch.randn(rows, 12, generator=generator)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    loss = train(CLIP(), steps=20)
    if dist.get_rank() == 0:
        print(f"The loss of {50 * dist.get_world_size()} pairs of all ranks is {loss:.2f}.")
    # A rank that exits early may break the connections of the others.
    dist.barrier()
    dist.destroy_process_group()
