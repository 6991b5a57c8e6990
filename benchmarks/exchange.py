"""Count one rank's kernel launches, collectives and host syncs in one loss, by exchange and ranks.

Forward and backward run through the Triton launchers with fake tensors and a fake process group.
Launches are counted but not executed, so the counts are exact and need no GPU. A simple cost model
computes times from the counts, which show whether the host or the device is the bottleneck of a
step. If `shortest` is smaller than the pairs of a rank, rank 1 has fewer pairs, as in the last
batch of an epoch. A second table computes the device time saved by storing tiles of the first sweep
for the second, as `TorchTiles` does for all features and `TritonTiles` for fp32.

    python benchmarks/exchange.py
"""

import argparse
import functools
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
from lightning_mp.contrastive._exchange.exchange import Exchange, Ring
from lightning_mp.contrastive._operator import finish_gradients
from lightning_mp.contrastive._sums.agreement import exchange_for
from lightning_mp.contrastive._sums.softmax import softmax_loss
from lightning_mp.contrastive._sums.sweep import NeedsGrad, Plan
from lightning_mp.contrastive._tiles.tile_backend import TileBackend
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles, block
from lightning_mp.contrastive._tiles.triton_tiles.tiles import DEFAULT_WORKSPACE_BYTES
from lightning_mp.plan.table import aligned

CASES = ((8, 8192), (64, 1024), (256, 256))
SHORTEST = 10  # pairs of rank 1 in the uneven cases

# The cost model: seconds of the host for each launch, from profiles of H100 machines, and the rate
# of products, half of the rate of large products.
SECONDS = {"op": 5e-6, "kernel": 40e-6, "product": 8e-6, "collective": 30e-6}
FLOP_A_SECOND = 400e12

# The same for stored tiles: the memory bandwidth of an H100, and the rate of products in a sweep.
BYTES_A_SECOND = 3e12
FLOP_A_SECOND_SWEPT = 600e12
# Stored bytes of each logit, and 16-bit products for each of the four products of the loss.
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

# Parts of the names of operators that do no work on the device, and operators that wait for it.
_FREE = ("empty", "detach", "alias", "_unsafe_view", "promote_types")
_WAITS = ("_local_scalar_dense", "item", "equal", "is_nonzero")


class Counts(TorchDispatchMode):
    """Counts launches, collectives and host syncs of one rank inside the context."""

    def __init__(self) -> None:
        super().__init__()
        # By kind: `"op"` of torch on the device, `"kernel"` of Triton, `"product"` for a gradient
        # (cuBLAS), and `"wait"`, a host sync.
        self.of: Counter[str] = Counter()
        # By the name of c10d's operator, without the collective of `Facts`.
        self.collectives: Counter[str] = Counter()

    @property
    def sent(self) -> int:
        """Number of collectives, with the one in which ranks exchange facts before the plan."""
        return self.collectives.total() + 1 if self.collectives else 0

    @property
    def host_seconds(self) -> float:
        """Seconds of the host by the cost model."""
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
    """Return the counts of rank 0 for a loss with `sizes` pairs on the ranks, which are faked."""
    counts = counting()

    def counted(name: str) -> Callable[..., None]:
        return lambda *_, **__: counts.of.update([name])

    dist.init_process_group("fake", rank=0, world_size=len(sizes), store=FakeStore())
    try:
        with (
            mock.patch.object(KernelInterface, "__getitem__", return_value=counted("kernel")),
            mock.patch.object(block, "add_product", counted("product")),
            # Launchers check the alignment of addresses, which fake tensors lack; this is a page's.
            mock.patch.object(FakeTensor, "data_ptr", return_value=4096),
            FakeTensorMode(),
        ):
            features = [torch.empty(sizes[0], width, dtype=dtype) for _ in range(2)]
            inputs = (*features, torch.empty(()), None)
            tiles_of = functools.partial(TritonTiles, arch=90)
            travel: tuple[Exchange, TileBackend] = Ring([sizes[0]]), tiles_of(workspace_bytes)
            if len(sizes) > 1:
                travel = exchange_for(sizes, features[0], exchange, tiles_of, workspace_bytes)
            needs_grad = NeedsGrad(image=True, text=True, scale=True)
            plan = Plan(Request(*inputs), *travel, needs_grad, pairs=sum(sizes))
            with counts:
                found = softmax_loss(plan)
                found.loss.float()  # the operator does the same
                none = torch.empty(0)
                gradients = [found.d_image_bD, found.d_text_nD, found.d_scale, none, none]
                finish_gradients(torch.empty(()), *inputs, None, gradients)
    finally:
        # The next case needs a group with another number of ranks.
        dist.destroy_process_group()
    return counts


def saved_by_storing(stored_bytes: int, products: int, width: int) -> float:
    """Return the share of the time of a loss's products that stored tiles save.

    The first sweep stores the bytes of each logit and the second loads them instead of computing
    one of the loss's four units of work, each of which takes `products` products of 16-bit values.
    The share is negative if storing takes longer than computing.
    """
    unit = products * 2 * width / FLOP_A_SECOND_SWEPT
    return (unit - 2 * stored_bytes / BYTES_A_SECOND) / (4 * unit)


def largest_stored(stored_bytes: int, budget: int) -> int:
    """Return the largest batch of one process whose stored tiles fit a budget.

    Rows of the stored logits are padded to a multiple of 16.
    """
    most = math.isqrt(budget // stored_bytes)
    return next(b for b in range(most, 0, -1) if b * -(-b // 16) * 16 * stored_bytes <= budget)


def _stored_table() -> str:
    widths = (512, 768, 1024)
    header = ["tiles stored", *(f"D = {width}" for width in widths), "all fit up to b ="]
    # All tiles fit into half of the workspace, or a quarter of them does.
    sizes = (DEFAULT_WORKSPACE_BYTES // 2, 2 * DEFAULT_WORKSPACE_BYTES)
    rows = []
    for name, stored in STORED.items():
        saved = [f"{saved_by_storing(*stored, width):.0%}" for width in widths]
        rows.append([name, *saved, *(f"{largest_stored(stored[0], size):,}" for size in sizes)])
    return "\n".join(aligned([[*header, "a quarter up to b ="], *rows]))


def measure(args: argparse.Namespace) -> Iterator[Report]:
    """Count the cases, and print the parameters of the cost model."""
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
        f"Counts without a GPU; times by the cost model: {costs}; products at "
        f"{FLOP_A_SECOND / 1e12:.0f} TFLOP/s.\n",
        _stored_table(),
        f"Saved shares of the time of all products, computed from {BYTES_A_SECOND / 1e12:.0f} TB/s "
        f"and {FLOP_A_SECOND_SWEPT / 1e12:.0f} TFLOP/s. `TritonTiles` stores only the last kind.",
    ]
    yield Report(rows, TABLE, said)


main = Benchmark("exchange", __doc__, measure, {"width": dict(default=768, help="feature width")})

if __name__ == "__main__":
    raise SystemExit(main())
