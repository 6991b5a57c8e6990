"""Time of a training step and peak memory of a ViT under every precision, by Lightning's Trainer.

    python benchmarks/precision.py --size B16 L16 --batch 128

**Contenders**: `32-true` (without TF32), Lightning's `16-mixed` and `bf16-mixed`,
`lightning_mp.BalancedAMP` with full weights (O1) and with half copies of fp32 weights (O2), and
`lightning_mp.PureFP16` (pure), in fp16 and bf16; each with AdamW as fused and as foreach kernels,
and with `lightning_mp`'s SafeAdamW (safe). Models and their random data are made on the device. On
a CPU, `Trainer(precision="16-mixed")` would silently be bf16, so plugins are passed as objects.

**Order**: one `Trainer.fit` of warm-up and timed steps for each contender in turn (A B C A B C), so
drift meets all alike and no two contenders share the memory. A step ends when the device is idle,
and lasts from the end of the one before: what Lightning does in between counts. A step that the
loss scale skipped has no update and does not count.

**Figures**: `ms` is the median and range over rounds of the median step; `x 16-mixed` the median
of the ratios within rounds to 16-mixed with the same optimizer, above 1 where faster. Peak memory
is the allocator's, data and model included; on a CPU there is none.

**Sameness**: every contender starts from the same weights and sees one batch, again and again. One
whose final loss is not finite, or further than 5% from that of 32-true after as many updates, is
named and not ranked.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import logging
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a script only this folder is importable

import lightning  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision, Precision  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks._common import (  # noqa: E402
    CsvTable,
    Spread,
    environment,
    format_table,
    load_warning,
    median_ratio,
    pick_device,
)
from benchmarks._vit import (  # noqa: E402
    LAYOUTS,
    OPTIMIZERS,
    POOLS,
    SIZES,
    Batches,
    Outcome,
    Problem,
    fit,
)
from lightning_mp import BalancedAMP, PureFP16  # noqa: E402

__all__ = ["main"]

DEFAULT_CSV = Path("benchmarks/results/precision.csv")
MEASURED = (
    "rounds",
    "ms_median",
    "ms_min",
    "ms_max",
    "speedup",
    "images_per_second",
    "peak_bytes",
    "final_loss",
    "loss_difference",
    "loss_scale",
    "skipped_steps",
)
PRECISIONS: dict[str, Callable[[str], Precision]] = {
    "32-true": lambda device: Precision(),
    "16-mixed": lambda device: MixedPrecision("16-mixed", device),
    "bf16-mixed": lambda device: MixedPrecision("bf16-mixed", device),
    "O1-fp16": lambda device: BalancedAMP(half="fp16", weights="full"),
    "O1-bf16": lambda device: BalancedAMP(half="bf16", weights="full"),
    "O2-fp16": lambda device: BalancedAMP(half="fp16"),
    "O2-bf16": lambda device: BalancedAMP(half="bf16"),
    "pure-fp16": lambda device: PureFP16(half="fp16"),
    "pure-bf16": lambda device: PureFP16(half="bf16"),
}
OURS = "O1-fp16", "O1-bf16", "O2-fp16", "O2-bf16", "pure-fp16", "pure-bf16"
REFERENCE, BASE, JUDGED = "32-true", "16-mixed", ("O2-fp16", "pure-fp16")
LOSS_TOLERANCE = 0.05
# How many times as fast as `BASE` on CUDA, from this many parameters on: those of a ViT-H.
TARGET_SPEEDUP, TARGET_SPEEDUP_HUGE, HUGE = 1.0, 1.15, 600_000_000
OUT_OF_MEMORY = "ran out of memory"
_GIB = 2**30


class Contender(NamedTuple):
    """Who is timed: a precision and the kind of AdamW, `"safe"` for SafeAdamW."""

    precision: str
    optimizer: str

    def __str__(self) -> str:
        return f"{self.precision}, {self.optimizer}"


@dataclass(frozen=True)
class Row:
    """One line of the CSV file; empty are figures that do not exist there."""

    date: str
    precision: str
    optimizer: str
    size: str
    image: int
    batch: int
    classes: int
    pool: str
    layout: str
    device: str
    parameters: int
    rounds: int
    warm_up: int
    steps: int
    ms_median: float
    ms_min: float
    ms_max: float
    speedup: float | None  # over 16-mixed
    images_per_second: float
    peak_bytes: int | None
    final_loss: float
    loss_difference: float | None  # from 32-true after as many updates, relative
    loss_scale: float | None
    skipped_steps: int
    device_name: str
    threads: str
    python: str
    torch: str
    triton: str
    lightning: str
    lightning_mp: str

    @property
    def contender(self) -> Contender:
        """Who it was."""
        return Contender(self.precision, self.optimizer)


def measure(
    problem: Problem, contenders: Sequence[Contender], args: argparse.Namespace
) -> tuple[dict[Contender, list[Outcome]], dict[Contender, str]]:
    """Let all contenders train in turn; return their outcomes, and why others have none."""
    outcomes: dict[Contender, list[Outcome]] = {each: [] for each in contenders}
    left_out: dict[Contender, str] = {}
    rounds = dict.fromkeys(contenders, args.rounds)
    try:
        batches = Batches(problem, args.warm_up + args.steps)
    except torch.OutOfMemoryError:
        return {}, dict.fromkeys(contenders, f"{OUT_OF_MEMORY} for the data alone")
    with tqdm(total=args.rounds * len(contenders), unit="fit", leave=False) as bar:
        for index in range(args.rounds):
            for contender in contenders:
                bar.set_postfix_str(str(contender), refresh=False)
                if contender not in left_out and index < rounds[contender]:
                    try:
                        plugin = PRECISIONS[contender.precision](problem.place.type)
                        outcome = fit(problem, plugin, contender.optimizer, batches, args.warm_up)
                        outcomes[contender].append(outcome)
                    except Exception as error:
                        left_out[contender] = reason_of(error)
                    # The model and its Trainer refer to each other.
                    gc.collect()
                    if problem.place.type == "cuda":
                        torch.cuda.empty_cache()
                    took = sum(outcomes[contender][0].step_seconds) if outcomes[contender] else 0
                    if args.max_seconds is not None and took > 0:
                        rounds[contender] = max(1, min(args.rounds, int(args.max_seconds / took)))
                bar.update()
    return {each: outcomes[each] for each in contenders if each not in left_out}, left_out


def reason_of(error: Exception) -> str:
    """Return why a contender did not finish, in words for the eye."""
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return OUT_OF_MEMORY
    return f"failed: {type(error).__name__}: {str(error).partition('. ')[0]}"


def judge(
    outcomes: Mapping[Contender, Sequence[Outcome]],
) -> tuple[dict[Contender, float | None], dict[Contender, str]]:
    """Tell who trained as 32-true did.

    Returns:
        The largest relative difference of final losses over rounds of those that did, `None` where
        32-true did not run; and what is wrong with the others.
    """
    sound: dict[Contender, float | None] = {}
    wrong: dict[Contender, str] = {}
    references = {
        each.optimizer: found[0].losses
        for each, found in outcomes.items()
        if each.precision == REFERENCE and all(map(math.isfinite, found[0].losses))
    }
    for contender, found in outcomes.items():
        # Kernels of AdamW differ by rounding only.
        reference = references.get(contender.optimizer, next(iter(references.values()), None))
        difference = None
        if reference is not None:
            difference = max(abs(each.final_loss / reference[each.updates] - 1) for each in found)
        if not all(math.isfinite(outcome.final_loss) for outcome in found):
            losses = ", ".join(f"{outcome.final_loss:.4g}" for outcome in found)
            wrong[contender] = f"diverged: its final losses are {losses}"
        elif difference is not None and difference > LOSS_TOLERANCE:
            wrong[contender] = (
                f"diverged: its final loss is {difference:.0%} off that of {REFERENCE}, "
                f"more than {LOSS_TOLERANCE:.0%}"
            )
        elif not all(outcome.step_seconds for outcome in found):
            wrong[contender] = "took no timed step: all were skipped; give it a longer --warm-up"
        else:
            sound[contender] = difference
    return sound, wrong


def run_problem(
    problem: Problem, args: argparse.Namespace, facts: Mapping[str, Any]
) -> tuple[list[Row], dict[Contender, str]]:
    """Measure one problem; return its rows, the fastest first, and why others were left out."""
    print(
        f"\nViT-{problem.size}, {problem.image} px, batch {problem.batch:,}, {problem.pool} "
        f"pooling, {problem.layout} on {facts['device_name']}, threads={facts['threads']}, "
        f"torch {facts['torch']}",
        flush=True,
    )
    contenders = [Contender(p, o) for o in args.optimizers for p in args.precisions]
    outcomes, left_out = measure(problem, contenders, args)
    differences, wrong = judge(outcomes)
    left_out |= wrong
    spreads = {
        each: Spread(tuple(statistics.median(found.step_seconds) for found in outcomes[each]))
        for each in differences
    }
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    rows = []
    for contender, spread in spreads.items():
        base, found = spreads.get(contender._replace(precision=BASE)), outcomes[contender]
        row = Row(
            date=date,
            **contender._asdict(),
            **asdict(problem),
            parameters=found[-1].parameters,
            rounds=len(found),
            warm_up=args.warm_up,
            steps=args.steps,
            ms_median=spread.median * 1e3,
            ms_min=min(spread.seconds) * 1e3,
            ms_max=max(spread.seconds) * 1e3,
            speedup=None if base is None else median_ratio(base, spread),
            images_per_second=problem.batch / spread.median,
            peak_bytes=max((each.peak_bytes or 0 for each in found), default=0) or None,
            final_loss=found[-1].final_loss,
            loss_difference=differences[contender],
            loss_scale=found[-1].loss_scale,
            skipped_steps=max(each.skipped_steps for each in found),
            **facts,
        )
        rows.append(row)
    return sorted(rows, key=lambda row: row.ms_median), left_out


def table_of(rows: Sequence[Row]) -> str:
    """Return the figures of one problem for the eye."""
    header = "contender", "ms [range]", "x 16-mixed", "images/s", "GiB", "loss", "scale", "skipped"
    lines = [
        (
            str(row.contender),
            f"{row.ms_median:,.1f} [{row.ms_min:,.1f}-{row.ms_max:,.1f}]",
            "-" if row.speedup is None else f"{row.speedup:.2f}",
            f"{row.images_per_second:,.0f}",
            "-" if row.peak_bytes is None else f"{row.peak_bytes / _GIB:,.2f}",
            f"{row.final_loss:.4f}",
            "-" if row.loss_scale is None else f"{row.loss_scale:g}",
            str(row.skipped_steps),
        )
        for row in rows
    ]
    return format_table(header, lines)


def verdict_of(rows: Sequence[Row], left_out: Mapping[Contender, str]) -> str:
    """Return what the figures say against the targets, in words."""
    said = [f"Not ranked: {contender}: {why}." for contender, why in left_out.items()]
    gaps = [row.loss_difference for row in rows if row.loss_difference is not None]
    if gaps:
        said.append(f"Final losses are within {max(gaps):.2%} of those of {REFERENCE}.")
    elif rows:
        said.append(f"Losses are finite; they were not compared with {REFERENCE}, which has none.")
    if not rows:
        said.append("Skipped: no contender finished.")
    elif torch.device(rows[0].device).type != "cuda":
        said.append("No verdict on speed or memory: a CPU is slow at products of halves.")
    else:
        by_name = {row.contender: row for row in rows}
        for optimizer in dict.fromkeys(each.optimizer for each in [*by_name, *left_out]):
            for precision in JUDGED:
                ours, base = Contender(precision, optimizer), Contender(BASE, optimizer)
                if ours in by_name and base in by_name:
                    said.append(_against_targets(by_name[ours], by_name[base]))
                elif {ours, base} & {*by_name, *left_out}:
                    said.append(f"{ours} and {base} did not both run: open.")
    return "\n".join(said)


def _against_targets(ours: Row, base: Row) -> str:
    """Judge ours against 16-mixed by speed and memory."""
    target = TARGET_SPEEDUP_HUGE if ours.parameters >= HUGE else TARGET_SPEEDUP
    speedup = ours.speedup or math.nan
    words = {True: "met", False: "missed"}
    said = f"{ours.contender} is {speedup:.2f}x as fast as {BASE} (target: {target:g}x): "
    said += words[speedup >= target]
    if ours.peak_bytes is None or base.peak_bytes is None:
        return f"{said}; memory was not measured: open."
    said += f"; its peak is {ours.peak_bytes / _GIB:,.2f} of {base.peak_bytes / _GIB:,.2f} GiB "
    return f"{said}(target: no more): {words[ours.peak_bytes <= base.peak_bytes]}."


def parse(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Read the command line; `--quick` replaces what was not given."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--size", choices=SIZES, nargs="+", default=["B16"], help="sizes, one table each")
    add("--image", type=_positive, default=224, help="edge of the images in pixels")
    add("--batch", type=_positive, default=64, help="images a step")
    add("--classes", type=_positive, default=1000, help="outputs of the head")
    add("--pool", choices=POOLS, default="cls", help="what the head reads")
    add("--layout", choices=LAYOUTS, default="nld", help="lnd has the batch second")
    add("--precisions", choices=PRECISIONS, nargs="+", default=[*PRECISIONS], help="contenders")
    add("--optimizers", choices=OPTIMIZERS, nargs="+", default=[*OPTIMIZERS], help="AdamW kernels")
    add("--rounds", type=_positive, default=3, help="fits of each contender")
    add("--warm-up", type=_positive, default=5, help="steps of a fit that do not count")
    add("--steps", type=_positive, default=10, help="timed steps of a fit")
    add("--max-seconds", type=float, help="bounds the timed steps of one contender together")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--threads", type=_positive, default=torch.get_num_threads(), help="CPU threads")
    add("--csv", type=Path, default=DEFAULT_CSV, help="file that rows are appended to")
    add("--quick", action="store_true", help="rehearse at toy size; appends only to a given --csv")
    if "--quick" in (sys.argv[1:] if argv is None else argv):
        parser.set_defaults(
            size=["tiny"], image=32, batch=8, classes=10, rounds=2, warm_up=1, steps=3, csv=None
        )
    return parser, parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if one of ours failed or diverged."""
    parser, args = parse(argv)
    try:
        device = pick_device(args.device)
        for size in args.size:
            SIZES[size].patches(args.image)
        path = ROOT / DEFAULT_CSV if args.csv == DEFAULT_CSV else args.csv
        csv_table = None if path is None else CsvTable(path, list(Row.__annotations__), MEASURED)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    warning = load_warning()
    if warning is not None:
        print(warning)
    torch.set_num_threads(args.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # else some lines every fit
    facts = {**environment(torch.device(device)), "lightning": lightning.__version__}
    shared = Problem("", args.image, args.batch, args.classes, args.pool, args.layout, device)
    all_sound = True
    for size in args.size:
        rows, left_out = run_problem(replace(shared, size=size), args, facts)
        if csv_table is not None:
            csv_table.append([asdict(row) for row in rows])
        table = f"\n{table_of(rows)}\n" if rows else ""
        print(f"{table}\n{verdict_of(rows, left_out)}", flush=True)
        all_sound &= all(
            why.startswith(OUT_OF_MEMORY) or each.precision not in OURS
            for each, why in left_out.items()
        )
    return 0 if all_sound else 1


if __name__ == "__main__":
    raise SystemExit(main())
