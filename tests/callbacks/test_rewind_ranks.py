import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from lightning_mp.callbacks.spike_guard import SpikeGuard
from tests.callbacks.spike_models import PlantedModel, fit, kinds, make_batches
from tests.processes import run_ranks

SPIKE, SKIP, BACK_TO = 43, 30, 30


class OneRankExplodes(PlantedModel):
    """Its loss explodes on rank 1 only."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 1000 if batch_idx == SPIKE and self.global_rank == 1 else loss


def train(rank: int, folder: str) -> tuple[list[tuple[int, str]], list[int], list[Tensor]]:
    warnings.simplefilter("ignore")
    guard = SpikeGuard(
        action="rewind",
        rewind_steps=10,
        skip_batches=SKIP,
        checkpoint_every_n_steps=10,
        window_steps=32,
        judge_after_steps=16,
        dirpath=folder,
    )
    model = OneRankExplodes(None, lambda p: SGD(p, lr=0.05, momentum=0.9))
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "default_root_dir": folder}
    fit(model, make_batches(140)[rank::2], guard, **options, use_distributed_sampler=False)
    return kinds(guard), model.seen, [p.detach() for p in model.parameters()]


@pytest.mark.distributed
def test_ranks_rewind_together_when_one_of_them_explodes(tmp_path: Path) -> None:
    results = run_ranks(train, 2, str(tmp_path))
    for events, seen, _ in results:
        assert [kind for _, kind in events] == ["loss_spike", "rewind_to_step"]
        assert seen == [*range(SPIKE + 1), *range(BACK_TO + SKIP, 70)]
    # One process with the samples of both ranks in a batch, without what was skipped.
    batches = make_batches(140)
    pairs = zip(batches[::2], batches[1::2], strict=True)
    whole = [[torch.cat(part) for part in zip(*pair, strict=True)] for pair in pairs]
    reference = PlantedModel()
    optimizer = SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for batch in whole[:BACK_TO] + whole[BACK_TO + SKIP :]:
        optimizer.zero_grad()
        reference.compute_loss(batch).backward()
        optimizer.step()
    for _, _, parameters in results:
        for ours, theirs in zip(parameters, reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-5)
