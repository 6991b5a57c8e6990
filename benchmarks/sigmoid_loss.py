"""Time and peak memory of the sigmoid (SigLIP) loss, forward and backward, against its peers.

    python benchmarks/sigmoid_loss.py --batch 4096 8192 --width 512

**Contenders**: `lightning_mp.SigmoidContrastiveLoss` with every backend that runs on the device;
open_clip's formula on all logits at once, and by blocks of texts as its neighbour exchange brings
them (a rank's texts at a time, as many as `--ranks`), each written down from the formula; on CUDA
`siglip-kernel` (`pip install siglip-kernel`). What cannot run is named with its reason.

Loss and gradients of features and scale are compared with ours first; memory is weighed; then all
are timed in turn. The figures are those of `contrastive_loss.py`, with a learnt bias of -10.

Shapes:
    b: batch. D: feature width. c: texts of one block.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks import _common as common  # noqa: E402
from benchmarks._contenders import Contender  # noqa: E402
from benchmarks._inputs import DTYPES, TOY_BATCH, Case, Inputs, LossFunction  # noqa: E402
from benchmarks.contrastive_loss import check, weigh  # noqa: E402
from lightning_mp import SigmoidContrastiveLoss  # noqa: E402

BIAS = -10.0  # SigLIP's at the start
TABLE = {
    "contender": "{contender}",
    "ms [range]": "{ms_median:,.1f} [{ms_min:,.1f}-{ms_max:,.1f}]",
    "x ours": "{time_ratio:.2f}",
    "extra bytes": "{peak_extra_bytes:,}",
}
# In bf16 the logits of a formula are rounded to 8 bits: near 10 by up to 0.03, and so are sigmoids.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}


def formula_by_blocks(
    image_bD: Tensor, text_bD: Tensor, scale: Tensor, bias: Tensor, blocks: int
) -> Tensor:
    """Return `-1/b sum_ij log sigmoid(z_ij (s <i_i, t_j> + bias))`, some texts at a time.

    That is SigLIP's algorithm, as open_clip documents it: images stay, texts of one rank after the
    other visit, and `z` is 1 for the own pairs, -1 for all others.

    References:
        - SigLIP, https://arxiv.org/abs/2303.15343, section 3.3 and figure 1
        - open_clip, https://github.com/mlfoundations/open_clip, `SigLipLoss`
    """
    loss = image_bD.new_zeros((), dtype=torch.float32)
    for text_cD in text_bD.chunk(blocks):
        logits_bc = scale * image_bD @ text_cD.T + bias
        loss = loss - F.logsigmoid(-logits_bc).sum(dtype=torch.float32)
    # A negative that is a pair's own: log sigmoid(x) - log sigmoid(-x) = x.
    own_b = scale * (image_bD * text_bD).sum(1) + bias
    return (loss - own_b.sum(dtype=torch.float32)) / len(image_bD)


def find_contenders(case: Case, ranks: int) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders that run here, ours first, and why the others do not."""
    found: list[Contender] = []
    skipped: dict[str, str] = {}
    for backend in ("triton", "torch"):
        loss = _with_bias(SigmoidContrastiveLoss(backend=backend), case.place)  # type: ignore[arg-type]
        toy = Inputs.make(TOY_BATCH, case.width, DTYPES[case.dtype], 10.0, case.place)
        try:
            toy.run(loss)
        except Exception as error:  # compilers raise what they like
            skipped[f"ours, {backend} tiles"] = str(error).partition("\n")[0]
            continue
        found.append(Contender(f"ours, {backend} tiles", loss, is_ours=True))
    for name, blocks in (("open_clip's formula", 1), (f"the same in {ranks} blocks", ranks)):
        loss = _with_bias(partial(formula_by_blocks, blocks=blocks), case.place)
        found.append(Contender(name, loss, tolerance=TOLERANCE[case.dtype]))
    kernel = _siglip_kernel(case)
    if isinstance(kernel, str):
        skipped["siglip-kernel"] = kernel
    else:
        found.append(kernel)
    return found, skipped


def _with_bias(loss: Callable[..., Any], place: torch.device) -> LossFunction:
    """Return a loss of features and scale, whose bias learns, too."""
    bias = torch.tensor(BIAS, device=place, requires_grad=True)
    return lambda image_bD, text_bD, scale: loss(image_bD, text_bD, scale, bias)


def _siglip_kernel(case: Case) -> Contender | str:
    if case.place.type != "cuda":
        return "has kernels for CUDA only"
    try:
        from siglip_kernel import (  # type: ignore[import-not-found, unused-ignore]
            fused_siglip_loss,
        )
    except ImportError as error:
        return f"does not import ({error}); `pip install siglip-kernel`"

    def loss(image_bD: Tensor, text_bD: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        """Take the logarithm of the scale, as it does."""
        found: Tensor = fused_siglip_loss(image_bD, text_bD, scale.log(), bias)
        return found

    return Contender("siglip-kernel", _with_bias(loss, case.place), tolerance=TOLERANCE[case.dtype])


def measure_case(case: Case, args: argparse.Namespace) -> common.Report:
    """Measure one problem."""
    print(f"\nb={case.batch:,} D={case.width:,} {case.dtype} scale={case.scale:g}", flush=True)
    everybody, left_out = find_contenders(case, args.ranks)
    differences, failures = check(everybody, case)
    contenders = [c for c in everybody if c.name in differences]
    peaks = {c.name: weigh(c, case) if args.memory else None for c in contenders}
    inputs = case.inputs()
    steps = {c.name: partial(inputs.run, c.loss) for c in contenders}
    limits = {"rounds": args.repeats, "max_seconds": args.max_seconds}
    spreads = common.time_alternately(steps, device=case.place, title="timing", **limits)
    rows = [
        (
            {"contender": name, **asdict(case), "ranks": args.ranks},
            {
                **spread.columns,
                "time_ratio": common.median_ratio(spread, spreads[contenders[0].name]),
                "peak_extra_bytes": peaks[name],
                "max_relative_difference": differences[name],
            },
        )
        for name, spread in spreads.items()
    ]
    said = [f"Left out: {name}: {why}" for name, why in (left_out | failures).items()]
    return common.Report(rows, TABLE, said, not failures)


def measure(args: argparse.Namespace) -> Iterator[common.Report]:
    """Measure all widths, dtypes and batches."""
    for width, dtype, batch in itertools.product(args.width, args.dtype, args.batch):
        yield measure_case(Case(batch, width, dtype, args.scale, args.device), args)


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of this benchmark."""
    positive = common.positive
    add("--batch", type=positive, nargs="+", default=[8192], help="batch sizes, one table each")
    add("--width", type=positive, nargs="+", default=[512], help="feature widths")
    add("--dtype", choices=DTYPES, nargs="+", default=["fp32"], help="dtypes of the features")
    add("--ranks", type=positive, default=8, help="whose texts come one after the other")
    add("--repeats", type=positive, default=7, help="rounds that count")
    add("--max-seconds", type=float, help="bounds the rounds of a contender")
    add("--scale", type=float, default=10.0, help="logit scale; SigLIP starts at 10")
    add("--memory", action=argparse.BooleanOptionalAction, default=True, help="weigh memory too")


QUICK = {"batch": [256], "width": [64], "repeats": 2, "ranks": 4}
BENCHMARK = common.Benchmark("sigmoid_loss", __doc__, add_options, measure, QUICK)
main, parse = BENCHMARK.main, BENCHMARK.parse

if __name__ == "__main__":
    raise SystemExit(main())
