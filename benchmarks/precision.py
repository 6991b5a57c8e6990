"""Time of a training step and peak memory of a ViT under every precision, by Lightning's Trainer.

    python benchmarks/precision.py --size B16 L16 --batch 128

**Contenders**: `32-true` (without TF32), Lightning's `16-mixed` and `bf16-mixed`,
`lightning_mp.BalancedAMP` with full weights (O1) and with half copies of fp32 weights (O2), and
`lightning_mp.PureFP16` (pure), in fp16 and bf16; each with AdamW as fused and as foreach kernels,
and with `lightning_mp`'s SafeAdamW (safe). Models and their random data are made on the device. On
a CPU, `Trainer(precision="16-mixed")` would silently be bf16, so plugins are passed as objects.
`--size narrow` leaves a device next to nothing to do: its steps are the host's time.

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
import gc
import logging
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision, Precision  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks import _common as common  # noqa: E402
from lightning_mp import BalancedAMP, PureFP16  # noqa: E402
from lightning_mp.reproduce._fit import OPTIMIZERS, Classifier, Outcome, fit  # noqa: E402
from lightning_mp.reproduce._vit import LAYOUTS, POOLS, SIZES, ViT, ViTSize  # noqa: E402

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
REFERENCE, BASE, JUDGED = "32-true", "16-mixed", ("O2-fp16", "pure-fp16")
_SIZES = {**SIZES, "narrow": ViTSize(patch=16, width=8, depth=24, heads=2)}
LOSS_TOLERANCE = 0.05
# How many times as fast as `BASE` on CUDA, from this many parameters on: those of a ViT-H.
TARGET_SPEEDUP, TARGET_SPEEDUP_HUGE, HUGE = 1.0, 1.15, 600_000_000
# Adam's first steps move every weight by the learning rate: all of them, as one vector, by this.
# So a step, taken or skipped, changes the loss by about as much in all sizes, and by little.
_STEP_NORM = 0.03
_GIB = 2**30


class Contender(NamedTuple):
    """Who is timed: a precision and the kind of AdamW, `"safe"` for SafeAdamW."""

    precision: str
    optimizer: str

    def __str__(self) -> str:
        return f"{self.precision}, {self.optimizer}"


def train(size: str, contender: Contender, args: argparse.Namespace) -> Outcome:
    """Train once from the same weights, on one random batch again and again.

    As it is the same one, the loss depends only on the updates taken: a run that skipped some can
    be compared with one that did not.
    """
    place = torch.device(args.device)
    random = torch.Generator(place).manual_seed(1)
    shape = args.batch, 3, args.image, args.image
    images = torch.randn(shape, generator=random, device=place)
    labels = torch.randint(args.classes, shape[:1], generator=random, device=place)
    torch.manual_seed(0)
    with place:
        shared = {"image": args.image, "classes": args.classes}
        model = ViT(_SIZES[size], pool=args.pool, layout=args.layout, **shared)
    lr = _STEP_NORM / math.sqrt(sum(p.numel() for p in model.parameters()))
    return fit(
        Classifier(model, lr=lr, optimizer=contender.optimizer),
        [(images, labels)] * (args.warm_up + args.steps),
        device=place,
        plugin=PRECISIONS[contender.precision](place.type),
        warm_up=args.warm_up,
    )


def train_in_turn(
    size: str, contenders: Sequence[Contender], args: argparse.Namespace
) -> tuple[dict[Contender, list[Outcome]], dict[Contender, str]]:
    """Let all contenders train in turn; return their outcomes, and why others have none."""
    outcomes: dict[Contender, list[Outcome]] = {each: [] for each in contenders}
    left_out: dict[Contender, str] = {}
    rounds = dict.fromkeys(contenders, args.rounds)
    turns = tqdm([(i, c) for i in range(args.rounds) for c in contenders], unit="fit", leave=False)
    for index, contender in turns:
        turns.set_postfix_str(str(contender), refresh=False)
        if contender in left_out or index >= rounds[contender]:
            continue
        try:
            outcomes[contender].append(train(size, contender, args))
        except Exception as error:
            left_out[contender] = common.error_words(error)
        gc.collect()  # the model and its Trainer refer to each other
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
        took = sum(outcomes[contender][0].step_seconds) if outcomes[contender] else 0
        if args.max_seconds is not None and took > 0:
            rounds[contender] = max(1, min(args.rounds, int(args.max_seconds / took)))
    return {each: outcomes[each] for each in contenders if each not in left_out}, left_out


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
            difference = max(abs(each.losses[-1] / reference[each.updates] - 1) for each in found)
        if not all(math.isfinite(outcome.losses[-1]) for outcome in found):
            losses = ", ".join(f"{outcome.losses[-1]:.4g}" for outcome in found)
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


def measure(args: argparse.Namespace) -> Iterator[common.Report]:
    """Measure each size."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # else some lines every fit
    for size in args.size:
        print(f"\nViT-{size}, {args.image} px, batch {args.batch:,}, {args.pool}, {args.layout}")
        contenders = [Contender(p, o) for o in args.optimizers for p in args.precisions]
        outcomes, left_out = train_in_turn(size, contenders, args)
        differences, wrong = judge(outcomes)
        left_out |= wrong
        spreads = {
            each: common.Spread(
                tuple(statistics.median(found.step_seconds) for found in outcomes[each])
            )
            for each in differences
        }
        asked = {name: getattr(args, name) for name in ASKED}
        rows = []
        for each, spread in sorted(spreads.items(), key=lambda item: item[1].median):
            base, fits = spreads.get(each._replace(precision=BASE)), outcomes[each]
            found = {
                **spread.columns,
                "parameters": fits[-1].parameters,
                "speedup": None if base is None else common.median_ratio(base, spread),
                "images_per_second": args.batch / spread.median,
                "peak_bytes": max(fit.peak_bytes or 0 for fit in fits) or None,
                "final_loss": fits[-1].losses[-1],
                "loss_difference": differences[each],
                "loss_scale": fits[-1].loss_scale,
                "skipped_steps": max(fit.skipped_steps for fit in fits),
            }
            rows.append(({**each._asdict(), "size": size, **asked}, found))
        flat = [what | found for what, found in rows]
        sound = all(
            why == common.OUT_OF_MEMORY or each.precision in (REFERENCE, BASE, "bf16-mixed")
            for each, why in left_out.items()
        )
        yield common.Report(rows, TABLE, verdict_of(flat, left_out), sound)


