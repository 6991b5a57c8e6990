"""Time and peak memory of the contrastive loss, forward and backward, against its peers.

    python benchmarks/contrastive_loss.py --batch 8192 16384 --width 512

**Contenders**: `lightning_mp.ContrastiveLoss` with every backend that runs on the device; the dense
formula of OpenCLIP (its own `ClipLoss` where `open_clip` imports); torch's chunked
`linear_cross_entropy`, once a direction; on CUDA also Inf-CL (`pip install inf_cl`, fp32 inputs).
Gradients are taken for both features and the scale. What cannot run is named with its reason.

**Order**: first every contender's loss and gradients are compared with ours, then memory is
weighed, then all are timed in turn (A B C A B C) together with plain matrix products.

**Figures**: `ms` is the median and range over rounds; `x ours` the median of the ratios within
rounds. The rate counts four units of 2 b^2 D FLOP for everybody, which is what ours does; a dense
loss does six for the same result. `of GEMM` is that rate over the machine's own: the best median
of a tile's logits product, its gradient product and a big square, same dtype, same rounds; where
a CPU is slow at 16-bit products, ours multiply in fp32 and pass 100%. The extra memory is the peak
beyond the inputs and their gradients, which all contenders need alike; on a CPU it is resident
memory in a fresh process, see `_peak_memory.py`.

Shapes:
    b: batch. D: feature width.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a script only this folder is importable

import torch  # noqa: E402

from benchmarks._common import (  # noqa: E402
    MIB,
    CsvTable,
    Spread,
    environment,
    format_table,
    gemm_steps,
    load_warning,
    median_ratio,
    time_alternately,
)
from benchmarks._contenders import (  # noqa: E402
    DTYPES,
    Contender,
    Inputs,
    find_contenders,
    memory_passes,
)
from benchmarks._peak_memory import Job, peak_cpu_bytes, peak_cuda_bytes  # noqa: E402
from lightning_mp.contrastive.torch_tiles import TorchTiles  # noqa: E402

__all__ = ["main"]

UNITS = 4  # of 2 b^2 D FLOP
TARGET_SPEEDUP = 1.4
TARGET_MEMORY = 0.2
DEFAULT_CSV = Path("benchmarks/results/contrastive_loss.csv")
# The relative difference that the dense formula's logits, rounded to this dtype, explain.
HALF_TOLERANCE = {"fp32": 0.0, "bf16": 0.2, "fp16": 0.05}


@dataclass(frozen=True)
class Case:
    """One problem: what is asked of all contenders."""

    batch: int
    width: int
    dtype: str
    scale: float
    device: str

    @property
    def place(self) -> torch.device:
        """The device."""
        return torch.device(self.device)

    @property
    def flop(self) -> float:
        """FLOP of four units."""
        return UNITS * 2.0 * self.batch**2 * self.width

    def inputs(self) -> Inputs:
        """Return the same features every time."""
        return Inputs.make(self.batch, self.width, DTYPES[self.dtype], self.scale, self.place)


@dataclass(frozen=True)
class Row:
    """One line of the CSV file; `peak_extra_bytes` is empty where it was not measured."""

    date: str
    contender: str
    batch: int
    width: int
    dtype: str
    scale: float
    device: str
    repeats: int
    ms_median: float
    ms_min: float
    ms_max: float
    time_ratio: float
    gflops: float
    gemm_gflops: float
    gemm_fraction: float
    peak_extra_bytes: int | None
    max_relative_difference: float
    device_name: str
    threads: str
    python: str
    torch: str
    triton: str
    lightning_mp: str


def check(contenders: Sequence[Contender], case: Case) -> tuple[dict[str, float], dict[str, str]]:
    """Compare everybody's loss and gradients with ours.

    The difference is the largest of four: of the loss and of the features' gradients, relative to
    ours in the Euclidean norm, and of the scale's gradient, relative to the sum of magnitudes
    `sum_i |<I_i, dL/dI_i>| / scale` of its terms, which may cancel.

    Returns:
        The differences of those that agree, and what is wrong with the others.
    """
    expected: list[torch.Tensor] = []
    sizes: list[float] = []
    differences: dict[str, float] = {}
    failures: dict[str, str] = {}
    for contender in contenders:
        inputs = case.inputs().to(contender.input_dtype)
        try:
            loss = inputs.run(contender.loss)
        except Exception as error:
            if not expected:  # ours has to run
                raise
            failures[contender.name] = f"{type(error).__name__}: {str(error).partition('.')[0]}"
            continue
        leaves = (inputs.image_bD, inputs.text_bD, inputs.scale)
        found = [loss.float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)]
        if not expected:
            expected = found
            terms_b = (inputs.image_bD.detach().float() * found[1]).sum(1) / case.scale
            sizes = [*(float(ours.norm()) for ours in found[:3]), float(terms_b.abs().sum())]
        difference = max(
            float((mine - ours).norm()) / size
            for mine, ours, size in zip(found, expected, sizes, strict=True)
        )
        tolerance = max(contender.tolerance, HALF_TOLERANCE[case.dtype])
        if difference <= tolerance:
            differences[contender.name] = difference
            print(f"  agrees: {contender.name}, {difference:.1e} (tolerance {tolerance:.0e})")
        else:
            failures[contender.name] = (
                f"differs from ours by {difference:.1e}, more than its tolerance {tolerance:.0e}"
            )
    return differences, failures


def weigh(contenders: Sequence[Contender], case: Case, threads: int) -> dict[str, int | None]:
    """Return the peak extra memory of each contender in bytes."""
    jobs = [
        Job(
            "benchmarks._contenders:memory_passes",
            {"name": contender.name, "threads": threads, **asdict(case)},
        )
        for contender in contenders
    ]
    if case.place.type == "cuda":
        figures: list[int | None] = [
            peak_cuda_bytes(memory_passes(**job.arguments), case.place) for job in jobs
        ]
    elif case.place.type == "cpu":
        figures = peak_cpu_bytes(jobs)
    else:
        figures = [None] * len(jobs)
    return dict(zip((contender.name for contender in contenders), figures, strict=True))


def time_case(
    contenders: Sequence[Contender], case: Case, *, repeats: int, square: int
) -> tuple[dict[str, Spread], float]:
    """Time everybody and the machine's own products; return the times and the best FLOP/s."""
    dtype, inputs = DTYPES[case.dtype], case.inputs()
    gemms, gemm_flop = gemm_steps(
        tile=min(case.batch, TorchTiles().tile_size(case.width, dtype, case.place)),
        width=case.width,
        square=square,
        dtype=dtype,
        device=case.place,
    )
    steps: dict[str, Callable[[], object]] = dict(gemms)
    for contender in contenders:
        own = inputs.to(contender.input_dtype)
        steps[contender.name] = partial(own.run, contender.loss)
    spreads = time_alternately(steps, rounds=repeats, device=case.place, title="timing")
    rates = {name: gemm_flop / spreads.pop(name).median for name in gemms}
    for name, rate in rates.items():
        print(f"  {name}: {rate / 1e9:,.0f} GFLOP/s")
    return spreads, max(rates.values())


