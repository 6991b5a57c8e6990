"""Measure what the instability callbacks cost of a training step, one by one and together.

A transformer of some 20 million parameters is trained by a stock Trainer. In windows of 100
steps, which the default cadences of the monitors divide, all are off and on in turn, so that drift
meets both alike. Beside that comparison, the time spent inside each monitor is taken: on a CPU that
is all that it costs, and it is known far better than a difference of a percent. On a GPU it is what
the host spends; the comparison says what the device does.

    python benchmarks/monitor_overhead.py
    python benchmarks/monitor_overhead.py --device cuda --batch 64

Shapes:
    B: batch. L: tokens. D: width.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _common as common  # noqa: E402
from lightning_mp import BalancedAMP  # noqa: E402
from lightning_mp.callbacks import (  # noqa: E402
    ActivationRangeMonitor,
    AdamStateMonitor,
    GradientUnderflowMonitor,
    InstabilityMonitor,
    LossScaleMonitor,
    NonFiniteLocator,
    SpikeGuard,
)
from lightning_mp.callbacks._step.outputs import OutputSampler  # noqa: E402
from lightning_mp.reproduce._fit import Classifier  # noqa: E402

GOALS = {"cpu": 0.02, "cuda": 0.01}  # of a step, at the default cadence
INSIDE, COMPARED = "all, inside", "all, on against off"
TABLE = {
    "monitor": "{monitor}",
    "ms a step": "{monitor_ms_per_step:.3f}",
    "of a step": "{share_of_step:.2%}",
}
HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_batch_start", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("on_train_batch_end", "on_train_end"),
)


class LanguageModel(Classifier):
    """A transformer over random tokens, new ones at every step, that names them."""

    def __init__(self, args: argparse.Namespace) -> None:
        shape = {"nhead": args.width // 64 or 1, "dim_feedforward": 4 * args.width, "dropout": 0.0}
        layer = nn.TransformerEncoderLayer(args.width, **shape, batch_first=True, norm_first=True)  # type: ignore[arg-type]
        blocks = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
        ends = nn.Embedding(args.vocabulary, args.width), nn.Linear(args.width, args.vocabulary)
        super().__init__(nn.Sequential(ends[0], blocks, ends[1]), lr=1e-4, optimizer="foreach")
        self.shape_BL = args.batch, args.tokens
        self.vocabulary = args.vocabulary

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:  # type: ignore[override]
        """Return the loss of tokens that name themselves."""
        tokens_BL = torch.randint(self.vocabulary, self.shape_BL, device=self.device)
        return F.cross_entropy(self.model(tokens_BL).float().flatten(0, 1), tokens_BL.flatten())


class Switch(pl.Callback):
    """Passes hooks on to a monitor while it is on, and takes the time that they take.

    Args:
        monitor: The monitor.
    """

    is_on = False

    def __init__(self, monitor: pl.Callback) -> None:
        self.monitor = monitor
        self.seconds = 0.0


def _passed_on(name: str) -> Callable[..., None]:
    def hook(self: Switch, *args: Any) -> None:
        if Switch.is_on or name in ("on_fit_start", "on_train_start", "on_train_end"):
            start = time.perf_counter()
            getattr(self.monitor, name)(*args)
            self.seconds += time.perf_counter() - start

    return hook


for _name in HOOKS:
    setattr(Switch, _name, _passed_on(_name))


class Windows(pl.Callback):
    """Switches monitors on and off, window by window, and takes the time of each.

    Args:
        switches: What to switch, the first of the trainer's callbacks being this.
        steps: Of a window.
        pairs: How many windows of each kind; one more pair goes before, and does not count.
    """

    def __init__(self, switches: Sequence[Switch], steps: int, pairs: int) -> None:
        self.switches = switches
        self.steps = steps
        self.pairs = pairs
        self.seconds: dict[bool, list[float]] = defaultdict(list)
        self.inside: dict[str, float] = defaultdict(float)
        self._start = 0.0
        self._bar = tqdm(total=2 * (pairs + 1), desc="windows", unit="window")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Begin a window, and end the one before."""
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if step % self.steps:
            return
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        now, window = time.perf_counter(), step // self.steps
        if window > 2:
            self.seconds[Switch.is_on].append(now - self._start)
            for switch in self.switches if Switch.is_on else ():
                self.inside[type(switch.monitor).__name__] += switch.seconds
        if window:
            self._bar.update()
        for switch in self.switches:
            switch.seconds = 0.0
        Switch.is_on = window % 2 == 1
        self._start = time.perf_counter()


