"""Time every row of the table of tile shapes on this GPU.

    python benchmarks/tile_rows.py --width 512 768 1024

Each row is timed on one block of logits as `autotune=True` times it, for the sweep of the
log-sum-exps and for that of the softmax; choices of earlier runs are neither read nor replaced.
The rows for 9.0 in `configs.json` follow the figures in `results/tile_rows.csv`, or
`benchmarks/predict.py` until there are some; a test compares them.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from benchmarks import _common as common
from benchmarks._contenders import DTYPES
from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._exchange.exchange import Ring
from lightning_mp.contrastive._sums.softmax import softmax_loss
from lightning_mp.contrastive._sums.sweep import NeedsGrad, Plan
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles, tiles
from lightning_mp.contrastive._tiles.triton_tiles.configs import TileConfig, timings

TABLE = {
    "kernel": "{kernel}",
    "tile": "{tile}",
    "warps": "{warps}",
    "stages": "{stages}",
    "ms": "{ms:.3f}",
    "TFLOP/s": "{tflops:,.0f}",
    "x fastest": "{time_ratio:.2f}",
}


@contextmanager
def timed_rows() -> Iterator[list[tuple[TileConfig, float, tuple[int, int]]]]:
    """Record each row that autotuning times: its seconds and the shape of its block."""
    found: list[tuple[TileConfig, float, tuple[int, int]]] = []

    def choose(
        configs: Sequence[TileConfig], what: str, device: torch.device, fastest: Any
    ) -> TileConfig:
        run: Any = fastest.args[1]  # a partial of the launcher and its block
        seconds = timings(configs, run, device)
        found.extend((config, each, run.args[0].shape) for config, each in seconds.items())
        return min(seconds, key=lambda config: seconds[config])

    with mock.patch.object(tiles, "cached_choice", choose):
        yield found


def measure(args: argparse.Namespace) -> Iterator[common.Report]:
    """Time the rows for all widths and dtypes."""
    for width in args.width:
        for dtype in args.dtype:
            yield _report(width, dtype, args)


def _report(width: int, dtype: str, args: argparse.Namespace) -> common.Report:
    print(f"\nD={width:,} {dtype}", flush=True)
    random = torch.Generator(args.device).manual_seed(0)
    shape = 2, args.batch, width
    values = F.normalize(torch.randn(shape, generator=random, device=args.device), dim=-1)
    image, text = values.to(DTYPES[dtype])
    scale = torch.tensor(100.0, device=args.device)
    request = Request(image, text, scale, stores_tiles=False)
    plan = Plan(
        request, Ring([args.batch]), TritonTiles(autotune=True), NeedsGrad(True, True, True)
    )
    with timed_rows() as found, torch.no_grad():
        softmax_loss(plan)
    fastest: dict[str, float] = {}
    for row, seconds, _ in found:
        fastest[row.kernel] = min(seconds, fastest.get(row.kernel, seconds))
    rows = []
    for row, seconds, (n, c) in found:
        what = {"arch": row.arch, "kernel": row.kernel, "dtype": dtype, "width": width}
        what |= {"tile": "x".join(map(str, row.tile)), "warps": row.warps, "stages": row.stages}
        figures = {"ms": 1e3 * seconds, "tflops": 2 * n * c * width / seconds / 1e12}
        figures["time_ratio"] = seconds / fastest[row.kernel]
        rows.append((what, figures))
    return common.Report(rows, TABLE)


OPTIONS = {
    "batch": dict(default=16384, toy=128, help="number of pairs"),
    "width": dict(default=[256, 512, 768, 1024], toy=[16], help="feature widths, a table each"),
    "dtype": dict(choices=DTYPES, default=["bf16"], help="dtypes of the features"),
}
main = common.Benchmark("tile_rows", __doc__, measure, OPTIONS)

if __name__ == "__main__":
    raise SystemExit(main())
