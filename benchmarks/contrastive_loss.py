"""Time and peak memory of the contrastive loss, forward and backward, against its peers.

    python benchmarks/contrastive_loss.py --batch 8192 16384 --width 512 768

**Contenders**: `lightning_mp.ContrastiveLoss` with every backend that runs on the device; the dense
formula of OpenCLIP (its own `ClipLoss` where `open_clip` imports); torch's chunked
`linear_cross_entropy`, once a direction. On CUDA also: the dense loss under bf16 autocast; big
tiles by cuBLAS with elementwise torch, eager and compiled (`_chunked.py`); and Inf-CL (`pip install
inf_cl`), which takes fp32 storage only, once with unrounded features and once with the values that
ours get. Gradients are taken for both features and the scale. What cannot run is named with its
reason, as is what would take longer than `--max-seconds` a call (see `_budget.py`).

**Order**: first every contender's loss and gradients are compared with ours, then memory is
weighed, then all are timed in turn (A B C A B C) together with plain matrix products.

**Figures**: `ms` is the median and range over rounds; `x ours` the median of the ratios within
rounds. The rate counts four units of 2 b^2 D FLOP for everybody, which is what ours does; a dense
loss does six for the same result, Inf-CL ten. `of GEMM` is that rate over the machine's own: the
best median of a tile's logits product, its gradient product and a big square, same dtype, same
rounds; where a CPU is slow at 16-bit products, ours multiply in fp32 and pass 100%. The extra
memory is the peak beyond the inputs and their gradients, which all contenders need alike; `/ 4bD`
is the same in units of one side's features in fp32. On a CPU it is resident memory in a fresh
process, see `_peak_memory.py`.

Shapes:
    b: batch. D: feature width.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a script only this folder is importable

import torch  # noqa: E402

from benchmarks._budget import Budget  # noqa: E402
from benchmarks._common import (  # noqa: E402
    CsvTable,
    Spread,
    environment,
    gemm_steps,
    load_warning,
    median_ratio,
    pick_device,
    time_alternately,
)
from benchmarks._contenders import Contender, find_contenders  # noqa: E402
from benchmarks._inputs import DTYPES, Case  # noqa: E402
from benchmarks._peak_memory import Job, peak_cpu_bytes, peak_cuda_bytes  # noqa: E402
from benchmarks._report import Row, table_of, verdict_of  # noqa: E402
from lightning_mp.contrastive.torch_tiles import TorchTiles  # noqa: E402

__all__ = ["main"]

DEFAULT_CSV = Path("benchmarks/results/contrastive_loss.csv")
MEASURED = (
    "repeats",
    "ms_median",
    "ms_min",
    "ms_max",
    "time_ratio",
    "gflops",
    "gemm_gflops",
    "gemm_fraction",
    "peak_extra_bytes",
    "max_relative_difference",
)
# The relative difference that storing gradients, and a softmax, in this dtype explains.
STORAGE_TOLERANCE = {"fp32": 0.0, "bf16": 2e-2, "fp16": 4e-3}


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
            found, terms = _outcome(contender, case)
        except Exception as error:
            failures[contender.name] = f"{type(error).__name__}: {str(error).partition('.')[0]}"
            continue
        if not expected:
            expected = found
            sizes = [*(float(ours.norm()) for ours in found[:3]), terms]
        # Python's `max` may pass over a NaN.
        difference = float(
            torch.tensor(
                [
                    float((mine - ours).norm()) / size
                    for mine, ours, size in zip(found, expected, sizes, strict=True)
                ]
            ).amax()
        )
        tolerance = max(contender.tolerance, STORAGE_TOLERANCE[case.dtype])
        if difference <= tolerance:
            differences[contender.name] = difference
            print(f"  agrees: {contender.name}, {difference:.1e} (tolerance {tolerance:.0e})")
        else:
            failures[contender.name] = (
                f"differs from ours by {difference:.1e}, more than its tolerance {tolerance:.0e}"
            )
    if not expected:
        raise RuntimeError(f"None of this package's losses ran: {failures}.")
    return differences, failures


def _outcome(contender: Contender, case: Case) -> tuple[list[torch.Tensor], float]:
    """Return the loss and its gradients in fp32, and the size of the scale gradient's terms."""
    if case.place.type == "cuda":
        torch.cuda.empty_cache()  # one that runs out of memory should do so on its own account
    inputs = contender.inputs(case)
    loss = inputs.run(contender.loss)
    leaves = (inputs.image_bD, inputs.text_bD, inputs.scale)
    found = [loss.float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)]
    terms_b = (inputs.image_bD.detach().float() * found[1]).sum(1) / case.scale
    return found, float(terms_b.abs().sum())


def weigh(contenders: Sequence[Contender], case: Case, threads: int) -> dict[str, int | None]:
    """Return the peak extra memory of each contender in bytes."""
    figures: list[int | None]
    if case.place.type == "cuda":
        figures = [_weigh_on_cuda(contender, case) for contender in contenders]
    elif case.place.type == "cpu":
        target = "benchmarks._contenders:memory_passes"
        figures = peak_cpu_bytes(
            [
                Job(target, {"name": contender.name, "threads": threads, **asdict(case)})
                for contender in contenders
            ]
        )
    else:
        figures = [None] * len(contenders)
    return dict(zip((contender.name for contender in contenders), figures, strict=True))


def _weigh_on_cuda(contender: Contender, case: Case) -> int | None:
    torch.cuda.empty_cache()
    try:
        return peak_cuda_bytes(contender.passes(case), case.place)
    except torch.OutOfMemoryError:
        return None