def monitors(every_n_steps: int | None) -> list[InstabilityMonitor]:
    """Return all monitors in the state of a run whose baseline is known."""
    kwargs = {} if every_n_steps is None else {"every_n_steps": every_n_steps}
    sampling = [
        GradientUnderflowMonitor(**kwargs),
        ActivationRangeMonitor(**kwargs),
        AdamStateMonitor(**kwargs),
    ]
    for monitor in sampling:
        monitor.load_state_dict({**monitor.state_dict(), "samples": monitor.baseline_samples})
    return [LossScaleMonitor(), *sampling, SpikeGuard(), NonFiniteLocator()]


def train(args: argparse.Namespace) -> tuple[dict[str, float], float, int]:
    """Return the share of a step that each monitor takes, a step's seconds, and the parameters."""
    switches = [Switch(monitor) for monitor in monitors(args.every_n_steps)]
    windows = Windows(switches, args.window, args.pairs)
    torch.manual_seed(0)
    model = LanguageModel(args)
    is_cuda = args.device.startswith("cuda")
    # Hooks inside the forward are not in the callbacks' time, and sampled steps have some.
    add = OutputSampler._add

    def timed_add(self: OutputSampler, *rest: Any) -> None:
        start = time.perf_counter()
        add(self, *rest)
        switches[2].seconds += time.perf_counter() - start

    off_by_default = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    with mock.patch.object(OutputSampler, "_add", timed_add):
        pl.Trainer(
            accelerator="cuda" if is_cuda else "cpu",
            devices=1,
            max_steps=2 * args.window * (args.pairs + 1) + 1,
            plugins=[BalancedAMP()] if is_cuda else [],
            callbacks=[windows, *switches],
            logger=False,
            **dict.fromkeys(off_by_default, False),
        ).fit(model, DataLoader(range(10**6)))  # type: ignore[arg-type]
    off, on = windows.seconds[False], windows.seconds[True]
    step = statistics.median(off) / args.window
    shares = {n: s / len(on) / args.window / step for n, s in windows.inside.items()}
    shares[INSIDE] = sum(shares.values())
    shares[COMPARED] = statistics.median(a / b for a, b in zip(on, off, strict=True)) - 1
    return shares, step, sum(p.numel() for p in model.parameters())


def measure(args: argparse.Namespace) -> Iterator[common.Report]:
    """Train, and give a row for each monitor and two for all."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        shares, step, parameters = train(args)
    kind = "cuda" if args.device.startswith("cuda") else "cpu"
    every = args.every_n_steps or "default"
    asked = {"batch": args.batch, "tokens": args.tokens, "every_n_steps": every}
    asked |= {"precision": "BalancedAMP fp16" if kind == "cuda" else "32-true"}
    asked |= {"parameters": parameters, "windows": args.pairs}
    rows = []
    for name, share in shares.items():
        found = {"step_ms": 1e3 * step, "monitor_ms_per_step": 1e3 * share * step}
        rows.append(({"monitor": name, **asked}, {**found, "share_of_step": share}))
    share, goal = shares[COMPARED if kind == "cuda" else INSIDE], GOALS[kind]
    said = (
        f"{parameters / 1e6:.1f}M parameters, {args.batch} x {args.tokens} tokens, "
        f"{step * 1e3:.1f} ms a step without monitors. Goal on this device, at most {goal:.0%} of "
        f"a step: {'met' if share <= goal else 'missed'} with {share:.2%}."
    )
    yield common.Report(rows, TABLE, [said])


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of this benchmark."""
    positive = common.positive
    add("--width", type=positive, default=384, help="of the transformer")
    add("--layers", type=positive, default=8, help="of the transformer")
    add("--vocabulary", type=positive, default=8192, help="tokens there are")
    add("--batch", type=positive, default=8, help="sequences a step")
    add("--tokens", type=positive, default=128, help="of a sequence")
    add(
        "--every-n-steps",
        type=positive,
        help="cadence of the sampling monitors, or their own",
    )
    add(
        "--window",
        type=positive,
        default=100,
        help="steps of a window; all cadences divide it",
    )
    add(
        "--pairs",
        type=positive,
        default=2,
        help="windows with and without monitors that count",
    )


QUICK = {"pairs": 2, "width": 32, "layers": 1, "vocabulary": 64, "tokens": 8}
QUICK |= {"every_n_steps": 5, "window": 10}
BENCHMARK = common.Benchmark(
    "monitor_overhead", __doc__, add_options, measure, {**QUICK, "pairs": 2}
)
main, parse = BENCHMARK.main, BENCHMARK.parse

if __name__ == "__main__":
    raise SystemExit(main())