def run_case(case: Case, args: argparse.Namespace, facts: dict[str, Any]) -> tuple[list[Row], bool]:
    """Measure one problem; return its rows, ours first, and whether everybody agreed."""
    print(
        f"\nb={case.batch:,} D={case.width:,} {case.dtype} scale={case.scale:g} on "
        f"{facts['device_name']}, threads={facts['threads']}, torch {facts['torch']}",
        flush=True,
    )
    contenders, skipped = find_contenders(case.batch, case.width, DTYPES[case.dtype], case.place)
    differences, failures = check(contenders, case)
    for name, reason in (skipped | failures).items():
        print(f"  left out: {name}: {reason}")
    contenders = [contender for contender in contenders if contender.name in differences]
    peaks = weigh(contenders, case, int(facts["threads"])) if args.memory else {}
    spreads, gemm_rate = time_case(contenders, case, repeats=args.repeats, square=args.square)
    ours = spreads[contenders[0].name]
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    rows = [
        Row(
            date=date,
            contender=name,
            **asdict(case),
            repeats=args.repeats,
            ms_median=spread.median * 1e3,
            ms_min=min(spread.seconds) * 1e3,
            ms_max=max(spread.seconds) * 1e3,
            time_ratio=median_ratio(spread, ours),
            gflops=case.flop / spread.median / 1e9,
            gemm_gflops=gemm_rate / 1e9,
            gemm_fraction=case.flop / spread.median / gemm_rate,
            peak_extra_bytes=peaks.get(name),
            max_relative_difference=differences[name],
            **facts,
        )
        for name, spread in spreads.items()
    ]
    return rows, not any("differs" in reason for reason in failures.values())


