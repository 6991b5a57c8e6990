"""Time and memory traffic of one optimizer step of AdamW, over the weights of a ViT.

    python benchmarks/optimizer_step.py --size B16 L16

**Contenders** are SafeAdamW, torch's AdamW and, where it is installed (`pip install torch-optimi`),
optimi's; fp16 weights have Kahan residuals. States of optimi have the dtype of the weights, which
is less to move, and not the same arithmetic. torch's AdamW on fp16 weights gives NaN.

**Bytes**: what a step has to move if it reads and writes each of its tensors once: weights, both
moments and residuals twice, gradients once; the clip reads gradients and second moments once more.
`of copy` holds that, by the time, against the bandwidth of `Tensor.copy_` of fp32 values in the
same rounds, the bound in practice. `error` is the largest difference from AdamW in float64 after
three steps on few weights, relative to the largest change; who is further off than 5% is left out.
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
TARGET_FRACTION = 0.85  # of the bandwidth of a copy, on CUDA
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


class Contender(NamedTuple):
    """Who is timed, and what a step moves of a weight if it reads and writes each tensor once."""

    make: Callable[[Sequence[Tensor]], Any]
    dtype: torch.dtype  # of weights and gradients
    bytes_per_element: int
    needs_gpu: bool = False  # its bandwidth is held against the target


def _optimi(params: Sequence[Tensor]) -> Any:
    import optimi

    return optimi.AdamW(params, **_OPTIONS)


_fused = partial(SafeAdamW, fused=True, **_OPTIONS)
_clipped = partial(_fused, clip_update_rms=1e3)  # so high: never bites
_foreach = partial(SafeAdamW, foreach=True, **_OPTIONS)
# fp32: weight and moments twice and the gradient, 4 bytes each. fp16: weight and residual twice and
# the gradient, 2 bytes each, moments as before. The clip: the gradient and one moment once more.
CONTENDERS = {
    "SafeAdamW fused fp32": Contender(_fused, FP32, 28, needs_gpu=True),
    "SafeAdamW fused fp16": Contender(_fused, FP16, 26, needs_gpu=True),
    "SafeAdamW fused fp32 clip": Contender(_clipped, FP32, 36, needs_gpu=True),
    "SafeAdamW fused fp16 clip": Contender(_clipped, FP16, 32, needs_gpu=True),
    "SafeAdamW foreach fp32": Contender(_foreach, FP32, 28),
    "SafeAdamW foreach fp16": Contender(_foreach, FP16, 26),
    BASE: Contender(partial(torch.optim.AdamW, fused=True, **_OPTIONS), FP32, 28),
    "torch foreach fp32": Contender(partial(torch.optim.AdamW, foreach=True, **_OPTIONS), FP32, 28),
    "optimi fp32": Contender(_optimi, FP32, 28),
    "optimi fp16": Contender(_optimi, FP16, 18),
}


def shapes_of(size: str) -> list[torch.Size]:
    """Return the shapes of the weights of a ViT."""
    with torch.device("meta"):
        model = ViT(SIZES[size], image=224, classes=1000)
    return [param.shape for param in model.parameters()]


def error_of(contender: Contender, device: torch.device, steps: int = 3) -> float:
    """Return how far a contender is from AdamW in float64, relative to the largest change."""
    generator = torch.Generator().manual_seed(0)
    # A prime, which no block of a kernel divides.
    weight, *gradients = torch.randn(1 + steps, 10_007, generator=generator).to(contender.dtype)
    mine = weight.to(device, copy=True).requires_grad_()
    exact = weight.double().requires_grad_()
    # The plain loop in float64: no multi-tensor kernel is its own reference.
    optimizers = contender.make([mine]), torch.optim.AdamW([exact], foreach=False, **_OPTIONS)
    for gradient in gradients:
        mine.grad, exact.grad = gradient.to(device), gradient.double()
        for optimizer in optimizers:
            optimizer.step()
    difference = (mine.detach().double().cpu() - exact.detach()).abs().amax()
    if contender.dtype != FP32:  # a half weight shows no more than its format
        difference -= exact.detach().abs().amax() * torch.finfo(contender.dtype).eps / 2
    return max(0.0, difference.item()) / (exact.detach() - weight.double()).abs().amax().item()


def prepare(
    name: str, gradients: dict[torch.dtype, list[Tensor]], device: torch.device
) -> tuple[Callable[[], object], float]:
    """Return a contender's step over random weights, and how far it is from float64."""
    contender = CONTENDERS[name]
    if contender.needs_gpu and device.type != "cuda":
        raise common.LeftOut("needs a GPU")
    error = error_of(contender, device)
    # Not `>`, which a NaN passes.
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
        makers = {name: partial(prepare, name, gradients, args.device) for name in args.contenders}
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
    """Return what the bandwidth of a fused step says, in shares of a copy's."""
    target = f"{TARGET_FRACTION:.0%}"
    return common.verdict(f"{name}: {share:.0%} of a copy", target, share >= TARGET_FRACTION)


OPTIONS = {
    "size": dict(choices=SIZES, default=["B16"], toy=["tiny"], help="a table each"),
    "contenders": dict(choices=CONTENDERS, default=[*CONTENDERS], help="who is timed"),
    "rounds": dict(default=20, toy=2, help="rounds that count"),
    "max-seconds": dict(type=float, help="bounds the timed steps of one contender together"),
}
main = common.Benchmark("optimizer_step", __doc__, measure, OPTIONS)

if __name__ == "__main__":
    raise SystemExit(main())
