"""The page of alarms lists exactly the metrics, alarms and planted failures of the code."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import Logger
from torch import nn

from lightning_mp import (
    ActivationRangeMonitor,
    AdamStateMonitor,
    BalancedAMP,
    ContrastiveLoss,
    GradientUnderflowMonitor,
    LossScaleMonitor,
    ParameterMonitor,
    RepresentationMonitor,
    SpikeGuard,
)
from lightning_mp.callbacks._words.wording import MESSAGES
from lightning_mp.callbacks.monitor import History
from tests.monitors.planted_failures import FAILURES
from tests.monitors.planted_outputs import Sparse

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "callbacks" / "alarms.md").read_text()


def _named(section: str) -> set[str]:
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\| ([^|]*)\|", text, re.MULTILINE)
    return {name for cell in cells[1:] for name in re.findall(r"`(\w+)`", cell)}


def _kinds() -> set[str]:
    """All kinds of alarms: those with a message that the code names or composes."""
    files = [p for p in (ROOT / "callbacks").rglob("*.py") if p.parent.name != "_words"]
    code = "\n".join(path.read_text() for path in files)
    kinds = {key.partition(", ")[0] for key in MESSAGES}
    composed = re.compile("(activation|output_gradient|norm_input)_")
    return {kind for kind in kinds if f'"{kind}"' in code or composed.match(kind)}


def test_page_lists_every_alarm_of_the_code() -> None:
    kinds = _kinds()
    assert {"divergence", "rewind_lost", "weight_growth", "skip_rate"} < kinds
    assert _named("Alarms") == kinds


def test_page_lists_every_planted_failure_with_its_step_and_remedy() -> None:
    (table,) = re.findall(r"^\| failure \|.*\n\|---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
    listed = [(name, start, step, remedy) for name, start, step, _, _, remedy in rows]
    planted = [(each.name, str(each.from_step), str(each.step), each.cure) for each in FAILURES]
    assert listed == planted
    assert f"causes {len(FAILURES)} failures" in PAGE


_NONE = History()  # for callbacks that are not monitors


class _Keys(Logger):
    name, version = "keys", 0

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[str] = set()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.keys |= set(metrics)

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


class _Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.contrastive = nn.Parameter(torch.ones(())), ContrastiveLoss()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8, 0.0) for _ in range(2))
        self.mixture = Sparse()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for layer in self.layers:
            batch = layer(batch)
        rows = batch.float().flatten(0, 1)
        loss = self.contrastive(rows, rows.flip(0), self.scale.exp())
        return loss + F.cross_entropy(rows, rows.argmax(dim=1)) + self.mixture(rows).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(4, 3, 8), batch_size=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.InstabilityWarning")
def test_page_lists_every_metric_of_the_code() -> None:
    keys = _Keys()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=keys,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=BalancedAMP(half="fp16", inf_clamp=["auto"]),
        callbacks=[
            LossScaleMonitor(),
            GradientUnderflowMonitor(every_n_steps=1),
            ActivationRangeMonitor(every_n_steps=1, backward=True),
            AdamStateMonitor(every_n_steps=1),
            ParameterMonitor(every_n_steps=1),
            RepresentationMonitor(every_n_steps=1),
            SpikeGuard(),
        ],
    )
    trainer.fit(_Model())
    logged = {key.removeprefix("instability/") for key in keys.keys if "instability/" in key}
    # Logged metrics without alarms; `loss_z` needs more steps as a baseline.
    curves = {name for each in trainer.callbacks for name in getattr(each, "history", _NONE).curves}
    assert _named("Metrics") == (logged & curves) | {"loss_z", "gradient_norm_z"}