def table_of(rows: Sequence[Row]) -> str:
    """Return the figures of one problem for the eye."""
    header = "contender", "ms [range]", "x ours", "GFLOP/s", "of GEMM", "extra MiB", "x ours"
    lines = []
    for row in rows:
        peak, ours = row.peak_extra_bytes, rows[0].peak_extra_bytes
        lines.append(
            (
                row.contender,
                f"{row.ms_median:,.1f} [{row.ms_min:,.1f}-{row.ms_max:,.1f}]",
                f"{row.time_ratio:.2f}",
                f"{row.gflops:,.0f}",
                f"{row.gemm_fraction:.0%}",
                "-" if peak is None else f"{peak / MIB:,.1f}",
                f"{peak / ours:.1f}" if peak and ours else "-",
            )
        )
    return format_table(header, lines)


def verdict_of(rows: Sequence[Row]) -> str:
    """Return what the figures say, in words."""
    ours = rows[0]
    said = f"{ours.contender[0].upper()}{ours.contender[1:]}, reach {ours.gemm_fraction:.0%}"
    said += f" of the machine's GEMM rate of {ours.gemm_gflops:,.0f} GFLOP/s"
    dense = next((row for row in rows if row.contender.startswith("dense")), None)
    if dense is None:
        return said + "; the dense formula did not run."
    said += f" and are {dense.time_ratio:.2f}x as fast as the dense formula"
    met = dense.time_ratio >= TARGET_SPEEDUP
    target = f"at least {TARGET_SPEEDUP}x as fast"
    if ours.peak_extra_bytes is not None and dense.peak_extra_bytes:
        share = ours.peak_extra_bytes / dense.peak_extra_bytes
        said += (
            f", with {share:.1%} of its extra memory ({ours.peak_extra_bytes / MIB:,.0f} of "
            f"{dense.peak_extra_bytes / MIB:,.0f} MiB)"
        )
        met &= share <= TARGET_MEMORY
        target += f", at most {TARGET_MEMORY:.0%} of the memory"
    return f"{said}. Target ({target}): {'met' if met else 'missed'}."


def parse(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Read the command line; `--quick` replaces what was not given."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--batch", type=_positive, nargs="+", default=[8192], help="batch sizes, one table each")
    add("--width", type=_positive, default=512, help="feature width")
    add("--dtype", choices=DTYPES, default="fp32", help="dtype of the features")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--repeats", type=_positive, default=7, help="rounds that count")
    add("--scale", type=float, default=100.0, help="logit scale; CLIP trains from 14.3 to 100")
    add("--threads", type=_positive, default=torch.get_num_threads(), help="CPU threads")
    square = 8192 if torch.cuda.is_available() else 4096
    add("--square", type=_positive, default=square, help="edge of the big square GEMM")
    add("--memory", action=argparse.BooleanOptionalAction, default=True, help="weigh memory too")
    add("--csv", type=Path, default=DEFAULT_CSV, help="file that rows are appended to")
    add("--quick", action="store_true", help="rehearse at toy size; appends only to a given --csv")
    if "--quick" in (sys.argv[1:] if argv is None else argv):
        parser.set_defaults(batch=[256], width=64, repeats=2, square=256, csv=None)
    return parser, parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if somebody disagreed with ours."""
    parser, args = parse(argv)
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"Passed --device {device}, but torch sees no GPU. Pass --device cpu.")
        path = ROOT / DEFAULT_CSV if args.csv == DEFAULT_CSV else args.csv
        csv_table = None if path is None else CsvTable(path, list(Row.__annotations__))
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    warning = load_warning()
    if warning is not None:
        print(warning)
    torch.set_num_threads(args.threads)
    facts = environment(torch.device(device))
    all_agree = True
    for batch in args.batch:
        case = Case(batch, args.width, args.dtype, args.scale, device)
        rows, agree = run_case(case, args, facts)
        all_agree &= agree
        if csv_table is not None:
            csv_table.append([asdict(row) for row in rows])
        print(f"\n{table_of(rows)}\n\n{verdict_of(rows)}", flush=True)
    return 0 if all_agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
