"""Time and peak memory of the contrastive loss, forward and backward, against its peers.

    python benchmarks/contrastive_loss.py --batch 8192 16384 --width 512 768

**Contenders**: `lightning_mp.ContrastiveLoss` with every backend that runs on the device, and with
each `--workspace`; the dense formula of OpenCLIP (its own `ClipLoss` where `open_clip` imports);
torch's chunked `linear_cross_entropy`, once a direction. On CUDA also: the dense loss under bf16
autocast; and Inf-CL (`pip install inf_cl`), which takes fp32 storage only, once with unrounded
features and once with the values that ours get. What cannot run is named with its reason, as is
what would take longer than `--max-seconds` a call, by the square of the batch.

**Order**: first every contender's loss and gradients are compared with ours, then memory is
weighed, then all are timed in turn (A B C A B C) together with plain matrix products.

**Figures**: `ms` is the median and range over rounds; `x ours` the median of the ratios within
rounds. The rate counts four units of 2 b^2 D FLOP for everybody, which is what ours does; a dense
loss does six for the same result, Inf-CL ten. `of GEMM` is that rate over the machine's own: the
best median of a tile's logits product, its gradient product and a big square, same dtype, same
rounds; where a CPU is slow at 16-bit products, ours multiply in fp32 and pass 100%. The extra
memory is the peak of all tensors beyond the inputs and their gradients, which all contenders need
alike; `/ 4bD` is the same in units of one side's features in fp32.

Shapes:
    b: batch. D: feature width.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks import _common as common  # noqa: E402
from benchmarks._contenders import Contender, find_contenders  # noqa: E402
from benchmarks._inputs import DTYPES, Case  # noqa: E402

# The relative difference that storing gradients, and a softmax, in this dtype explains.
STORAGE_TOLERANCE = {"fp32": 0.0, "bf16": 2e-2, "fp16": 4e-3}
# On a CPU against the dense formula; on CUDA against Inf-CL, the machine's rate, and 4bD bytes.
DENSE_SPEEDUP, INF_CL_SPEEDUP, GEMM_FRACTION, EXTRA_FEATURES = 1.4, 10.0, 0.7, 8.0
TABLE = {
    "contender": "{contender}",
    "ms [range]": "{ms_median:,.1f} [{ms_min:,.1f}-{ms_max:,.1f}]",
    "x ours": "{time_ratio:.2f}",
    "GFLOP/s": "{gflops:,.0f}",
    "of GEMM": "{gemm_fraction:.0%}",
    "extra bytes": "{peak_extra_bytes:,}",
    "/ 4bD": "{peak_features:.1f}",
}
_TILE = {"cpu": 1024, "cuda": 8192}
_PROBE_SHARE = 8  # of the batch: a 64th of the work

Taken = dict[str, tuple[int, float]]  # the last batch of a contender, and its seconds


def check(contenders: Sequence[Contender], case: Case) -> tuple[dict[str, float], dict[str, str]]:
    """Compare everybody's loss and gradients with ours, the first that runs.

    The difference is the largest of four: of the loss and of the features' gradients, relative to
    ours in the Euclidean norm, and of the scale's gradient, relative to the sum of magnitudes
    `sum_i |<I_i, dL/dI_i>| / scale` of its terms, which may cancel.

    Returns:
        The differences of those that agree, and what is wrong with the others.

    Raises:
        RuntimeError: None of ours runs.
    """
    expected: list[torch.Tensor] = []
    sizes: list[float] = []
    differences: dict[str, float] = {}
    failures: dict[str, str] = {}
    for contender in contenders:
        if not expected and not contender.is_ours:
            break
        try:
            inputs = contender.inputs(case)
            found = [inputs.run(contender.loss).float()]
            found += [leaf.grad.float() for leaf in inputs.leaves if leaf.grad is not None]
        except Exception as error:
            failures[contender.name] = common.error_words(error)
            continue
        if not expected:
            expected = found
            terms_b = (inputs.image_bD.detach().float() * found[1]).sum(1) / case.scale
            sizes = [*(float(ours.norm()) for ours in found[:3]), float(terms_b.abs().sum())]
        pairs = zip(found, expected, sizes, strict=True)
        errors = [float((mine - ours).norm()) / size for mine, ours, size in pairs]
        difference = float(torch.tensor(errors).amax())  # Python's `max` may pass over a NaN
        tolerance = max(contender.tolerance, STORAGE_TOLERANCE[case.dtype])
        if difference <= tolerance:
            differences[contender.name] = difference
        else:
            failures[contender.name] = f"differs from ours by {difference:.1e} > {tolerance:.0e}"
    if not expected:
        raise RuntimeError(f"None of this package's losses ran: {failures}.")
    return differences, failures


def weigh(contender: Contender, case: Case) -> int | None:
    """Return the peak of a call beyond inputs and gradients, in bytes."""
    inputs = contender.inputs(case)
    try:
        peak = common.peak_bytes(lambda: inputs.run(contender.loss), case.place)
    except torch.OutOfMemoryError:
        return None
    return peak and peak - inputs.gradient_bytes


def gemm_steps(case: Case, square: int) -> tuple[dict[str, Callable[[], object]], float]:
    """Return plain matrix products to time, and the FLOP that each step does at least.

    Three shapes: `(t, D) x (D, t)`, the logits of a tile; `(t, t) x (t, D)`, its gradients; and a
    big square. Small products are repeated until all steps do about the same work.
    """
    tile = min(case.batch, _TILE.get(case.place.type, 1024))
    shapes = [(tile, case.width, tile), (tile, tile, case.width), (square, square, square)]
    flop = max(2.0 * math.prod(shape) for shape in shapes)
    steps: dict[str, Callable[[], object]] = {}
    for shape in shapes:
        options: dict[str, Any] = {"dtype": DTYPES[case.dtype], "device": case.place}
        left, right = torch.randn(shape[:2], **options), torch.randn(shape[1:], **options)
        out, calls = left @ right, max(1, round(flop / 2 / math.prod(shape)))
        steps[f"gemm {shape}"] = partial(_multiply, left, right, out, calls)
    return steps, flop


def _multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, calls: int) -> None:
    for _ in range(calls):
        torch.mm(left, right, out=out)


def too_slow(contender: Contender, case: Case, taken: Taken, limit: float | None) -> str | None:
    """Say what a call will take if that is too long: the last one's, or that of an eighth."""
    rows = max(64, case.batch // _PROBE_SHARE // 64 * 64)
    if limit is None or (contender.name not in taken and rows >= case.batch):
        return None
    if contender.name not in taken:
        step = {"": partial(contender.inputs(replace(case, batch=rows)).run, contender.loss)}
        try:
            probe = common.time_alternately(step, rounds=1, device=case.place)[""]
        except Exception:  # the comparison with ours says what is wrong
            return None
        taken[contender.name] = rows, probe.median
    batch, seconds = taken[contender.name]
    seconds *= (case.batch / batch) ** 2
    return None if seconds <= limit else f"predicted {seconds:,.1f} s a call, more than {limit:g} s"


def measure_case(case: Case, args: argparse.Namespace, taken: Taken) -> common.Report:
    """Measure one problem."""
    print(f"\nb={case.batch:,} D={case.width:,} {case.dtype} scale={case.scale:g}", flush=True)
    everybody, left_out = find_contenders(case, args.workspace)
    wanted = [text.lower() for text in args.only or [""]]
    asked = [c for c in everybody if c.is_ours or any(text in c.name.lower() for text in wanted)]
    slow = {c.name: too_slow(c, case, taken, args.max_seconds) for c in asked[1:]}
    left_out |= {name: why for name, why in slow.items() if why is not None}
    differences, failures = check([c for c in asked if c.name not in left_out], case)
    contenders = [c for c in asked if c.name in differences]
    peaks = {c.name: weigh(c, case) if args.memory else None for c in contenders}
    gemms, flop = gemm_steps(case, args.square)
    inputs, steps = case.inputs(), dict(gemms)
    for contender in contenders:
        own = inputs if contender.input_dtype is None else contender.inputs(case)
        steps[contender.name] = partial(own.run, contender.loss)
    limits = {"rounds": args.repeats, "max_seconds": args.max_seconds}
    spreads = common.time_alternately(steps, device=case.place, title="timing", **limits)
    rate = max(flop / spreads.pop(name).median for name in gemms)
    if contenders[0].name not in spreads:
        raise RuntimeError(f"{contenders[0].name} ran out of memory at b={case.batch}.")
    failures |= {c.name: common.OUT_OF_MEMORY for c in contenders if c.name not in spreads}
    taken |= {name: (case.batch, spread.median) for name, spread in spreads.items()}
    rows = []
    for name, spread in spreads.items():
        found = {
            **spread.columns,
            "time_ratio": common.median_ratio(spread, spreads[contenders[0].name]),
            "gflops": case.flop / spread.median / 1e9,
            "gemm_gflops": rate / 1e9,
            "gemm_fraction": case.flop / spread.median / rate,
            "peak_extra_bytes": peaks[name],
            "peak_features": peaks[name] and peaks[name] / (4 * case.batch * case.width),
            "max_relative_difference": differences[name],
        }
        rows.append(({"contender": name, **asdict(case)}, found))
    left_out |= failures
    said = [f"Left out: {name}: {why}" for name, why in left_out.items()]
    ours = {contender.name for contender in asked if contender.is_ours}
    sound = not any(name in ours or "differs" in why for name, why in failures.items())
    verdict = verdict_of([what | found for what, found in rows], left_out)
    return common.Report(rows, TABLE, [*said, verdict], sound)


def verdict_of(rows: Sequence[dict[str, Any]], left_out: dict[str, str]) -> str:
    """Return what the figures, ours first, say against the targets; each may be undecided."""
    ours, on_cuda = rows[0], rows[0]["device"].startswith("cuda")
    peer, target = ("Inf-CL", INF_CL_SPEEDUP) if on_cuda else ("dense", DENSE_SPEEDUP)
    ratio = min((r["time_ratio"] for r in rows if r["contender"].startswith(peer)), default=None)
    why = next((why for name, why in left_out.items() if name.startswith(peer)), "not asked for")
    peak = ours["peak_features"]
    gradients = 2 * DTYPES[ours["dtype"]].itemsize / 4
    found: list[tuple[str, bool | None]] = [
        (f"{ours['gemm_fraction']:.0%} of GEMM (target: {GEMM_FRACTION:.0%})",
         ours["gemm_fraction"] >= GEMM_FRACTION if on_cuda else None),
        (f"not compared with {peer}, {why}", None) if ratio is None else
        (f"{ratio:.2f}x as fast as {peer} (target: {target:g}x)", ratio >= target),
        ("not weighed", None) if peak is None else
        (f"{peak + gradients:.1f} x 4bD bytes with gradients (target: {EXTRA_FEATURES:g})",
         peak + gradients <= EXTRA_FEATURES if on_cuda else None),
    ]  # fmt: skip
    words = {True: "met", False: "missed", None: "open"}
    return f"{ours['contender']}: " + "; ".join(f"{text}: {words[met]}" for text, met in found)


def measure(args: argparse.Namespace) -> Iterator[common.Report]:
    """Measure all widths, dtypes and batches."""
    for width, dtype in itertools.product(args.width, args.dtype):
        taken: Taken = {}
        for batch in sorted(args.batch):
            yield measure_case(Case(batch, width, dtype, args.scale, args.device), args, taken)


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of this benchmark."""
    positive = common.positive
    add("--batch", type=positive, nargs="+", default=[8192], help="batch sizes, one table each")
    add("--width", type=positive, nargs="+", default=[512], help="feature widths")
    add("--dtype", choices=DTYPES, nargs="+", default=["fp32"], help="dtypes of the features")
    add("--repeats", type=positive, default=7, help="rounds that count")
    add("--workspace", type=positive, nargs="+", default=[], help="MiB to try beside ours' own")
    add("--max-seconds", type=float, help="leaves out whose call would take longer; bounds rounds")
    add("--only", nargs="+", metavar="TEXT", help="ours, and contenders with such a name")
    add("--scale", type=float, default=100.0, help="logit scale; CLIP trains from 14.3 to 100")
    square = 8192 if torch.cuda.is_available() else 4096
    add("--square", type=positive, default=square, help="edge of the big square GEMM")
    add("--memory", action=argparse.BooleanOptionalAction, default=True, help="weigh memory too")


QUICK = {"batch": [256], "width": [64], "repeats": 2, "square": 256}
BENCHMARK = common.Benchmark("contrastive_loss", __doc__, add_options, measure, QUICK)
main, parse = BENCHMARK.main, BENCHMARK.parse

if __name__ == "__main__":
    raise SystemExit(main())
