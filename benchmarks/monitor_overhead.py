"""Measure the share of a training step that the instability callbacks take, singly and together.

A stock Trainer trains a transformer of about 20 million parameters, in turn without and with
monitors, for 100 timed steps after 20 untimed steps. The default sampling intervals of the monitors
divide 100. In addition, Lightning's profiler measures the time inside each monitor. On a CPU this
is the whole cost, and it is far more precise than a difference of one percent between two runs. On
a GPU it is the time of the host; the comparison of the runs includes the time of the device.

    python benchmarks/monitor_overhead.py
    python benchmarks/monitor_overhead.py --device cuda --batch 64
    python benchmarks/monitor_overhead.py --width 128 --layers 16 --vocabulary 512 --batch 2
"""

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor, nn
from torch.utils.benchmark.utils.timer import timer
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _common as common
from lightning_mp import BalancedAMP, callbacks
from lightning_mp.callbacks._step.outputs import OutputSampler
from papers import _fit

WARM_UP = 20  # steps
INSIDE, COMPARED = "all, inside", "all, on against off"
# By device type: the figure that is judged, and the largest share of a step at default intervals.
GOALS = {"cpu": (INSIDE, 0.02), "cuda": (COMPARED, 0.01)}
TABLE = {
    "monitor": "{monitor}",
    "ms a step": "{monitor_ms_per_step:.3f}",
    "of a step": "{share_of_step:.2%}",
}


class LanguageModel(_fit.Classifier):
    """A transformer that classifies random tokens; B is the batch, L tokens."""

    def __init__(self, args: argparse.Namespace) -> None:
        width, layers, self.vocabulary = args.width, args.layers, args.vocabulary
        shape = {"nhead": width // 64 or 1, "dim_feedforward": 4 * width, "dropout": 0.0}
        layer = nn.TransformerEncoderLayer(width, **shape, batch_first=True, norm_first=True)
        blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        ends = nn.Embedding(self.vocabulary, width), nn.Linear(width, self.vocabulary)
        super().__init__(nn.Sequential(ends[0], blocks, ends[1]), lr=1e-4, optimizer="foreach")
        self.shape_BL = args.batch, args.tokens

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        """Return the cross-entropy whose targets are the input tokens."""
        # Drawn on the device, because waiting for a loader could hide the time of the monitors.
        tokens_BL = torch.randint(self.vocabulary, self.shape_BL, device=self.device)
        return F.cross_entropy(self.model(tokens_BL).float().flatten(0, 1), tokens_BL.flatten())


class Stopwatch(pl.Callback):
    """Measures the time of the steps after the warm-up, and collects the profiler's times."""

    def __init__(self, warm_up: int, steps: int) -> None:
        self.first, self.last = warm_up, warm_up + steps
        self.seconds, self.inside = 0.0, dict[str, float]()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, step: int) -> None:
        """Start or stop the clock; `timer` waits for a GPU."""
        durations = trainer.profiler.recorded_durations
        if step == self.first:
            # Drops the times of the warm-up, which contain compilation and first allocations.
            durations.clear()
            # Otherwise a collection of the objects of the set-up could be timed.
            gc.collect()
            self.seconds = -timer()
        elif step == self.last:
            self.seconds += timer()
            self.inside = {action: sum(seconds) for action, seconds in durations.items()}


def monitors(**cadence: int) -> list[callbacks.InstabilityMonitor]:
    """Return all monitors in the state of a run whose baseline is known."""
    sampling = [
        callbacks.GradientUnderflowMonitor(**cadence),
        callbacks.ActivationRangeMonitor(**cadence),
        callbacks.AdamStateMonitor(**cadence),
        callbacks.ParameterMonitor(**cadence),
        callbacks.RepresentationMonitor(modules=["model.1"], **cadence),
    ]
    for monitor in sampling:
        # With an unknown baseline they sample five times as often, unlike in most of a long run.
        monitor.load_state_dict({**monitor.state_dict(), "samples": monitor.baseline_samples})
    others = callbacks.SpikeGuard(), callbacks.NonFiniteLocator()
    return [callbacks.LossScaleMonitor(), *sampling, *others]


