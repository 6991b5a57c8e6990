"""One forward and backward pass at a batch of a million pairs, on one device, and proof of it.

    python benchmarks/million.py

Dense logits would take 2 TiB in bf16. The pass is run once, after a small one that compiles, and
reported in seconds, in TFLOP/s of four units of 2 b^2 D FLOP, and in bytes. That it is right is
checked in three ways: a random sample of pairs in float64 (loss terms and gradients, see
`_float64.py`); the loss against the mean of all terms; and the loss against theory, by which a row
of random unit features has a log-sum-exp of about `ln(b) + scale^2 / 2D`.

Shapes:
    b: batch. D: feature width.
"""

from __future__ import annotations

import argparse
import datetime
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a script only this folder is importable

import torch  # noqa: E402

from benchmarks._common import MIB, CsvTable, environment, format_table, pick_device  # noqa: E402
from benchmarks._contenders import Contender, find_ours  # noqa: E402
from benchmarks._float64 import Pass, errors_of, log_sum_exps, theory_loss  # noqa: E402
from benchmarks._inputs import DTYPES, Case, Inputs  # noqa: E402

__all__ = ["main"]

DEFAULT_CSV = Path("benchmarks/results/million.csv")
MEASURED = (
    "seconds",
    "forward_seconds",
    "backward_seconds",
    "tflops",
    "peak_extra_bytes",
    "peak_total_bytes",
    "loss",
    "theory_loss",
    "mean_error",
    "term_error",
    "image_gradient_error",
    "text_gradient_error",
)
# Of a loss term, absolute: log-sum-exps of fp32 logits near 100 are off by about 2e-5.
TERM_TOLERANCE = 5e-4
# Of a gradient, relative to its norm: the softmax and the result are stored in this dtype.
GRADIENT_TOLERANCE = {"fp32": 1e-3, "bf16": 1e-2, "fp16": 2e-3}
MEAN_TOLERANCE = 1e-5
# The sum of a row is a sum of b log-normal values; its logarithm lies a little below its mean's.
THEORY_TOLERANCE = 0.25
_WARM_UP_ROWS = 16384


@dataclass(frozen=True)
class Row:
    """One line of the CSV file; byte counts are empty on a CPU."""

    date: str
    contender: str
    batch: int
    width: int
    dtype: str
    scale: float
    device: str
    seconds: float
    forward_seconds: float
    backward_seconds: float
    tflops: float
    peak_extra_bytes: int | None
    peak_total_bytes: int | None
    loss: float
    theory_loss: float
    mean_error: float
    samples: int
    term_error: float
    image_gradient_error: float
    text_gradient_error: float
    device_name: str
    threads: str
    python: str
    torch: str
    triton: str
    lightning_mp: str

    @property
    def problems(self) -> list[str]:
        """What is not as it should be."""
        gradient = GRADIENT_TOLERANCE[self.dtype]
        theory = abs(self.loss / self.theory_loss - 1)
        checks = [
            ("a sampled loss term", self.term_error, TERM_TOLERANCE),
            ("a sampled image gradient", self.image_gradient_error, gradient),
            ("a sampled text gradient", self.text_gradient_error, gradient),
            ("the loss, from the mean of its terms,", self.mean_error, MEAN_TOLERANCE),
            ("the loss, from theory,", theory, THEORY_TOLERANCE),
        ]
        return [
            f"{what} is off by {error:.1e}, more than {tolerance:.0e}"
            for what, error, tolerance in checks
            if not error <= tolerance  # NaN too
        ]


