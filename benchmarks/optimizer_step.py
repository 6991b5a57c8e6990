"""Time and memory traffic of one optimizer step of AdamW, over the weights of a ViT.

    python benchmarks/optimizer_step.py --size B16 L16

**Contenders** are SafeAdamW, torch's AdamW and, if it is installed (`pip install torch-optimi`),
optimi's AdamW. fp16 weights have Kahan residuals. optimi stores its states in the dtype of the
weights, which takes less traffic but computes in another precision. torch's AdamW is not measured
on fp16 weights, where it gives NaN.

**Bytes** are the least traffic of a step: weights, both moments and residuals are read and written,
gradients are read, and clipping reads gradients and second moments once more. `of copy` is the
bandwidth of these bytes relative to the bandwidth of `Tensor.copy_` of fp32 values in the same
rounds, the bound in practice. `error` is the largest difference from AdamW in float64 after three
steps on 10,007 weights, relative to the largest change; a contender with more than 5% is left out.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks import _common as common
from lightning_mp.optim.safe_adamw import SafeAdamW
from papers._vit import SIZES, ViT

BASE, COPY = "torch fused fp32", "copy"
TARGET_FRACTION = 0.85  # fraction of the bandwidth of a copy, on CUDA
TOLERANCE = 0.05
FP32, FP16 = torch.float32, torch.float16
TABLE = {
    "contender": "{contender}",
    "ms [range]": "{ms_median:,.2f} [{ms_min:,.2f}-{ms_max:,.2f}]",
    f"x {BASE}": "{speedup:.2f}",
    "bytes/weight": "{bytes_per_element}",
    "GB/s": "{gb_per_second:,.1f}",
    "of copy": "{copy_fraction:.0%}",
    "error": "{error:.1e}",
}
_OPTIONS: dict[str, Any] = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=1e-2)


class TimedOptimizer(NamedTuple):
    """An optimizer to time, and the least memory traffic of its step for each weight."""

    make: Callable[[Sequence[Tensor]], Any]
    dtype: torch.dtype  # dtype of weights and gradients
    bytes_per_element: int
    needs_gpu: bool = False  # its bandwidth has a target


def _optimi(params: Sequence[Tensor]) -> Any:
    import optimi

    return optimi.AdamW(params, **_OPTIONS)


_fused = partial(SafeAdamW, fused=True, **_OPTIONS)
_clipped = partial(_fused, clip_update_rms=1e3)  # a bound that no update reaches
_foreach = partial(SafeAdamW, foreach=True, **_OPTIONS)
# Bytes for each weight. fp32: 2 x 4 for the weight and each moment, 4 for the gradient. fp16: 2 x 2
# for weight and residual each, 2 for the gradient, moments as in fp32. Clipping reads the gradient
# and the second moment once more.
CONTENDERS = {
    "SafeAdamW fused fp32": TimedOptimizer(_fused, FP32, 28, needs_gpu=True),
    "SafeAdamW fused fp16": TimedOptimizer(_fused, FP16, 26, needs_gpu=True),
    "SafeAdamW fused fp32 clip": TimedOptimizer(_clipped, FP32, 36, needs_gpu=True),
    "SafeAdamW fused fp16 clip": TimedOptimizer(_clipped, FP16, 32, needs_gpu=True),
    "SafeAdamW foreach fp32": TimedOptimizer(_foreach, FP32, 28),
    "SafeAdamW foreach fp16": TimedOptimizer(_foreach, FP16, 26),
    BASE: TimedOptimizer(partial(torch.optim.AdamW, fused=True, **_OPTIONS), FP32, 28),
    "torch foreach fp32": TimedOptimizer(
        partial(torch.optim.AdamW, foreach=True, **_OPTIONS), FP32, 28
    ),
    "optimi fp32": TimedOptimizer(_optimi, FP32, 28),
    "optimi fp16": TimedOptimizer(_optimi, FP16, 18),
}


def shapes_of(size: str) -> list[torch.Size]:
    """Return the shapes of the weights of a ViT."""
    with torch.device("meta"):
        model = ViT(SIZES[size], image=224, classes=1000)
    return [param.shape for param in model.parameters()]


def error_against_float64(contender: TimedOptimizer, device: torch.device, steps: int = 3) -> float:
    """Return the largest difference from AdamW in float64, relative to the largest change."""
    generator = torch.Generator().manual_seed(0)
    # 10,007 is a prime, so the last block of a kernel is not full.
    weight, *gradients = torch.randn(1 + steps, 10_007, generator=generator).to(contender.dtype)
    mine = weight.to(device, copy=True).requires_grad_()
    exact = weight.double().requires_grad_()
    # `foreach=False`, so that no multi-tensor kernel is compared with itself.
    optimizers = contender.make([mine]), torch.optim.AdamW([exact], foreach=False, **_OPTIONS)
    for gradient in gradients:
        mine.grad, exact.grad = gradient.to(device), gradient.double()
        for optimizer in optimizers:
            optimizer.step()
    difference = (mine.detach().double().cpu() - exact.detach()).abs().amax()
    if contender.dtype != FP32:  # the rounding error of half-precision weights does not count
        difference -= exact.detach().abs().amax() * torch.finfo(contender.dtype).eps / 2
    return max(0.0, difference.item()) / (exact.detach() - weight.double()).abs().amax().item()


def prepared_step(
    name: str, gradients: dict[torch.dtype, list[Tensor]], device: torch.device
) -> tuple[Callable[[], object], float]:
    """Return a contender's step over random weights, and its error against float64."""
    contender = CONTENDERS[name]
    if contender.needs_gpu and device.type != "cuda":
        raise common.LeftOut("needs a GPU")
    error = error_against_float64(contender, device)
    # Not `error > TOLERANCE`, which is false for NaN.
    if not error <= TOLERANCE:
        raise ValueError(f"differs from float64 by {error:.0%} of the change")
    params = []
    for gradient in gradients[contender.dtype]:
        params.append((torch.randn_like(gradient) * 0.02).requires_grad_())
        params[-1].grad = gradient
    return contender.make(params).step, error


