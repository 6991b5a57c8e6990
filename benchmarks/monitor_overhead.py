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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._common import (  # noqa: E402
    CsvTable,
    environment,
    format_table,
    load_warning,
    pick_device,
)
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

DEFAULT_CSV = Path("benchmarks/results/monitor_overhead.csv")
MEASURED = (
    "step_ms",
    "monitor_ms_per_step",
    "share_of_step",
    "windows",
)
GOALS = {"cpu": 0.02, "cuda": 0.01}  # of a step, at the default cadence
COLUMNS = [
    "monitor",
    "parameters",
    "batch",
    "tokens",
    "precision",
    "every_n_steps",
    "step_ms",
    "monitor_ms_per_step",
    "share_of_step",
    "windows",
]
HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_end",
)


class LanguageModel(pl.LightningModule):
    """A transformer over random tokens, new ones at every step."""

    def __init__(self, width: int, layers: int, batch: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.shape_BL = (batch, tokens)
        self.vocabulary = vocabulary
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64 or 1, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of tokens that name themselves."""
        tokens_BL = torch.randint(self.vocabulary, self.shape_BL, device=self.device)
        logits_BLV = self.head(self.blocks(self.embed(tokens_BL)))
        return F.cross_entropy(logits_BLV.float().flatten(0, 1), tokens_BL.flatten())

    def configure_optimizers(self) -> AdamW:
        """Return torch's AdamW."""
        return AdamW(self.parameters(), lr=1e-4)


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


def measure(args: argparse.Namespace, device: str) -> tuple[list[dict[str, Any]], int]:
    """Train, and return a row for each monitor and one for all, and the number of parameters."""
    every = args.window
    switches = [Switch(monitor) for monitor in monitors(args.every_n_steps)]
    windows = Windows(switches, every, args.pairs)
    torch.manual_seed(0)
    model = LanguageModel(args.width, args.layers, args.batch, args.tokens, args.vocabulary)
    is_cuda = device.startswith("cuda")
    # Hooks inside the forward are not in the callbacks' time, and sampled steps have some.
    add, spent = OutputSampler._add, [0.0]

    def timed_add(self: OutputSampler, *rest: Any) -> None:
        start = time.perf_counter()
        add(self, *rest)
        spent[0] += time.perf_counter() - start
        switches[2].seconds += time.perf_counter() - start

    OutputSampler._add = timed_add  # type: ignore[method-assign]
    try:
        pl.Trainer(
            accelerator="cuda" if is_cuda else "cpu",
            devices=1,
            max_steps=2 * every * (args.pairs + 1) + 1,
            plugins=[BalancedAMP()] if is_cuda else [],
            callbacks=[windows, *switches],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(model, DataLoader(range(10**6)))  # type: ignore[arg-type]
    finally:
        OutputSampler._add = add  # type: ignore[method-assign]
    off, on = windows.seconds[False], windows.seconds[True]
    step = statistics.median(off) / every
    shares = {n: s / len(on) / every / step for n, s in windows.inside.items()}
    rows = {**shares, "all, inside": sum(shares.values())}
    rows["all, on against off"] = statistics.median(a / b for a, b in zip(on, off, strict=True)) - 1
    parameters = sum(p.numel() for p in model.parameters())
    fixed = {
        "parameters": parameters,
        "batch": args.batch,
        "tokens": args.tokens,
        "precision": "BalancedAMP fp16" if is_cuda else "32-true",
        "every_n_steps": args.every_n_steps or "default",
        "step_ms": f"{step * 1e3:.1f}",
        "windows": len(on),
    }
    return [
        {
            "monitor": name,
            **fixed,
            "monitor_ms_per_step": f"{share * step * 1e3:.3f}",
            "share_of_step": f"{share:.5f}",
        }
        for name, share in rows.items()
    ], parameters


def parse(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Read the command line; `--quick` replaces what was not given."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--width", type=int, default=384, help="of the transformer")
    add("--layers", type=int, default=8, help="of the transformer")
    add("--vocabulary", type=int, default=8192, help="tokens there are")
    add("--batch", type=int, default=8, help="sequences a step")
    add("--tokens", type=int, default=128, help="of a sequence")
    add(
        "--every-n-steps", type=int, help="cadence of the sampling monitors; their own if not given"
    )
    add("--window", type=int, default=100, help="steps of a window; a multiple of all cadences")
    add("--pairs", type=int, default=2, help="windows with and without monitors that count")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    add("--csv", type=Path, default=DEFAULT_CSV, help="file that rows are appended to")
    add("--quick", action="store_true", help="rehearse at toy size; appends only to a given --csv")
    if "--quick" in (sys.argv[1:] if argv is None else argv):
        parser.set_defaults(
            width=32,
            layers=1,
            vocabulary=64,
            tokens=8,
            every_n_steps=5,
            window=10,
            pairs=2,
            csv=None,
        )
    return parser, parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser, args = parse(argv)
    try:
        device = pick_device(args.device)
        path = ROOT / DEFAULT_CSV if args.csv == DEFAULT_CSV else args.csv
        facts = {**environment(torch.device(device)), "lightning": lightning.__version__}
        table = None if path is None else CsvTable(path, [*COLUMNS, *facts], MEASURED)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    warning = load_warning()
    if warning is not None:
        print(warning)
    torch.set_num_threads(args.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    rows, parameters = measure(args, device)
    if table is not None:
        table.append([{**row, **facts} for row in rows])
    print(
        f"\n{parameters / 1e6:.1f}M parameters, {args.batch} x {args.tokens} tokens, "
        f"{rows[0]['precision']}, {rows[0]['step_ms']} ms a step without monitors, on "
        f"{facts['device_name']}; samples every {args.every_n_steps or '50 or 100'} steps\n"
    )
    cells = [
        [r["monitor"], r["monitor_ms_per_step"], f"{float(r['share_of_step']):.2%}"] for r in rows
    ]
    print(format_table(["monitor", "ms a step", "of a step"], cells))
    kind = "cuda" if device.startswith("cuda") else "cpu"
    judged = rows[-1] if kind == "cuda" else rows[-2]
    share, goal = float(judged["share_of_step"]), GOALS[kind]
    verdict = "met" if share <= goal else "missed"
    print(f"\nGoal on this device, at most {goal:.0%} of a step: {verdict} with {share:.2%}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