def run_once(contender: Contender, case: Case) -> Pass:
    """Run one pass over fresh inputs, after a smaller one that compiles."""
    place, rows = case.place, min(_WARM_UP_ROWS, case.batch)
    Inputs.make(rows, case.width, DTYPES[case.dtype], case.scale, place).run(contender.loss)
    inputs = contender.inputs(case)
    on_cuda = place.type == "cuda"
    before = 0
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(place)
        before = torch.cuda.memory_allocated(place)
    start = _now(place)
    loss = contender.loss(inputs.image_bD, inputs.text_bD, inputs.scale)
    between = _now(place)
    row_lse_b, column_lse_b = log_sum_exps(loss, case.batch)
    loss.backward(torch.full_like(loss, inputs.loss_scale))
    end = _now(place)
    peak = torch.cuda.max_memory_allocated(place) - before if on_cuda else None
    return Pass(
        inputs,
        float(loss.detach()),
        row_lse_b,
        column_lse_b,
        forward_seconds=between - start,
        backward_seconds=end - between,
        peak_extra_bytes=None if peak is None else peak - inputs.gradient_bytes,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(contender: Contender, case: Case, samples: int) -> Row:
    """Run and check one pass."""
    result = run_once(contender, case)
    errors = errors_of(result, case.scale, samples)
    inputs, extra = result.inputs, result.peak_extra_bytes
    seconds = result.forward_seconds + result.backward_seconds
    features = inputs.image_bD.nbytes + inputs.text_bD.nbytes
    return Row(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        contender=contender.name,
        **asdict(case),
        seconds=seconds,
        forward_seconds=result.forward_seconds,
        backward_seconds=result.backward_seconds,
        tflops=case.flop / seconds / 1e12,
        peak_extra_bytes=extra,
        peak_total_bytes=None if extra is None else extra + features + inputs.gradient_bytes,
        loss=result.loss,
        theory_loss=theory_loss(inputs, case.scale),
        mean_error=errors.mean,
        samples=min(samples, case.batch),
        term_error=errors.term,
        image_gradient_error=errors.image_gradient,
        text_gradient_error=errors.text_gradient,
        **environment(case.place),
    )


def report_of(row: Row) -> str:
    """Return the figures for the eye."""
    lines = [
        ("seconds", f"{row.seconds:,.2f}"),
        ("of which backward", f"{row.backward_seconds:,.2f}"),
        ("TFLOP/s over four units", f"{row.tflops:,.1f}"),
        ("loss", f"{row.loss:.5f}"),
        (f"loss by theory, with ln(b) = {math.log(row.batch):.2f}", f"{row.theory_loss:.5f}"),
        (f"largest error of {row.samples} x 2 loss terms", f"{row.term_error:.1e}"),
        ("... of their image gradients, relative", f"{row.image_gradient_error:.1e}"),
        ("... of their text gradients, relative", f"{row.text_gradient_error:.1e}"),
        ("error of the mean, relative", f"{row.mean_error:.1e}"),
    ]
    if row.peak_extra_bytes is not None and row.peak_total_bytes is not None:
        unit = 4 * row.batch * row.width
        lines[3:3] = [
            ("MiB beyond inputs and gradients", f"{row.peak_extra_bytes / MIB:,.0f}"),
            ("... in units of 4bD bytes", f"{row.peak_extra_bytes / unit:.2f}"),
            ("MiB in all", f"{row.peak_total_bytes / MIB:,.0f}"),
        ]
    return format_table((row.contender, "figure"), lines)


def parse(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Read the command line; `--quick` replaces what was not given."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--batch", type=int, default=2**20, help="pairs, two at least")
    add("--width", type=int, default=768, help="feature width")
    add("--dtype", choices=DTYPES, default="bf16", help="dtype of the features")
    add("--scale", type=float, default=100.0, help="logit scale")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--samples", type=int, default=64, help="pairs to check")
    add("--csv", type=Path, default=DEFAULT_CSV, help="file that a row is appended to")
    add("--quick", action="store_true", help="rehearse at toy size; appends only to a given --csv")
    if "--quick" in (sys.argv[1:] if argv is None else argv):
        parser.set_defaults(batch=512, width=32, scale=10.0, samples=16, csv=None)
    args = parser.parse_args(argv)
    if min(args.batch - 1, args.width, args.samples) < 1 or not args.scale > 0:
        parser.error("--batch must be 2 or more, --width, --samples and --scale positive.")
    return parser, args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pass; the exit status is 1 if a check fails."""
    parser, args = parse(argv)
    try:
        device = pick_device(args.device)
        path = ROOT / DEFAULT_CSV if args.csv == DEFAULT_CSV else args.csv
        csv_table = (
            None if path is None else CsvTable(path, [each.name for each in fields(Row)], MEASURED)
        )
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    case = Case(args.batch, args.width, args.dtype, args.scale, device)
    print(f"b={case.batch:,} D={case.width:,} {case.dtype} scale={case.scale:g}", flush=True)
    found, left_out = find_ours(case.width, DTYPES[case.dtype], case.place)
    for name, reason in left_out.items():
        print(f"  left out: {name}: {reason}", flush=True)
    if not found:
        raise RuntimeError(f"None of this package's losses runs on {device}: {left_out}.")
    row = measure(found[0], case, args.samples)
    if csv_table is not None:
        csv_table.append([asdict(row)])
    print(f"\n{report_of(row)}\n", flush=True)
    for problem in row.problems:
        print(f"Wrong: {problem}.")
    return 1 if row.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
