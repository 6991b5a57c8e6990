"""Measure the host's time for a training step under each precision, where the device has no work.

A transformer of many narrow layers leaves nothing but Python, dispatch and autograd to measure:
what a GPU waits for when its kernels are short. CPU time of one thread, the precisions in turn, so
that drift meets all alike.

    python benchmarks/host_time.py
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._common import environment, format_table, load_warning  # noqa: E402
from lightning_mp import BalancedAMP  # noqa: E402

PRECISIONS: dict[str, Callable[[], Any]] = {
    "32-true": lambda: None,
    "16-mixed": lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")),
    "BalancedAMP(weights='full')": lambda: BalancedAMP(weights="full"),
    "BalancedAMP()": lambda: BalancedAMP(),
}


class NarrowTransformer(pl.LightningModule):
    """Encoder layers of toy width; writes down the CPU time of each step."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        one = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.network = nn.TransformerEncoder(one, layers, enable_nested_tensor=False)
        self.seconds: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return a loss without data to fit."""
        return self.network(batch).float().square().mean()

    def configure_optimizers(self) -> AdamW:
        """Return an optimizer of one kernel."""
        return AdamW(self.parameters(), lr=1e-4, fused=True)

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self._started = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop the clock."""
        self.seconds.append(time.process_time() - self._started)


def measure(plugin: Any, layers: int, steps: int) -> float:
    """Return the median CPU time of a step, in milliseconds."""
    model = NarrowTransformer(layers)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    plugins = [] if plugin is None else [plugin]
    trainer = pl.Trainer(accelerator="cpu", max_steps=steps, plugins=plugins, **quiet)
    trainer.fit(model, DataLoader([torch.randn(2, 4, 8)] * steps, batch_size=None))
    return 1e3 * statistics.median(model.seconds[1:])


def main(args: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=60, help="of each precision in each round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(args)
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    if warning := load_warning():
        print(warning)
    times: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    for _ in range(options.rounds):
        for name, make in PRECISIONS.items():
            times[name].append(measure(make(), options.layers, options.steps))
    rows = []
    for name, found in times.items():
        ratios = [own / other for own, other in zip(found, times["16-mixed"], strict=True)]
        rows.append([name, f"{statistics.median(found):.1f}", f"{statistics.median(ratios):.2f}"])
    print(format_table(["precision", "ms a step", "of 16-mixed"], rows))
    print(", ".join(f"{k} {v}" for k, v in environment(torch.device("cpu")).items()))


if __name__ == "__main__":
    main()