def train(args: argparse.Namespace, watching: Sequence[pl.Callback]) -> Stopwatch:
    """Train once, and return the stopwatch."""
    stopwatch, profiler = Stopwatch(WARM_UP, args.steps), SimpleProfiler()
    torch.manual_seed(0)
    # The same weights and tokens with monitors and without.
    model, is_cuda = LanguageModel(args), args.device.type == "cuda"
    add = OutputSampler._add

    def profiled_add(*rest: Any) -> Any:
        """Time the hooks inside the forward of sampled steps, which the profiler does not see."""
        with profiler.profile("[Callback]ActivationRangeMonitor._add"):
            return add(*rest)

    with mock.patch.object(OutputSampler, "_add", profiled_add):
        _fit.train(
            model,
            DataLoader(range(10**6)),  # the model draws its batches itself
            accelerator="cuda" if is_cuda else "cpu",
            devices=1,
            max_steps=stopwatch.last + 1,  # the clock stops at the start of the last step
            plugins=[BalancedAMP()] if is_cuda else [],
            callbacks=[stopwatch, *watching],
            profiler=profiler,
        )
    return stopwatch


def measure(args: argparse.Namespace) -> Iterator[common.Report]:
    """Train in turn; report a row for each monitor and two for all monitors together."""
    cadence = {"every_n_steps": 5} if args.quick else {}
    runs = {"off": lambda: train(args, []), "on": lambda: train(args, monitors(**cadence))}
    found, failures = common.take_turns(runs, rounds=args.pairs)
    if failures:
        raise RuntimeError(f"A training did not finish: {failures}.")
    off, on = ([run.seconds for run in found[kind]] for kind in runs)
    step = median(off) / args.steps
    # `FactsRecorder` measures the gradient norm once for all monitors.
    shares = dict.fromkeys([*(type(m).__name__ for m in monitors()), "FactsRecorder"], 0.0)
    for action, seconds in (item for run in found["on"] for item in run.inside.items()):
        for name in shares:
            shares[name] += (f"]{name}" in action) * seconds / len(on) / median(off)
    shares[INSIDE] = sum(shares.values())
    # Ratios within consecutive pairs of runs, which a drift of the machine affects alike.
    shares[COMPARED] = common.median_ratio(on, off) - 1
    model = LanguageModel(args)
    asked = {
        "batch": args.batch,
        "tokens": args.tokens,
        "every_n_steps": cadence.get("every_n_steps", "default"),
        "precision": "BalancedAMP fp16" if args.device.type == "cuda" else "32-true",
        "parameters": sum(p.numel() for p in model.parameters()),
        "modules": sum(1 for _ in model.modules()),
        "windows": args.pairs,
    }
    rows = []
    for name, share in shares.items():
        times = {"step_ms": 1e3 * step, "monitor_ms_per_step": 1e3 * share * step}
        rows.append(({"monitor": name, **asked}, {**times, "share_of_step": share}))
    kind, goal = GOALS[args.device.type]
    figure = f"All monitors take {shares[kind]:.2%} of a step of {step * 1e3:.1f} ms"
    yield common.Report(rows, TABLE, [common.verdict(figure, f"{goal:.0%}", shares[kind] <= goal)])


OPTIONS = {
    "batch": dict(default=8, help="sequences a step"),
    "width": dict(default=384, toy=32, help="width of the model"),
    "layers": dict(default=8, toy=1, help="layers of the model, ten modules each"),
    "vocabulary": dict(default=8192, toy=64, help="number of different tokens"),
    "tokens": dict(default=128, toy=8, help="tokens of a sequence"),
    "steps": dict(default=100, toy=10, help="timed steps of a training"),
    "pairs": dict(default=2, help="pairs of trainings without and with monitors"),
}
main = common.Benchmark("monitor_overhead", __doc__, measure, OPTIONS)

if __name__ == "__main__":
    raise SystemExit(main())