def measure(args: argparse.Namespace) -> Iterator[common.Report]:
    """Measure each size."""
    for size in args.size:
        shapes = shapes_of(size)
        count = sum(shape.numel() for shape in shapes)
        print(f"\nViT-{size}, {count:,} weights in {len(shapes)} tensors", flush=True)
        gradients = {  # shared by contenders of one dtype
            dtype: [torch.randn(shape, device=args.device).to(dtype) for shape in shapes]
            for dtype in {CONTENDERS[name].dtype for name in args.contenders}
        }
        makers = {
            name: partial(prepared_step, name, gradients, args.device) for name in args.contenders
        }
        prepared, left_out = common.take_turns(makers)
        steps = {name: step for name, ((step, _),) in prepared.items()}
        target, source = torch.zeros(2, count, device=args.device)
        steps[COPY] = partial(target.copy_, source)
        limits = args.device, args.rounds, args.max_seconds, size
        spreads, later = common.time_in_turn(steps, *limits)
        copy, base = spreads.pop(COPY), spreads.get(BASE)
        rows, said = [], []
        for name, seconds in sorted(spreads.items(), key=lambda item: median(item[1])):
            moved, ((_, error),) = CONTENDERS[name].bytes_per_element, prepared[name]
            what = {"contender": name, "size": size, "parameters": count, "tensors": len(shapes)}
            found = {
                **common.time_columns(seconds),
                "speedup": common.median_ratio(base, seconds),
                "gb_per_second": moved * count / median(seconds) / 1e9,
                "copy_gb_per_second": 8 * count / median(copy) / 1e9,
                # A copy moves 8 bytes a value: it reads 4 and writes 4.
                "copy_fraction": moved / 8 * common.median_ratio(copy, seconds),
                "error": error,
            }
            rows.append(({**what, "device": args.device, "bytes_per_element": moved}, found))
            if CONTENDERS[name].needs_gpu:
                said.append(verdict_of(name, found["copy_fraction"]))
        left_out |= later
        ours = [why for name, why in left_out.items() if name.startswith("SafeAdamW")]
        sound = not any(why.startswith("failed") for why in ours)
        yield common.Report(rows, TABLE, said, left_out, sound)


def verdict_of(name: str, share: float) -> str:
    """Return the verdict on a fused step's bandwidth, as a share of a copy's bandwidth."""
    target = f"{TARGET_FRACTION:.0%}"
    return common.verdict(f"{name}: {share:.0%} of a copy", target, share >= TARGET_FRACTION)


OPTIONS = {
    "size": dict(choices=SIZES, default=["B16"], toy=["tiny"], help="a table each"),
    "contenders": dict(choices=CONTENDERS, default=[*CONTENDERS], help="contenders to time"),
    "rounds": dict(default=20, toy=2, help="timed rounds"),
    "max-seconds": dict(type=float, help="limit of the timed steps of one contender"),
}
main = common.Benchmark("optimizer_step", __doc__, measure, OPTIONS)

if __name__ == "__main__":
    raise SystemExit(main())
