"""Time of a training step and peak memory of a ViT under every precision, by Lightning's Trainer.

    python benchmarks/precision.py --size B16 L16 --batch 128

**Contenders**: `32-true` (without TF32), Lightning's `16-mixed` and `bf16-mixed`, BalancedAMP with
full weights (O1) and with half copies of fp32 weights (O2), and PureFP16 (pure); each with AdamW's
fused and foreach kernels, and SafeAdamW (safe). All are plugins: `precision="16-mixed"` of a
Trainer would silently be bf16 on a CPU.

A round is one `Trainer.fit`, so that no two contenders share the memory. Its time is the median
over the steps that the loss scaler did not skip; a step lasts from the end of the previous step
until the device is idle. `x 16-mixed` is the speedup over 16-mixed with the same optimizer. Peak
memory is the allocator's and includes data and model; it is not measured on a CPU.

Every contender starts from the same weights and repeats one batch. A contender is left out if its
final loss is not finite, or differs by more than 5% from the loss of 32-true after the same number
of updates.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from benchmarks import _common as common
from lightning_mp import BalancedAMP, PureFP16
from papers._fit import OPTIMIZERS, Classifier, Outcome, fit
from papers._vit import LAYOUTS, POOLS, SIZES, ViT

PRECISIONS: dict[str, Callable[[str], Precision]] = {
    "32-true": lambda device: Precision(),
    "16-mixed": lambda device: MixedPrecision("16-mixed", device, torch.amp.GradScaler(device)),
    "bf16-mixed": lambda device: MixedPrecision("bf16-mixed", device),
    "O1-fp16": lambda device: BalancedAMP(half="fp16", weights="full"),
    "O1-bf16": lambda device: BalancedAMP(half="bf16", weights="full"),
    "O2-fp16": lambda device: BalancedAMP(half="fp16"),
    "O2-bf16": lambda device: BalancedAMP(half="bf16"),
    "pure-fp16": lambda device: PureFP16(half="fp16"),
    "pure-bf16": lambda device: PureFP16(half="bf16"),
}
REFERENCE, BASE, PEERS = "32-true", "16-mixed", ("32-true", "16-mixed", "bf16-mixed")
TABLE = {
    "contender": "{precision}, {optimizer}",
    "ms [range]": "{ms_median:,.1f} [{ms_min:,.1f}-{ms_max:,.1f}]",
    "x 16-mixed": "{speedup:.2f}",
    "images/s": "{images_per_second:,.0f}",
    "peak bytes": "{peak_bytes:,}",
    "loss": "{final_loss:.4f}",
    "scale": "{loss_scale:g}",
    "skipped": "{skipped_steps}",
}
LOSS_TOLERANCE = 0.05
# On CUDA, these contenders must reach a speedup over `BASE` and use no more memory. The target is
# higher for models with at least `HUGE` parameters, such as a ViT-H.
JUDGED = "O2-fp16", "pure-fp16"
TARGET_SPEEDUP, TARGET_SPEEDUP_HUGE, HUGE = 1.0, 1.15, 600_000_000
# Norm of the change of all weights in one step. Adam's first steps change every weight by the
# learning rate, which is chosen by the number of weights: a step then changes the loss of every
# size by a similar, small amount.
_STEP_NORM = 0.03
_CLASSES = 1000


def train(size: str, precision: str, optimizer: str, args: argparse.Namespace) -> Outcome:
    """Train once on a repeated batch, so that the loss depends only on the number of updates."""
    random = torch.Generator(args.device).manual_seed(1)
    shape = args.batch, 3, args.image, args.image
    images = torch.randn(shape, generator=random, device=args.device)
    labels = torch.randint(_CLASSES, shape[:1], generator=random, device=args.device)
    # The same initial weights for all contenders; the data have a separate generator.
    torch.manual_seed(0)
    with args.device:
        kind = {"pool": args.pool, "layout": args.layout, "image": args.image}
        model = ViT(SIZES[size], classes=_CLASSES, **kind)
    lr = _STEP_NORM / math.sqrt(sum(p.numel() for p in model.parameters()))
    classifier, plugin = Classifier(model, lr=lr, optimizer=optimizer), PRECISIONS[precision]
    steps = [(images, labels)] * (args.warm_up + args.steps)
    options = {"device": args.device, "warm_up": args.warm_up}
    return fit(classifier, steps, plugin=plugin(args.device.type), **options)


def judged(fits: Sequence[Outcome], reference: Sequence[float] | None) -> float | None:
    """Return the relative difference of the final losses from 32-true's.

    Losses are compared after the same number of updates. The implementations of AdamW differ only
    by rounding, so all share one reference; `None` skips the comparison.

    Raises:
        LeftOut: A final loss is not finite or too different, or the scaler skipped all timed steps.
    """
    losses = [fit.losses[-1] for fit in fits]
    gap = reference and max(abs(fit.losses[-1] / reference[fit.updates] - 1) for fit in fits)
    if not all(map(math.isfinite, losses)):
        said = ", ".join(f"{loss:.4g}" for loss in losses)
        raise common.LeftOut(f"diverged: its final losses are {said}")
    if gap is not None and gap > LOSS_TOLERANCE:
        raise common.LeftOut(f"diverged: its final loss differs by {gap:.0%} from {REFERENCE}")
    if not all(fit.step_seconds for fit in fits):
        raise common.LeftOut("skipped all timed steps; pass a longer --warm-up")
    return gap


def measure(args: argparse.Namespace) -> Iterator[common.Report]:
    """Measure each size."""
    asked = {name: getattr(args, name) for name in ASKED}
    for size in args.size:
        print(f"\nViT-{size}, {args.image} px, batch {args.batch:,}, {args.pool}, {args.layout}")
        kinds = {f"{p}, {o}": (p, o) for o in args.optimizers for p in args.precisions}
        outcomes, left_out = common.take_turns(
            {name: partial(train, size, *kind, args) for name, kind in kinds.items()},
            rounds=args.rounds,
            seconds_of=lambda outcome: sum(outcome.step_seconds),
            max_seconds=args.max_seconds,
        )
        # The reference of any optimizer whose losses are finite.
        references = (fits[0].losses for name, fits in outcomes.items() if REFERENCE in name)
        reference = next((losses for losses in references if all(map(math.isfinite, losses))), None)
        judge = {name: partial(judged, fits, reference) for name, fits in outcomes.items()}
        gaps, diverged = common.take_turns(judge)
        medians = {name: [median(fit.step_seconds) for fit in outcomes[name]] for name in gaps}
        rows = []
        for name, seconds in sorted(medians.items(), key=lambda item: median(item[1])):
            (precision, optimizer), fits = kinds[name], outcomes[name]
            # With the same optimizer, so that the ratio compares only precisions.
            base = medians.get(f"{BASE}, {optimizer}")
            figures = {
                **common.time_columns(seconds),
                "parameters": fits[-1].parameters,
                "speedup": common.median_ratio(base, seconds),
                "images_per_second": args.batch / median(seconds),
                # `None` on a CPU, where the peak is unknown rather than 0.
                "peak_bytes": max(fit.peak_bytes or 0 for fit in fits) or None,
                "final_loss": fits[-1].losses[-1],
                "loss_difference": gaps[name][0],
                "loss_scale": fits[-1].loss_scale,
                "skipped_steps": max(fit.skipped_steps for fit in fits),
            }
            what = {"precision": precision, "optimizer": optimizer, "size": size}
            rows.append(({**what, **asked}, figures))
        left_out |= diverged
        ours = {why for name, why in left_out.items() if kinds[name][0] not in PEERS}
        said = [*verdict_of([what | figures for what, figures in rows])]
        # Running out of memory is a result; any other failure of ours is an error.
        yield common.Report(rows, TABLE, said, left_out, ours <= {common.OUT_OF_MEMORY})


def verdict_of(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the difference of the losses and, on CUDA, verdicts on speed and memory."""
    gaps = [row["loss_difference"] for row in rows if row["loss_difference"] is not None]
    if gaps:
        yield f"Final losses are within {max(gaps):.2%} of those of {REFERENCE}."
    if rows and rows[0]["device"].type != "cuda":
        yield "Speed and memory are not judged on a CPU, which is slow at half-precision products."
        return
    bases = {row["optimizer"]: row for row in rows if row["precision"] == BASE}
    for row in rows:
        if row["precision"] in JUDGED and row["optimizer"] in bases:
            target = TARGET_SPEEDUP_HUGE if row["parameters"] >= HUGE else TARGET_SPEEDUP
            peak = row["peak_bytes"] / bases[row["optimizer"]]["peak_bytes"]
            name = f"{row['precision']}, {row['optimizer']}"
            speed = f"{name}: {row['speedup']:.2f}x as fast as {BASE}"
            yield common.verdict(speed, f"{target:g}x", row["speedup"] >= target)
            yield common.verdict(f"{name}: {peak:.1%} of its peak memory", "100%", peak <= 1)


ASKED = "image", "batch", "pool", "layout", "device", "warm_up", "steps"
OPTIONS = {
    "size": dict(choices=SIZES, default=["B16"], toy=["tiny"], help="a table each"),
    "image": dict(default=224, toy=32, help="edge of the images in pixels"),
    "batch": dict(default=64, toy=8, help="images a step"),
    "pool": dict(choices=POOLS, default="cls", help="input of the head"),
    "layout": dict(choices=LAYOUTS, default="nld", help="lnd has the batch second"),
    "precisions": dict(choices=PRECISIONS, default=[*PRECISIONS], help="contenders"),
    "optimizers": dict(
        choices=OPTIMIZERS, default=[*OPTIMIZERS], help="optimizers of each contender"
    ),
    "rounds": dict(default=3, toy=2, help="fits of each contender"),
    "warm-up": dict(default=5, toy=1, help="untimed first steps of a fit"),
    "steps": dict(default=10, toy=3, help="timed steps of a fit"),
    "max-seconds": dict(type=float, help="limit of the timed steps of one contender"),
}
main = common.Benchmark("precision", __doc__, measure, OPTIONS)

if __name__ == "__main__":
    raise SystemExit(main())
