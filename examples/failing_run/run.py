"""A run that fails on purpose, without and with the plugins, and its instability report.

A small residual network is trained in fp16. Two things go wrong:

1. The targets of twelve consecutive batches are a hundred times too large. The loss scale falls
   until their gradients fit into fp16; their steps then destroy what the weights have learnt.
2. Later the weights of the stem grow until its outputs exceed 65504, the largest fp16 number. From
   there on every loss is inf or NaN, every step is skipped, and the loss scale falls to its floor.

`--plugins off` trains with stock `16-mixed` and monitors that do not intervene; `--plugins on`
trains the same model on the same data with three changes: `BalancedAMP` keeps the stem in fp32,
`SpikeGuard(action="skip")` skips the bad batches, and `SafeAdamW` bounds the updates. By default
both runs are trained, one after the other, and their final losses are printed.

    python examples/failing_run/run.py
    python examples/failing_run/run.py --plugins off --steps 300 --output runs

Open `OUTPUT/off/instability.html` and `OUTPUT/on/instability.html`. In the first report, the loss
rises twice, the loss scale falls step by step, the headroom of `network.stem` shrinks long before
the overflow, and the alarms give the step and a setting. In the second, the same batches are
skipped, and the loss continues to fall.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader
from tqdm import tqdm

from lightning_mp import BalancedAMP, SafeAdamW
from lightning_mp.callbacks import (
    ActivationRangeMonitor,
    AdamStateMonitor,
    GradientUnderflowMonitor,
    InstabilityReport,
    InstabilityWarning,
    LossScaleMonitor,
    NonFiniteLocator,
    SpikeGuard,
)

WIDTH, BATCH, BAD = 32, 32, 12


class Network(nn.Module):
    """A stem, four residual blocks, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(x))
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x)).squeeze(-1)


class FailingRun(pl.LightningModule):
    """Fails twice: bad batches after 0.4 of the steps, then an overflow of the stem."""

    def __init__(self, steps: int, is_safe: bool) -> None:
        super().__init__()
        # The same initial weights with and without the plugins.
        torch.manual_seed(0)
        self.network = Network()
        self.steps, self.is_safe = steps, is_safe
        self.losses = [math.nan] * steps

    def batch(self, index: int) -> list[Tensor]:
        """Return the batch of a step; the targets of `BAD` batches are 100 times too large."""
        # Seeded by the step, so that both runs use the same data.
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(BATCH, 8, generator=generator)
        y = (x[:, 0] + x[:, 1] * x[:, 2]).tanh() + 0.1 * torch.randn(BATCH, generator=generator)
        is_bad = 0 <= index - int(0.4 * self.steps) < BAD
        return [x, 100 * y if is_bad else y]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.network(batch[0]).float(), batch[1].float())
        self.losses[batch_idx] = float(loss.detach())  # `NonFiniteLocator` runs some steps twice
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx >= self.steps // 2:
            # Its outputs exceed the range of fp16 after 0.8 of the run.
            with torch.no_grad():
                self.network.stem.weight.mul_(65504 ** (1 / (0.3 * self.steps)))

    def configure_optimizers(self) -> Optimizer:
        if self.is_safe:
            return SafeAdamW(self.parameters(), lr=3e-3, clip_update_rms=1.0)
        return AdamW(self.parameters(), lr=3e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        batches = [self.batch(index) for index in range(self.steps)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


class Progress(pl.Callback):
    """A progress bar with the loss of the last step."""

    def __init__(self, title: str, steps: int) -> None:
        self.bar = tqdm(total=steps, desc=title, unit="step")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.bar.set_postfix(loss=f"{pl_module.losses[batch_idx]:.3g}", refresh=False)
        self.bar.update()

    def teardown(self, *_: Any, **__: Any) -> None:
        self.bar.close()


def train(steps: int, plugins: bool, folder: Path) -> list[float]:
    """Train once with or without the plugins, write the report, return the loss of every step."""
    # One folder per run, because the second report would be named with `-v1`.
    report = InstabilityReport(dirpath=str(folder))
    watching: list[pl.Callback] = [
        LossScaleMonitor(),
        # The defaults of 50 and 100 steps are for runs of many thousands of steps.
        GradientUnderflowMonitor(every_n_steps=10),
        ActivationRangeMonitor(every_n_steps=10),
        AdamStateMonitor(every_n_steps=10),
        SpikeGuard(action="skip" if plugins else "warn"),
        NonFiniteLocator(),
    ]
    # `precision="16-mixed"` would select bf16 on a CPU.
    mixed = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    model = FailingRun(steps, is_safe=plugins)
    off = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        **dict.fromkeys(off, False),
        plugins=[BalancedAMP(fp32_modules=["norm", "network.stem"]) if plugins else mixed],
        callbacks=[*watching, report, Progress("plugins on" if plugins else "plugins off", steps)],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstabilityWarning)  # they are in the report
        trainer.fit(model)
    return model.losses


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plugins", choices=["off", "on", "both"], default="both")
    parser.add_argument("--steps", type=int, default=400, help="steps of each run (default: 400)")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "output", help="folder to write to"
    )
    options = parser.parse_args(arguments)
    # With 200 steps, the bad batches begin at 80; `SpikeGuard` reports no spike in the first 64.
    if options.steps < 200:
        parser.error(f"--steps must be at least 200, not {options.steps}")
    choices = ["off", "on"] if options.plugins == "both" else [options.plugins]
    runs = {each: train(options.steps, each == "on", options.output / each) for each in choices}
    for choice, losses in runs.items():
        end, page = statistics.fmean(losses[-20:]), options.output / choice / "instability.html"
        verdict = "learned" if math.isfinite(end) else "died"
        print(f"plugins {choice}: {verdict}, loss of the last 20 steps {end:.4g}; see {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
