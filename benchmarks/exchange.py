"""Count what the host of one rank launches, sends and waits for in one loss, by exchange and ranks.

Forward and backward run through the Triton launchers on tensors without memory and in a process
group without peers. Launches are counted and not executed, so the counts are exact and need no GPU.
A stated model computes seconds from the counts, which show whether host or device waits in a step.
Rows with a shortest batch have rank 1 with fewer pairs, as in the last batch of an epoch. A second
table computes the device time saved by storing tiles of the first sweep for the second, as
`TorchTiles` does for all features and `TritonTiles` for fp32.

    python benchmarks/exchange.py
"""

import argparse
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import KernelInterface

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._common import Benchmark, Report
from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._operator import finish_gradients
from lightning_mp.contrastive._sums.agreement import exchange_for
from lightning_mp.contrastive._sums.softmax import softmax_loss
from lightning_mp.contrastive._sums.sweep import NeedsGrad, plan_of
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles, block
from lightning_mp.contrastive._tiles.triton_tiles.tiles import DEFAULT_WORKSPACE_BYTES
from lightning_mp.plan.table import aligned

CASES = ((8, 8192), (64, 1024), (256, 256))
SHORTEST = 10  # pairs of rank 1 in the uneven cases

# The model. A launch of torch, of Triton and of a collective on the host, from profiles of H100
# machines; a product at 400 TFLOP/s, half of what large ones reach.
SECONDS = {"op": 5e-6, "kernel": 40e-6, "product": 8e-6, "collective": 30e-6}
FLOP_A_SECOND = 400e12

# The same for tiles that are stored: an H100's memory, and products inside a sweep.
BYTES_A_SECOND = 3e12
FLOP_A_SECOND_SWEPT = 600e12
# What is stored of a logit: bytes, and products of 16-bit halves that one of the loss's four takes.
STORED = {
    "bf16 features, logits in fp32": (4, 1),
    "bf16 features, exponentials in bf16": (2, 1),
    "fp32 features, logits in fp32": (4, 3),
}

TABLE = {
    "ranks x pairs": "{ranks} x {pairs}",
    "shortest": "{shortest}",
    "exchange": "{exchange}",
    "torch ops": "{torch_operations}",
    "Triton": "{triton_launches}",
    "products": "{products}",
    "collectives": "{collectives}",
    "device waits": "{device_waits}",
    "host ms (computed)": "{host_ms_computed:.2f}",
    "products ms (computed)": "{products_ms_computed:.2f}",
}

# They do no work on the device. What waits for the device would be among these last two.
_FREE = ("empty", "detach", "alias", "_unsafe_view", "promote_types")
_WAITS = ("_local_scalar_dense", "item", "equal", "is_nonzero")


class Counts(TorchDispatchMode):
    """What one rank's host does for one loss, forward and backward; counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        # `"op"` of torch that works on the device, `"kernel"` of Triton, `"product"` of a gradient,
        # for cuBLAS, and `"wait"`, which brings a value to the host.
        self.of: Counter[str] = Counter()
        # By the names of c10d's operators; the one for the facts is not among them.
        self.collectives: Counter[str] = Counter()

    @property
    def sent(self) -> int:
        """Collectives, with the one for the facts, which ranks need before there is a plan."""
        return self.collectives.total() + 1 if self.collectives else 0

    @property
    def host_seconds(self) -> float:
        """The host's time by the model."""
        counts = self.of | Counter(collective=self.sent)
        return sum(cost * counts[name] for name, cost in SECONDS.items())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        result = function(*args, **(kwargs or {}))
        name = function._opname
        if function.namespace == "c10d":
            self.collectives[name] += 1
        elif name in _WAITS:
            self.of["wait"] += 1
        elif function.namespace == "aten" and not function.is_view:
            self.of["op"] += not any(free in name for free in _FREE)
        return result


