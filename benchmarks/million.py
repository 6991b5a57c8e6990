"""One forward and backward pass at a batch of a million pairs, on one device, and proof of it.

    python benchmarks/million.py

Dense logits would take 2 TiB in bf16. The pass is run once, after a small one that compiles, and
reported in seconds, in TFLOP/s of four units of 2 b^2 D FLOP, and in bytes. That it is right is
checked in three ways: a random sample of pairs in float64 (loss terms and gradients, see
`_float64.py`); the loss against the mean of all terms; and the loss against theory, by which a row
of random unit features has a log-sum-exp of about `ln(b) + scale^2 / 2D`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks import _common as common  # noqa: E402
from benchmarks._contenders import Contender, find_ours  # noqa: E402
from benchmarks._float64 import errors_of, log_sum_exps, theory_loss  # noqa: E402
from benchmarks._inputs import DTYPES, Case, Inputs  # noqa: E402

# The softmax and the result are stored in the dtype.
GRADIENT_TOLERANCE = {"fp32": 1e-3, "bf16": 1e-2, "fp16": 2e-3}
# Log-sum-exps of fp32 logits near 100 are off by about 2e-5. The sum of a row is a sum of b
# log-normal values; its logarithm lies a little below its mean's.
TOLERANCES = {"term_error": 5e-4, "mean_error": 1e-5, "theory_error": 0.25}
TABLE = {"contender": "{contender}", "seconds": "{seconds:,.2f}", "TFLOP/s": "{tflops:,.1f}"}
_WARM_UP_ROWS = 16384


def run_once(contender: Contender, case: Case, samples: int) -> dict[str, Any]:
    """Run one pass over fresh inputs, after a smaller one that compiles, and check it."""
    place, rows = case.place, min(_WARM_UP_ROWS, case.batch)
    Inputs.make(rows, case.width, DTYPES[case.dtype], case.scale, place).run(contender.loss)
    inputs = contender.inputs(case)
    before = 0
    if on_cuda := place.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(place)
        before = torch.cuda.memory_allocated(place) + inputs.gradient_bytes
    start = _now(place)
    loss = contender.loss(*inputs.leaves)
    between = _now(place)
    lses = log_sum_exps(loss, case.batch)
    loss.backward(torch.full_like(loss, inputs.loss_scale))
    end = _now(place)
    peak = torch.cuda.max_memory_allocated(place) - before if on_cuda else None
    value = float(loss.detach())
    return {
        "seconds": end - start,
        "backward_seconds": end - between,
        "tflops": case.flop / (end - start) / 1e12,
        "peak_extra_bytes": peak,
        "loss": value,
        "theory_error": abs(value / theory_loss(inputs) - 1),
        **errors_of(inputs, value, lses, samples),
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def problems_of(found: dict[str, Any], dtype: str) -> list[str]:
    """Return what is not as it should be."""
    gradients = ("image_gradient_error", "text_gradient_error")
    limits = TOLERANCES | dict.fromkeys(gradients, GRADIENT_TOLERANCE[dtype])
    return [
        f"Wrong: {name.replace('_', ' ')} is {found[name]:.1e}, more than {limit:.0e}."
        for name, limit in limits.items()
        if not found[name] <= limit  # NaN too
    ]


def measure(args: argparse.Namespace) -> Iterator[common.Report]:
    """Run the pass of ours that is fastest."""
    if args.batch < 2 or not args.scale > 0:
        raise SystemExit("--batch must be 2 or more, --scale positive.")
    case = Case(args.batch, args.width, args.dtype, args.scale, args.device)
    ours, left_out = find_ours(case.width, DTYPES[case.dtype], case.place)
    if not ours:
        raise RuntimeError(f"None of this package's losses runs on {args.device}: {left_out}.")
    found = run_once(ours[0], case, args.samples)
    for name, value in found.items():
        print(f"  {name.replace('_', ' ')}: {'-' if value is None else f'{value:,.4g}'}")
    problems = problems_of(found, case.dtype)
    what = {"contender": ours[0].name, **asdict(case), "samples": args.samples}
    yield common.Report([(what, found)], TABLE, problems, not problems)


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of this benchmark."""
    add("--batch", type=common.positive, default=2**20, help="pairs, two at least")
    add("--width", type=common.positive, default=768, help="feature width")
    add("--dtype", choices=DTYPES, default="bf16", help="dtype of the features")
    add("--scale", type=float, default=100.0, help="logit scale")
    add("--samples", type=common.positive, default=64, help="pairs to check")


QUICK = {"batch": 512, "width": 32, "scale": 10.0, "samples": 16}
BENCHMARK = common.Benchmark("million", __doc__, add_options, measure, QUICK)
main, parse = BENCHMARK.main, BENCHMARK.parse

if __name__ == "__main__":
    raise SystemExit(main())
