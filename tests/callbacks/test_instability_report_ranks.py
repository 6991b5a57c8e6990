"""On several ranks, rank zero writes the report."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_mp.callbacks.instability_report import InstabilityReport
from tests.callbacks.models import Watched, watch
from tests.processes import run_ranks

pytestmark = pytest.mark.distributed


class OnRank(Watched):
    """Has a different loss on each rank."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * (1 + self.global_rank)
        self.losses = [*getattr(self, "losses", []), float(loss.detach())]
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.tensor(1.0 + self.global_rank)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        squares = [p.grad.double().square().sum() for p in self.parameters()]
        self.norms = [*getattr(self, "norms", []), float(torch.stack(squares).sum().sqrt())]


def _train(rank: int, folder: str) -> dict[str, Any]:
    report = InstabilityReport(every_n_seconds=1e-9)
    model = OnRank(steps=8)
    watch(model, [report], strategy=DDPStrategy(), devices=2, default_root_dir=f"{folder}/{rank}")
    written = report.write(model.trainer)
    return {"path": str(written), "losses": model.losses, "norms": model.norms}


@pytest.mark.slow
def test_report_on_two_ranks_is_written_by_rank_zero_with_the_mean_loss() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = run_ranks(_train, 2, folder)
        assert (first["path"], second["path"]) == (f"{folder}/0/instability.html", "None")
        files = sorted(path.name for path in Path(folder).rglob("*") if path.is_file())
        assert files == ["instability.html", "instability.json"]
        data = json.loads(Path(folder, "0", "instability.json").read_text())
    assert first["losses"] != second["losses"]
    means = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    assert data["curves"]["loss"]["values"] == pytest.approx(means, rel=1e-4)
    assert data["curves"]["gradient_norm"]["values"] == pytest.approx(first["norms"], rel=1e-4)
    assert data["curves"]["validation_loss"]["values"] == [1.5]
    assert "world size 2" in dict(data["run"]["facts"])["Strategy"]