def count(
    sizes: Sequence[int],
    width: int,
    exchange: str,
    workspace_bytes: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    counting: type[Counts] = Counts,
) -> Counts:
    """Return what rank 0 does for a loss with `sizes` pairs on the ranks; none is there."""
    counts = counting()

    def counted(name: str) -> Callable[..., None]:
        return lambda *_, **__: counts.of.update([name])

    dist.init_process_group("fake", rank=0, world_size=len(sizes), store=FakeStore())
    try:
        with (
            mock.patch.object(KernelInterface, "__getitem__", return_value=counted("kernel")),
            mock.patch.object(block, "add_product", counted("product")),
            # Fakes have no address, and launchers look at its alignment: this one is a page's.
            mock.patch.object(FakeTensor, "data_ptr", return_value=4096),
            FakeTensorMode(),
        ):
            features = [torch.empty(sizes[0], width, dtype=dtype) for _ in range(2)]
            inputs = (*features, torch.empty(()), None)
            travel = exchange_for(
                sizes, features[0], exchange, lambda left: TritonTiles(left, arch=90),
                workspace_bytes,
            )  # fmt: skip
            needs_grad = NeedsGrad(image=True, text=True, scale=True)
            plan = plan_of(Request(*inputs), *travel, needs_grad, pairs=sum(sizes))
            with counts:
                found = softmax_loss(plan)
                found.loss.float()  # as the operator does
                none = torch.empty(0)
                gradients = [found.d_image_bD, found.d_text_nD, found.d_scale, none, none]
                finish_gradients(torch.empty(()), *inputs, None, gradients)
    finally:
        # The next case has another number of ranks.
        dist.destroy_process_group()
    return counts


def saved_by_storing(stored_bytes: int, products: int, width: int) -> float:
    """Return the share of a loss's products whose time stored tiles would save; negative: cost.

    A logit's bytes are stored by the first sweep and loaded by the second, which saves one of four
    units of so many products.
    """
    unit = products * 2 * width / FLOP_A_SECOND_SWEPT
    return (unit - 2 * stored_bytes / BYTES_A_SECOND) / (4 * unit)


def largest_stored(stored_bytes: int, budget: int) -> int:
    """Return the largest batch of one process whose stored tiles, in rows by 16, fit a budget."""
    most = math.isqrt(budget // stored_bytes)
    return next(b for b in range(most, 0, -1) if b * -(-b // 16) * 16 * stored_bytes <= budget)


def _stored_table() -> str:
    widths = (512, 768, 1024)
    header = ["tiles stored", *(f"D = {width}" for width in widths), "all fit up to b ="]
    # Half of the workspace; and where it holds a quarter.
    sizes = (DEFAULT_WORKSPACE_BYTES // 2, 2 * DEFAULT_WORKSPACE_BYTES)
    rows = []
    for name, stored in STORED.items():
        saved = [f"{saved_by_storing(*stored, width):.0%}" for width in widths]
        rows.append([name, *saved, *(f"{largest_stored(stored[0], size):,}" for size in sizes)])
    return "\n".join(aligned([[*header, "a quarter up to b ="], *rows]))


def measure(args: argparse.Namespace) -> Iterator[Report]:
    """Count the cases, and say the models."""
    rows = []
    kinds = (("ring", False), ("slices", False), ("slices", True))
    for (world_size, batch), (exchange, is_uneven) in itertools.product(CASES, kinds):
        sizes = [batch] * world_size
        if is_uneven:
            sizes[1] = SHORTEST
        flop = 4 * 2 * batch * sum(sizes) * args.width
        n = count(sizes, args.width, exchange)
        what = {
            "ranks": world_size, "pairs": batch, "shortest": min(sizes), "exchange": exchange,
            "width": args.width,
        }  # fmt: skip
        found = {
            "torch_operations": n.of["op"],
            "triton_launches": n.of["kernel"],
            "products": n.of["product"],
            "collectives": n.sent,
            "device_waits": n.of["wait"],
            "host_ms_computed": 1e3 * n.host_seconds,
            "products_ms_computed": 1e3 * flop / FLOP_A_SECOND,
        }
        rows.append((what, found))
    costs = ", ".join(f"{1e6 * seconds:.0f} us a {name}" for name, seconds in SECONDS.items())
    said = [
        f"Counted without a GPU. Computed: {costs}; {FLOP_A_SECOND / 1e12:.0f} TFLOP/s.\n",
        _stored_table(),
        f"Of the products' time, computed: {BYTES_A_SECOND / 1e12:.0f} TB/s, "
        f"{FLOP_A_SECOND_SWEPT / 1e12:.0f} TFLOP/s; nothing else is counted. The last is built.",
    ]
    yield Report(rows, TABLE, said)


main = Benchmark("exchange", __doc__, measure, {"width": dict(default=768, help="D")})

if __name__ == "__main__":
    raise SystemExit(main())
