"""Time and peak memory of the contrastive losses, forward and backward, beside their peers.

    python benchmarks/contrastive_loss.py --batch 8192 16384 --width 512 768
    python benchmarks/contrastive_loss.py --objective sigmoid --scale 10

**Contenders**: this package's loss ("ours") with every backend that runs on the device, and with
each `--workspace`; dense formulas; on CUDA, if installed, `inf_cl`, or `siglip-kernel` for the
sigmoid loss. Contenders that cannot run are listed with the reason, and so are contenders whose
call would take longer than `--max-seconds`, extrapolated by the square of the batch. Our loss is
compared with float64 on a sample of pairs, and every contender's loss and gradients with ours.

**Figures**: The rate counts four products of 2 b^2 D FLOP for every contender, the number that ours
computes; a dense loss computes six for the same result, Inf-CL ten. `of GEMM` divides that rate by
the machine's: the best median of a tile's logits product, its gradient product and a large square
product, in the same dtype and rounds. It can pass 100% where a CPU is slow at 16-bit products,
because ours multiplies in fp32 there. The extra memory is the peak of all tensors beyond the inputs
and their gradients; `/ 4bD` is the same in units of one tower's features in fp32.

Shapes:
    b: batch. D: feature width. k: sampled pairs.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks import _common as common
from benchmarks._contenders import DTYPES, PEERS, UNITS, Case, Contender, Inputs, find_contenders
from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._sums.softmax import negatives
from lightning_mp.contrastive._sums.sweep import agreed_plan
from lightning_mp.contrastive._tiles.tile_backend import StoredTiles

# The relative difference that storing gradients and a softmax in the dtype explains.
STORAGE_TOLERANCE = {"fp32": 0.0, "bf16": 2e-2, "fp16": 4e-3}
# Targets: the first on a CPU, the others on CUDA, in bytes of 4bD for the last one.
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
# A trial call has an eighth of the batch, a 64th of the work, and at most this many pairs.
_PROBE_SHARE, _PROBE_PAIRS = 8, 32768
_SAMPLES = 64  # pairs that are compared with float64
# Log-sum-exps of fp32 logits near 100 have errors of about 2e-5.
PASS_TOLERANCES = {"term_error": 5e-4, "mean_error": 1e-5}
# The softmax and the result are stored in the dtype.
GRADIENT_TOLERANCES = {"fp32": 1e-3, "bf16": 1e-2, "fp16": 2e-3}


def check(contenders: Sequence[Contender], case: Case) -> tuple[dict[str, float], dict[str, str]]:
    """Return the difference of each contender from ours, the first that runs; and the failures.

    The difference is the largest of four: those of the loss and of the features' gradients,
    relative to ours in the Euclidean norm, and that of the scale's gradient, relative to the sum of
    the magnitudes of its terms, `sum_i |<I_i, dL/dI_i>| / scale`, because the terms may cancel.
    """
    expected: list[Tensor] = []

    def difference_of(contender: Contender) -> float:
        if not expected and not contender.is_ours:
            raise common.LeftOut("has nothing to be compared with")
        inputs = case.inputs(contender.storage)
        found = [inputs.run(contender.loss).float()]
        found += [leaf.grad.float() for leaf in inputs.leaves if leaf.grad is not None]
        expected.extend(() if expected else found)
        terms_b = (inputs.image_bD.detach().float() * expected[1]).sum(1) / case.scale
        sizes = [*(ours.norm() for ours in expected[:3]), terms_b.abs().sum()]
        compared = zip(found, expected, sizes, strict=True)
        errors = [(mine - ours).norm() / size for mine, ours, size in compared]
        worst = float(torch.stack(errors).amax())  # Python's `max` may ignore a NaN
        tolerance = max(contender.tolerance, STORAGE_TOLERANCE[case.dtype])
        if not worst <= tolerance:
            raise common.LeftOut(f"differs from ours by {worst:.1e} > {tolerance:.0e}")
        return worst

    asked = {contender.name: partial(difference_of, contender) for contender in contenders}
    differences, failures = common.take_turns(asked)
    if not expected:
        raise RuntimeError(f"None of this package's losses ran: {failures}.")
    return {name: difference for name, (difference,) in differences.items()}, failures


def sampled_errors(case: Case, ours: Contender) -> dict[str, float]:
    """Run ours once and return the errors of a sample of pairs against float64."""
    inputs = case.inputs()
    loss = inputs.run(ours.loss)
    return errors_of(inputs, float(loss), log_sum_exps(ours.loss, inputs), _SAMPLES)


@torch.no_grad()
def log_sum_exps(loss: Any, inputs: Inputs) -> list[Tensor]:
    """Return the row and column log-sum-exps of the first sweep of a `ContrastiveLoss`."""
    image_bD, text_bD, scale = inputs.leaves
    plan = agreed_plan(Request.of(loss, image_bD, text_bD, scale, None))
    prepared = plan.tiles.prepare(image_bD, text_bD, scale)
    memory = StoredTiles(plan.memory_for_tiles())
    row_neg_b, column_neg_Rb = negatives(plan, memory, prepared)
    # The sweep leaves out the positives.
    lses = (row_neg_b, column_neg_Rb.logsumexp(0))
    return [torch.logaddexp(neg_b, prepared.pos_b) for neg_b in lses]


def errors_of(inputs: Inputs, loss: float, lses: list[Tensor], samples: int) -> dict[str, float]:
    """Return the errors of a loss, its log-sum-exps and its gradients against float64.

    For a random sample of k pairs, log-sum-exps and gradients are computed in float64, both ways,
    from the logits with the whole batch; the other log-sum-exps are those of the run:

        dL/dimage_k = scale / 2b (sum_j (exp(S_kj - row_lse_k) + exp(S_kj - column_lse_j)) text_j
                                  - 2 text_k)

    The loss is compared with the mean of its terms, computed from the run's log-sum-exps.
    """
    scale, batch = float(inputs.scale.detach()), len(inputs.image_bD)
    image_bD, text_bD = (side_bD.detach() for side_bD in inputs.leaves[:2])
    positive_b = scale * torch.einsum("bd,bd->b", image_bD.double(), text_bD.double())
    mean = float((lses[0] + lses[1] - 2 * positive_b).mean()) / 2
    generator = torch.Generator().manual_seed(1)
    pair_k = torch.randperm(batch, generator=generator)[:samples].to(image_bD.device)
    terms, gradients = [], []
    for own_bD, other_bD, (own_lse_b, other_lse_b), leaf in (
        (image_bD, text_bD, lses, inputs.image_bD),
        (text_bD, image_bD, lses[::-1], inputs.text_bD),
    ):
        wide_bD = other_bD.double()
        logits_kb = scale * own_bD[pair_k].double() @ wide_bD.T
        own_lse_k = logits_kb.logsumexp(1)
        terms.append((own_lse_b[pair_k] - own_lse_k).abs())
        softmax_kb = (logits_kb - own_lse_k[:, None]).exp() + (logits_kb - other_lse_b).exp()
        unit = scale * inputs.loss_scale / (2 * batch)
        right_kD = unit * (softmax_kb @ wide_bD - 2 * wide_bD[pair_k])
        found_kD = leaf.grad[pair_k]
        gradients.append((found_kD - right_kD).norm(dim=1) / right_kD.norm(dim=1))
    return {
        "term_error": float(torch.cat(terms).amax()),
        "mean_error": abs(loss / mean - 1),
        "gradient_error": float(torch.cat(gradients).amax()),
    }


def problems_of(errors: dict[str, float], dtype: str) -> list[str]:
    """Return a sentence for each error above its tolerance."""
    limits = PASS_TOLERANCES | {"gradient_error": GRADIENT_TOLERANCES[dtype]}
    return [
        f"Wrong: {name.replace('_', ' ')} is {errors[name]:.1e}, more than {limit:.0e}."
        for name, limit in limits.items()
        if not errors[name] <= limit  # NaN too
    ]


def extra_bytes(contender: Contender, case: Case) -> int | None:
    """Return the peak memory of a call beyond inputs and gradients, in bytes."""
    inputs = case.inputs(contender.storage)
    # The call also makes the gradients, each as large as its input; they are subtracted below.
    peak = common.peak_bytes(lambda: inputs.run(contender.loss), case.device)
    return peak and peak - sum(leaf.nbytes for leaf in inputs.leaves)


def gemm_steps(case: Case, square: int) -> tuple[dict[str, Callable[[], object]], float]:
    """Return products to time, small ones repeated, and the least FLOP of each step."""
    tile = min(case.batch, 8192 if case.device.type == "cuda" else 1024)
    # The logits of a tile, its gradients, and a large square.
    shapes = [(tile, case.width, tile), (tile, tile, case.width), (square, square, square)]
    flop = max(2.0 * math.prod(shape) for shape in shapes)

    def product(m: int, n: int, k: int) -> Callable[[], object]:
        options: dict[str, Any] = {"dtype": DTYPES[case.dtype], "device": case.device}
        left, right = torch.randn(m, n, **options), torch.randn(n, k, **options)
        out, calls = left @ right, max(1, round(flop / 2 / (m * n * k)))
        # Into one output, so that the machine's rate includes no allocations.
        return lambda: [torch.mm(left, right, out=out) for _ in range(calls)]

    return {f"gemm {shape}": product(*shape) for shape in shapes}, flop


def too_slow(contender: Contender, case: Case, limit: float | None) -> str | None:
    """Return a reason if a call would take too long, judged by one with fewer pairs."""
    # A multiple of 64, because Inf-CL accepts no other batch.
    rows = max(64, min(case.batch // _PROBE_SHARE, _PROBE_PAIRS) // 64 * 64)
    if limit is None or rows >= case.batch:
        return None
    step = {"": partial(replace(case, batch=rows).inputs(contender.storage).run, contender.loss)}
    spreads, _ = common.time_in_turn(step, case.device)
    # If the call fails, the comparison with ours gives the reason.
    seconds = sum(spreads.get("", ())) * (case.batch / rows) ** 2
    return None if seconds <= limit else f"predicted {seconds:,.1f} s a call, more than {limit:g} s"


def measure_case(case: Case, args: argparse.Namespace) -> common.Report:
    """Measure one problem."""
    print(f"\nb={case.batch:,} D={case.width:,} {case.dtype} scale={case.scale:g}", flush=True)
    asked, left_out = find_contenders(case, args.workspace)
    # The first one is ours, with which the others are compared.
    for contender in asked[1:]:
        if why := too_slow(contender, case, args.max_seconds):
            left_out[contender.name] = why
    differences, failures = check([c for c in asked if c.name not in left_out], case)
    contenders = [c for c in asked if c.name in differences]
    errors, problems = dict.fromkeys(("term_error", "mean_error", "gradient_error")), []
    if case.objective == "softmax":
        errors = sampled_errors(case, contenders[0])
        problems = problems_of(errors, case.dtype)
    peaks = {c.name: extra_bytes(c, case) for c in contenders}
    square = 256 if args.quick else 8192 if case.device.type == "cuda" else 4096
    steps, flop = gemm_steps(case, square)
    # Contenders that take the same dtype share their inputs, to save memory.
    gemms, inputs = list(steps), case.inputs()
    for contender in contenders:
        own = inputs if contender.storage is None else case.inputs(contender.storage)
        steps[contender.name] = partial(own.run, contender.loss)
    spreads, later = common.time_in_turn(steps, case.device, args.repeats, args.max_seconds)
    failures |= later
    # The best rate: beside a slow product every contender looks fast.
    rate = max(flop / median(spreads.pop(name)) for name in gemms)
    ours = contenders[0].name
    if ours in later:
        raise RuntimeError(f"{ours} {later[ours]}.")
    rows = []
    for name, seconds in spreads.items():
        flops = UNITS * 2.0 * case.batch**2 * case.width / median(seconds)
        found = {
            **common.time_columns(seconds),
            "time_ratio": common.median_ratio(seconds, spreads[ours]),
            "gflops": flops / 1e9,
            "gemm_gflops": rate / 1e9,
            "gemm_fraction": flops / rate,
            "peak_extra_bytes": peaks[name],
            "peak_features": peaks[name] and peaks[name] / (4 * case.batch * case.width),
            "max_relative_difference": differences[name],
            **(errors if name == ours else dict.fromkeys(errors)),
        }
        rows.append(({"contender": name, **asdict(case)}, found))
    wrong = [c.name for c in asked if c.is_ours and c.name in failures] + problems
    wrong += [why for why in failures.values() if "differs" in why]
    said = [*problems, *verdict_of([what | found for what, found in rows])]
    return common.Report(rows, TABLE, said, left_out | failures, not wrong)


def verdict_of(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the verdicts on the targets, which are for the softmax loss; ours is the first row."""
    ours, on_cuda = rows[0], rows[0]["device"].type == "cuda"
    if ours["objective"] == "sigmoid":
        return
    peer, target = ("Inf-CL", INF_CL_SPEEDUP) if on_cuda else ("dense", DENSE_SPEEDUP)
    if ratios := [row["time_ratio"] for row in rows if row["contender"].startswith(peer)]:
        met = min(ratios) >= target
        yield common.verdict(f"{min(ratios):.2f}x as fast as {peer}", f"{target:g}x", met)
    if on_cuda:
        rate = ours["gemm_fraction"]
        yield common.verdict(f"{rate:.0%} of GEMM", f"{GEMM_FRACTION:.0%}", rate >= GEMM_FRACTION)
        # The target of 8 x 4bD includes the gradients, which `extra_bytes` subtracted.
        peak = ours["peak_features"] + 2 * DTYPES[ours["dtype"]].itemsize / 4
        figure = f"{peak:.1f} x 4bD bytes with gradients"
        yield common.verdict(figure, f"{EXTRA_FEATURES:g}", peak <= EXTRA_FEATURES)


def measure(args: argparse.Namespace) -> Iterator[common.Report]:
    """Measure all widths, dtypes and batches."""
    for width, dtype, batch in itertools.product(args.width, args.dtype, args.batch):
        case = Case(batch, width, dtype, args.scale, args.device, args.objective)
        yield measure_case(case, args)


OPTIONS = {
    "objective": dict(choices=PEERS, default="softmax", help="CLIP's loss or SigLIP's"),
    "batch": dict(default=[8192], toy=[256], help="a table each"),
    "width": dict(default=[512], toy=[64], help="feature widths"),
    "dtype": dict(choices=DTYPES, default=["fp32"], help="dtypes of the features"),
    "repeats": dict(default=7, toy=2, help="timed rounds"),
    "workspace": dict(default=[], help="further workspaces of ours, in MiB"),
    "max-seconds": dict(
        type=float, help="leave out contenders whose call takes longer; limits rounds"
    ),
    "scale": dict(
        type=float, default=100.0, help="logit scale; CLIP's ends at 100, SigLIP's starts at 10"
    ),
}
main = common.Benchmark("contrastive_loss", __doc__, measure, OPTIONS)

if __name__ == "__main__":
    raise SystemExit(main())
