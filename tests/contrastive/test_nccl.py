"""The loss, its strategy and sharded precision over NCCL, with one GPU per rank.

The same ranks are rehearsed over gloo on the CPU. A machine with one GPU runs the rehearsal only.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import BalancedAMP, ContrastiveLoss, InfCLStrategy
from tests.processes import run_ranks
from tests.reference.contrastive import reference, relative_error

# Relative errors of gradients by dtype, as on one process.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
WIDTH, SCALE = 32, 20.0

# Other tests cover gloo; running these tests over gloo shows that the tests for GPUs can run.
OVER_GLOO = pytest.param("gloo", marks=[pytest.mark.distributed, pytest.mark.sweep])
OVER_NCCL = pytest.param("nccl", marks=pytest.mark.gpu)


def start(function: Callable[..., Any], backend: str, *args: Any) -> list[Any]:
    """Run a function on two ranks over gloo, or on two to four GPUs, or skip."""
    if backend == "gloo":
        return run_ranks(function, 2, "cpu", *args)
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return run_ranks(_on_gpu, min(torch.cuda.device_count(), 4), function, *args)


def _on_gpu(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """Replace the initial process group by an NCCL group."""
    world_size = dist.get_world_size()
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method="tcp://127.0.0.1:29517", rank=rank, world_size=world_size,
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    return function(rank, f"cuda:{rank}", *args)


def features(sizes: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the normalized features of all ranks, equal on every rank."""
    generator = torch.Generator().manual_seed(3)
    image, noise = (torch.randn(sum(sizes), WIDTH, generator=generator) for _ in range(2))
    pairs = (image, 0.4 * image + noise)
    return tuple(nn.functional.normalize(x, dim=1).to(dtype) for x in pairs)


def batches_of(world_size: int) -> list[list[int]]:
    """Return batch sizes of the ranks: equal ones, and unequal ones down to one pair."""
    return [[64] * world_size, [1, *range(70, 70 * world_size, 70)][:world_size]]


def loss_on_rank(rank: int, device: str, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return loss and gradients of each case on a rank."""
    results = []
    for sizes in batches_of(dist.get_world_size()):
        first = [0, *accumulate(sizes)][rank]
        own = [x[first : first + sizes[rank]].to(device) for x in features(sizes, dtype)]
        leaves = [x.requires_grad_() for x in own]
        scale = torch.tensor(SCALE, device=device, requires_grad=True)
        loss = ContrastiveLoss()(*leaves, scale)
        loss.backward()
        results.append([x.detach().cpu() for x in (loss, *(x.grad for x in (*leaves, scale)))])
    return results


@pytest.mark.slow
@pytest.mark.parametrize("backend", [OVER_GLOO, OVER_NCCL])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_of_ranks_equal_one_process(backend: str, dtype: torch.dtype) -> None:
    by_rank = start(loss_on_rank, backend, dtype)
    for case, sizes in enumerate(batches_of(len(by_rank))):
        expected = reference(*features(sizes, dtype), SCALE)
        ranks = [results[case] for results in by_rank]
        for loss, *_ in ranks:
            assert relative_error(loss, expected.loss) < 1.5e-5
        # DDP takes the mean over ranks, so the gradients of each rank are W times its part.
        image, text = (torch.cat([each[i] for each in ranks]) / len(ranks) for i in (1, 2))
        scale = torch.stack([each[3] for each in ranks]).mean()
        assert relative_error(image, expected.d_image) < TOLERANCE[dtype]
        assert relative_error(text, expected.d_text) < TOLERANCE[dtype]
        assert relative_error(scale, expected.d_scale) < TOLERANCE[dtype]


class Towers(pl.LightningModule):
    """Two linear towers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.visual, self.text = nn.Linear(12, WIDTH), nn.Linear(12, WIDTH)
        self.loss = ContrastiveLoss()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        towers = ((self.visual, batch[0]), (self.text, batch[1]))
        found = [nn.functional.normalize(tower(x), dim=-1) for tower, x in towers]
        loss = self.loss(*found, torch.tensor(10.0, device=self.device))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_on_rank(rank: int, device: str, half: str | None) -> tuple[list[float], Tensor]:
    """Train three steps under the strategy; return the losses and a weight."""
    torch.manual_seed(1)
    data = TensorDataset(*torch.randn(2, 96, 12))
    model = Towers()
    trainer = pl.Trainer(
        accelerator="gpu" if device.startswith("cuda") else "cpu", devices=dist.get_world_size(),
        strategy=InfCLStrategy(towers=["visual", "text"], micro_batch_size=7), max_epochs=1,
        plugins=[BalancedAMP(half=half)] if half else [], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=96 // 3 // dist.get_world_size()))
    return model.losses, model.visual.weight.detach().cpu()


@pytest.mark.slow
@pytest.mark.parametrize("backend", [OVER_GLOO, OVER_NCCL])
@pytest.mark.parametrize("half", [None, "bf16"])
def test_strategy_trains_equal_weights_on_all_ranks(backend: str, half: str | None) -> None:
    by_rank = start(train_on_rank, backend, half)
    losses, weight = by_rank[0]
    assert losses[-1] < losses[0]
    for other_losses, other_weight in by_rank[1:]:
        assert other_losses == losses
        assert torch.equal(other_weight, weight)