def time_case(
    contenders: Sequence[Contender],
    case: Case,
    *,
    repeats: int,
    square: int,
    max_seconds: float | None = None,
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
        own = inputs if contender.input_dtype is None else contender.inputs(case)
        steps[contender.name] = partial(own.run, contender.loss)
    spreads = time_alternately(
        steps, rounds=repeats, device=case.place, title="timing", max_seconds=max_seconds
    )
    if contenders[0].name not in spreads:
        raise RuntimeError(f"{contenders[0].name} ran out of memory at b={case.batch}.")
    rates = {name: gemm_flop / spreads.pop(name).median for name in gemms}
    for name, rate in rates.items():
        print(f"  {name}: {rate / 1e9:,.0f} GFLOP/s")
    return spreads, max(rates.values())


def run_case(
    case: Case, args: argparse.Namespace, facts: dict[str, Any], budget: Budget
) -> tuple[list[Row], dict[str, str], bool]:
    """Measure one problem.

    Returns:
        Its rows, ours first; why others were left out; whether ours ran and everybody agreed.
    """
    print(
        f"\nb={case.batch:,} D={case.width:,} {case.dtype} scale={case.scale:g} on "
        f"{facts['device_name']}, threads={facts['threads']}, torch {facts['torch']}",
        flush=True,
    )
    contenders, left_out = find_contenders(case.batch, case.width, DTYPES[case.dtype], case.place)
    if args.only is not None:
        contenders = [each for each in contenders if each.is_ours or _named(each, args.only)]
    for contender in contenders[1:]:
        reason = budget.reason_to_skip(contender, case)
        if reason is not None:
            left_out[contender.name] = reason
    contenders = [contender for contender in contenders if contender.name not in left_out]
    differences, failures = check(contenders, case)
    left_out |= failures
    for name, reason in left_out.items():
        print(f"  left out: {name}: {reason}")
    ours = {contender.name for contender in contenders if contender.is_ours}
    contenders = [contender for contender in contenders if contender.name in differences]
    peaks = weigh(contenders, case, int(facts["threads"])) if args.memory else {}
    spreads, gemm_rate = time_case(
        contenders,
        case,
        repeats=args.repeats,
        square=args.square,
        max_seconds=args.max_seconds,
    )
    for name, spread in spreads.items():
        budget.note(name, case, spread.median)
    for contender in contenders:
        if contender.name not in spreads:
            left_out[contender.name] = "ran out of memory beside the others' inputs"
            print(f"  left out: {contender.name}: {left_out[contender.name]}")
    base = spreads[contenders[0].name]
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    rows = [
        Row(
            date=date,
            contender=name,
            **asdict(case),
            repeats=len(spread.seconds),
            ms_median=spread.median * 1e3,
            ms_min=min(spread.seconds) * 1e3,
            ms_max=max(spread.seconds) * 1e3,
            time_ratio=median_ratio(spread, base),
            gflops=case.flop / spread.median / 1e9,
            gemm_gflops=gemm_rate / 1e9,
            gemm_fraction=case.flop / spread.median / gemm_rate,
            peak_extra_bytes=peaks.get(name),
            max_relative_difference=differences[name],
            **facts,
        )
        for name, spread in spreads.items()
    ]
    sound = not any(name in ours or "differs" in why for name, why in failures.items())
    return rows, left_out, sound


def _named(contender: Contender, texts: Sequence[str]) -> bool:
    return any(text.lower() in contender.name.lower() for text in texts)


def parse(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Read the command line; `--quick` replaces what was not given."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--batch", type=_positive, nargs="+", default=[8192], help="batch sizes, one table each")
    add("--width", type=_positive, nargs="+", default=[512], help="feature widths")
    add("--dtype", choices=DTYPES, nargs="+", default=["fp32"], help="dtypes of the features")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--repeats", type=_positive, default=7, help="rounds that count")
    add(
        "--max-seconds",
        type=_seconds,
        help="leave out whose call would take longer; also bounds "
        "the rounds of one contender together",
    )
    add("--only", nargs="+", metavar="TEXT", help="ours, and contenders with such a name")
    add("--scale", type=float, default=100.0, help="logit scale; CLIP trains from 14.3 to 100")
    add("--threads", type=_positive, default=torch.get_num_threads(), help="CPU threads")
    square = 8192 if torch.cuda.is_available() else 4096
    add("--square", type=_positive, default=square, help="edge of the big square GEMM")
    add("--memory", action=argparse.BooleanOptionalAction, default=True, help="weigh memory too")
    add("--csv", type=Path, default=DEFAULT_CSV, help="file that rows are appended to")
    add("--quick", action="store_true", help="rehearse at toy size; appends only to a given --csv")
    if "--quick" in (sys.argv[1:] if argv is None else argv):
        parser.set_defaults(batch=[256], width=[64], repeats=2, square=256, csv=None)
    return parser, parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if ours failed or somebody disagreed."""
    parser, args = parse(argv)
    try:
        device = pick_device(args.device)
        path = ROOT / DEFAULT_CSV if args.csv == DEFAULT_CSV else args.csv
        csv_table = None if path is None else CsvTable(path, list(Row.__annotations__), MEASURED)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    warning = load_warning()
    if warning is not None:
        print(warning)
    torch.set_num_threads(args.threads)
    facts = environment(torch.device(device))
    all_sound = True
    budget = Budget(args.max_seconds)
    for width, dtype, batch in itertools.product(args.width, args.dtype, sorted(args.batch)):
        case = Case(batch, width, dtype, args.scale, device)
        rows, left_out, sound = run_case(case, args, facts, budget)
        all_sound &= sound
        if csv_table is not None:
            csv_table.append([asdict(row) for row in rows])
        print(f"\n{table_of(rows)}\n\n{verdict_of(rows, left_out)}", flush=True)
    return 0 if all_sound else 1


if __name__ == "__main__":
    raise SystemExit(main())
