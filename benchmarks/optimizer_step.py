"""Time and memory traffic of one optimizer step of AdamW, over the weights of a ViT.

    python benchmarks/optimizer_step.py --size B16 L16

**Contenders**: `lightning_mp`'s SafeAdamW as one fused kernel and as foreach kernels, on fp32
weights and on fp16 weights with Kahan residuals, and fused with the clip of the update's RMS;
`torch.optim.AdamW` fused and foreach on fp32 weights; and, where it is installed
(`pip install torch-optimi`), `optimi.AdamW` on both. States of SafeAdamW are fp32. Those of optimi
have the dtype of the weights, which is less to move, and not the same arithmetic. torch's AdamW on
fp16 weights gives NaN, and is left out.

**Bytes**: what a step has to move if it reads and writes each of its tensors once: weights, both
moments and residuals twice, gradients once; the clip reads gradients and second moments once more.
Whoever makes more passes moves more than that, and shows less bandwidth here.

**Bandwidth**: these bytes by the time, and next to it that of `Tensor.copy_` of fp32 values, timed
in turn with the contenders. A copy does nothing else, so its bandwidth is the bound in practice.

**Sameness**: before the timing each contender takes three steps on few weights. `error` is the
largest difference from AdamW in float64, relative to the largest change. One that is not finite or
further off than 5% is named and not ranked.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a script only this folder is importable

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks._common import (  # noqa: E402
    CsvTable,
    Spread,
    environment,
    format_table,
    load_warning,
    median_ratio,
    pick_device,
    time_alternately,
)
from benchmarks._vit import SIZES, ViT  # noqa: E402
from lightning_mp.optim.safe_adamw import SafeAdamW  # noqa: E402

__all__ = ["CONTENDERS", "Contender", "Row", "main"]

DEFAULT_CSV = Path("benchmarks/results/optimizer_step.csv")
MEASURED = (
    "rounds",
    "ms_median",
    "ms_min",
    "ms_max",
    "speedup",
    "gb_per_second",
    "copy_gb_per_second",
    "copy_fraction",
    "error",
)
BASE, COPY = "torch fused fp32", "copy"
# Of the bandwidth of a copy, on CUDA.
TARGET_FRACTION = 0.85
TOLERANCE = 0.05
OUT_OF_MEMORY = "ran out of memory"
_OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 1e-2}
_GIGA = 1e9


class Contender(NamedTuple):
    """Who is timed.

    Args:
        make: Makes the optimizer of parameters.
        dtype: Of weights and gradients.
        state: Of the two moments.
        has_residual: Whether each weight has one, in its dtype.
        is_clipped: Whether gradients and second moments are read once more.
        needs_gpu: Whether it cannot run on a CPU.
        is_ours: Whether its failure is the run's, and its bandwidth is held against the target.
    """

    make: Callable[[Sequence[Tensor]], Any]
    dtype: torch.dtype
    state: torch.dtype
    has_residual: bool = False
    is_clipped: bool = False
    needs_gpu: bool = False
    is_ours: bool = False

    @property
    def bytes_per_element(self) -> int:
        """What a step moves if it reads and writes each tensor once."""
        weight, state = self.dtype.itemsize, self.state.itemsize
        moved = 2 * weight + weight + 2 * 2 * state  # the gradient has the dtype of the weight
        if self.has_residual:
            moved += 2 * weight
        return moved + (weight + state if self.is_clipped else 0)


def _ours(dtype: torch.dtype, *, clip: float | None = None, fused: bool) -> Contender:
    return Contender(
        lambda params: SafeAdamW(
            params, fused=fused, foreach=not fused, clip_update_rms=clip, **_OPTIONS
        ),
        dtype, torch.float32, dtype != torch.float32, clip is not None, fused, True,
    )  # fmt: skip


def _torch(kind: str) -> Contender:
    return Contender(
        lambda params: torch.optim.AdamW(params, **{kind: True}, **_OPTIONS),
        torch.float32, torch.float32,
    )  # fmt: skip


def _optimi(dtype: torch.dtype) -> Contender:
    def make(params: Sequence[Tensor]) -> Any:
        import optimi

        return optimi.AdamW(params, **_OPTIONS)

    return Contender(make, dtype, dtype, dtype != torch.float32)


FP32, FP16 = torch.float32, torch.float16
CONTENDERS = {
    "SafeAdamW fused fp32": _ours(FP32, fused=True),
    "SafeAdamW fused fp16": _ours(FP16, fused=True),
    "SafeAdamW fused fp32 clip": _ours(FP32, fused=True, clip=1e3),  # so high that it never bites
    "SafeAdamW fused fp16 clip": _ours(FP16, fused=True, clip=1e3),
    "SafeAdamW foreach fp32": _ours(FP32, fused=False),
    "SafeAdamW foreach fp16": _ours(FP16, fused=False),
    BASE: _torch("fused"),
    "torch foreach fp32": _torch("foreach"),
    "optimi fp32": _optimi(FP32),
    "optimi fp16": _optimi(FP16),
}


@dataclass(frozen=True)
class Row:
    """One line of the CSV file; empty are figures that do not exist there."""

    date: str
    contender: str
    size: str
    parameters: int
    tensors: int
    device: str
    rounds: int
    ms_median: float
    ms_min: float
    ms_max: float
    speedup: float | None  # over torch's fused AdamW on fp32 weights
    bytes_per_element: int
    gb_per_second: float
    copy_gb_per_second: float
    copy_fraction: float
    error: float
    device_name: str
    threads: str
    python: str
    torch: str
    triton: str
    lightning_mp: str


def shapes_of(size: str) -> list[torch.Size]:
    """Return the shapes of the weights of a ViT."""
    with torch.device("meta"):
        model = ViT(SIZES[size], image=224, classes=1000, pool="cls", layout="nld")
    return [param.shape for param in model.parameters()]


def reason_against(name: str, device: torch.device) -> str | None:
    """Return why a contender cannot run here, or `None`."""
    if CONTENDERS[name].needs_gpu and device.type != "cuda":
        return "needs a GPU"
    if name.startswith("optimi") and importlib.util.find_spec("optimi") is None:
        return "torch-optimi is not installed"
    return None


def error_of(contender: Contender, device: torch.device, steps: int = 3) -> float:
    """Return how far a contender is from AdamW in float64, relative to the largest change."""
    generator = torch.Generator().manual_seed(0)
    weight, *gradients = (
        torch.randn(10_007, generator=generator).to(contender.dtype) for _ in range(1 + steps)
    )
    mine = weight.to(device, copy=True).requires_grad_()
    exact = weight.double().requires_grad_()
    optimizers = contender.make([mine]), torch.optim.AdamW([exact], foreach=False, **_OPTIONS)
    for gradient in gradients:
        mine.grad, exact.grad = gradient.to(device), gradient.double()
        for optimizer in optimizers:
            optimizer.step()
    difference = (mine.detach().double().cpu() - exact.detach()).abs().amax()
    if contender.dtype != torch.float32:  # a half weight shows no more than its format
        difference -= exact.detach().abs().amax() * torch.finfo(contender.dtype).eps / 2
    return max(0.0, difference.item()) / (exact.detach() - weight.double()).abs().amax().item()


def set_up(
    names: Sequence[str], shapes: Sequence[torch.Size], device: torch.device
) -> tuple[dict[str, Callable[[], object]], dict[str, float], dict[str, str]]:
    """Return the steps to time, the error of each, and why others are left out.

    Contenders of one dtype share their gradients.
    """
    steps: dict[str, Callable[[], object]] = {}
    errors: dict[str, float] = {}
    left_out: dict[str, str] = {}
    grads: dict[torch.dtype, list[Tensor]] = {}
    for name in names:
        contender, reason = CONTENDERS[name], reason_against(name, device)
        try:
            if reason is None:
                errors[name] = error_of(contender, device)
                if not errors[name] <= TOLERANCE:
                    reason = f"differs from float64 by {errors[name]:.0%} of the change"
            if reason is None:
                if contender.dtype not in grads:
                    grads[contender.dtype] = [
                        torch.randn(shape, device=device).to(contender.dtype) for shape in shapes
                    ]
                params = []
                for gradient in grads[contender.dtype]:
                    params.append((torch.randn_like(gradient) * 0.02).requires_grad_())
                    params[-1].grad = gradient
                steps[name] = contender.make(params).step
        except Exception as error:
            reason = reason_of(error)
        if reason is not None:
            left_out[name] = reason
    return steps, errors, left_out


def reason_of(error: Exception) -> str:
    """Return why a contender failed, in words for the eye."""
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return OUT_OF_MEMORY
    return f"failed: {type(error).__name__}: {str(error).partition('. ')[0]}"


def run_size(
    size: str, args: argparse.Namespace, device: torch.device, facts: Mapping[str, str]
) -> tuple[list[Row], dict[str, str]]:
    """Measure one size; return its rows, the fastest first, and why others were left out."""
    shapes = shapes_of(size)
    count = sum(shape.numel() for shape in shapes)
    print(
        f"\nViT-{size}, {count:,} weights in {len(shapes)} tensors on {facts['device_name']}, "
        f"threads={facts['threads']}, torch {facts['torch']}",
        flush=True,
    )
    steps, errors, left_out = set_up(args.contenders, shapes, device)
    source = torch.zeros(count, device=device)
    target = torch.empty_like(source)
    spreads = time_alternately(
        {COPY: lambda: target.copy_(source), **steps},
        rounds=args.rounds, device=device, title=size, max_seconds=args.max_seconds,
    )  # fmt: skip
    left_out |= {name: OUT_OF_MEMORY for name in steps if name not in spreads}
    copy = spreads.pop(COPY)
    rows = [
        _row(name, spread, copy, spreads.get(BASE), size, shapes, device, errors[name], facts)
        for name, spread in spreads.items()
    ]
    return sorted(rows, key=lambda row: row.ms_median), left_out


def _row(
    name: str,
    spread: Spread,
    copy: Spread,
    base: Spread | None,
    size: str,
    shapes: Sequence[torch.Size],
    device: torch.device,
    error: float,
    facts: Mapping[str, str],
) -> Row:
    count, each = sum(shape.numel() for shape in shapes), CONTENDERS[name].bytes_per_element
    of_copy = 2 * FP32.itemsize
    return Row(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        contender=name,
        size=size,
        parameters=count,
        tensors=len(shapes),
        device=str(device),
        rounds=len(spread.seconds),
        ms_median=spread.median * 1e3,
        ms_min=min(spread.seconds) * 1e3,
        ms_max=max(spread.seconds) * 1e3,
        speedup=None if base is None else median_ratio(base, spread),
        bytes_per_element=each,
        gb_per_second=each * count / spread.median / _GIGA,
        copy_gb_per_second=of_copy * count / copy.median / _GIGA,
        copy_fraction=each / of_copy * median_ratio(copy, spread),
        error=error,
        **facts,
    )


def table_of(rows: Sequence[Row]) -> str:
    """Return the figures of one size for the eye."""
    header = "contender", "ms [range]", f"x {BASE}", "bytes/weight", "GB/s", "of copy", "error"
    lines = [
        (
            row.contender,
            f"{row.ms_median:,.2f} [{row.ms_min:,.2f}-{row.ms_max:,.2f}]",
            "-" if row.speedup is None else f"{row.speedup:.2f}",
            str(row.bytes_per_element),
            f"{row.gb_per_second:,.1f}",
            f"{row.copy_fraction:.0%}",
            f"{row.error:.1e}",
        )
        for row in rows
    ]
    return format_table(header, lines)


def verdict_of(rows: Sequence[Row], left_out: Mapping[str, str]) -> str:
    """Return what the figures say against the target, in words."""
    said = [f"Not ranked: {name}: {why}." for name, why in left_out.items()]
    if not rows:
        return "\n".join([*said, "Skipped: no contender finished."])
    said.append(f"A copy moves {rows[0].copy_gb_per_second:,.1f} GB/s.")
    if torch.device(rows[0].device).type != "cuda":
        said.append("No verdict on bandwidth: the fused kernel is for GPUs.")
        return "\n".join(said)
    judged = [row for row in rows if CONTENDERS[row.contender].needs_gpu]
    for row in judged:
        is_met = row.copy_fraction >= TARGET_FRACTION
        said.append(
            f"{row.contender} reaches {row.copy_fraction:.0%} of that "
            f"(target: {TARGET_FRACTION:.0%}): {'met' if is_met else 'missed'}."
        )
    if not judged:
        said.append("No fused step of ours ran: open.")
    return "\n".join(said)


def parse(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Read the command line; `--quick` replaces what was not given."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--size", choices=SIZES, nargs="+", default=["B16"], help="ViTs, one table each")
    add("--contenders", choices=CONTENDERS, nargs="+", default=[*CONTENDERS], help="who is timed")
    add("--rounds", type=_positive, default=20, help="rounds that count")
    add("--max-seconds", type=float, help="bounds the timed steps of one contender together")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--threads", type=_positive, default=torch.get_num_threads(), help="CPU threads")
    add("--csv", type=Path, default=DEFAULT_CSV, help="file that rows are appended to")
    add("--quick", action="store_true", help="rehearse at toy size; appends only to a given --csv")
    if "--quick" in (sys.argv[1:] if argv is None else argv):
        parser.set_defaults(size=["tiny"], rounds=2, csv=None)
    return parser, parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if one of ours failed or is wrong."""
    parser, args = parse(argv)
    try:
        device = torch.device(pick_device(args.device))
        path = ROOT / DEFAULT_CSV if args.csv == DEFAULT_CSV else args.csv
        csv_table = None if path is None else CsvTable(path, list(Row.__annotations__), MEASURED)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    warning = load_warning()
    if warning is not None:
        print(warning)
    torch.set_num_threads(args.threads)
    facts, all_sound = environment(device), True
    for size in args.size:
        rows, left_out = run_size(size, args, device, facts)
        if csv_table is not None:
            csv_table.append([asdict(row) for row in rows])
        print(f"\n{table_of(rows)}\n" if rows else "", verdict_of(rows, left_out), sep="\n")
        all_sound &= not any(
            CONTENDERS[name].is_ours and why.startswith(("failed", "differs"))
            for name, why in left_out.items()
        )
    return 0 if all_sound else 1


if __name__ == "__main__":
    raise SystemExit(main())