def verdict_of(rows: Sequence[dict[str, Any]], left_out: Mapping[Contender, str]) -> list[str]:
    """Return what the figures say against the targets, in words."""
    said = [f"Not ranked: {contender}: {why}." for contender, why in left_out.items()]
    if not rows:
        return [*said, "Skipped: no contender finished."]
    gaps = [row["loss_difference"] for row in rows if row["loss_difference"] is not None]
    if gaps:
        said.append(f"Final losses are within {max(gaps):.2%} of those of {REFERENCE}.")
    if torch.device(rows[0]["device"]).type != "cuda":
        return [*said, "No verdict on speed or memory: a CPU is slow at products of halves."]
    by_name = {Contender(row["precision"], row["optimizer"]): row for row in rows}
    for optimizer in dict.fromkeys(each.optimizer for each in [*by_name, *left_out]):
        for precision in JUDGED:
            ours, base = Contender(precision, optimizer), Contender(BASE, optimizer)
            if ours in by_name and base in by_name:
                said.append(f"{ours}{_against(by_name[ours], by_name[base])}")
            elif {ours, base} & {*by_name, *left_out}:
                said.append(f"{ours} and {base} did not both run: open.")
    return said


def _against(ours: dict[str, Any], base: dict[str, Any]) -> str:
    """Judge ours against 16-mixed by speed and memory."""
    target = TARGET_SPEEDUP_HUGE if ours["parameters"] >= HUGE else TARGET_SPEEDUP
    words = {True: "met", False: "missed"}
    peaks = ours["peak_bytes"] / _GIB, base["peak_bytes"] / _GIB
    return (
        f" is {ours['speedup']:.2f}x as fast as {BASE} (target: {target:g}x): "
        f"{words[ours['speedup'] >= target]}; its peak is {peaks[0]:,.2f} of {peaks[1]:,.2f} GiB "
        f"(target: no more): {words[peaks[0] <= peaks[1]]}."
    )


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of this benchmark."""
    add("--size", choices=_SIZES, nargs="+", default=["B16"], help="sizes, one table each")
    add("--image", type=common.positive, default=224, help="edge of the images in pixels")
    add("--batch", type=common.positive, default=64, help="images a step")
    add("--classes", type=common.positive, default=1000, help="outputs of the head")
    add("--pool", choices=POOLS, default="cls", help="what the head reads")
    add("--layout", choices=LAYOUTS, default="nld", help="lnd has the batch second")
    add("--precisions", choices=PRECISIONS, nargs="+", default=[*PRECISIONS], help="contenders")
    add("--optimizers", choices=OPTIMIZERS, nargs="+", default=[*OPTIMIZERS], help="AdamW kernels")
    add("--rounds", type=common.positive, default=3, help="fits of each contender")
    add("--warm-up", type=common.positive, default=5, help="steps of a fit that do not count")
    add("--steps", type=common.positive, default=10, help="timed steps of a fit")
    add("--max-seconds", type=float, help="bounds the timed steps of one contender together")


ASKED = "image", "batch", "classes", "pool", "layout", "device", "warm_up", "steps"
QUICK = {"size": ["tiny"], "image": 32, "batch": 8, "classes": 10, "rounds": 2, "steps": 3}
BENCHMARK = common.Benchmark("precision", __doc__, add_options, measure, {**QUICK, "warm_up": 1})
main, parse = BENCHMARK.main, BENCHMARK.parse

if __name__ == "__main__":
    raise SystemExit(main())
