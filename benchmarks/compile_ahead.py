"""Compile the kernels without a GPU, into a cache that can be copied to a machine with one.

    TRITON_CACHE_DIR=kernels python benchmarks/compile_ahead.py --arch 90

The package runs as on a device, up to each launch. Triton's cache key consists of Triton's files,
the sources of the kernel and of the functions that it calls, the specialization, the options, the
version of the assembler and the architecture, but of no path and no device. The same wheels on the
GPU's machine therefore find the kernels. The cache also records the absolute paths of its files;
this script corrects the paths of a folder that was moved, or Triton would compile everything again.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton import knobs
from triton.runtime import JITFunction, driver

from benchmarks._launches import absent_device
from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._exchange.exchange import Ring
from lightning_mp.contrastive._sums.softmax import softmax_loss
from lightning_mp.contrastive._sums.sweep import NeedsGrad, Plan
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles
from lightning_mp.contrastive._tiles.triton_tiles.configs import table_arch
from lightning_mp.numerics.row_dots import fused_row_dots
from lightning_mp.numerics.stats_kernels import fused_stats
from lightning_mp.optim.safe_adamw import SafeAdamW

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# The number of tiles is a multiple of 16, as at all larger batches of the suite, and the batch is
# large enough that both softmax kernels are launched.
ROWS = 8192
WIDTHS = 512, 768, 1024


@contextmanager
def pretend(arch: int) -> Iterator[list[bool]]:
    """Make launches find or compile kernels; list whether each was in the cache."""
    hits: list[bool] = []
    run = JITFunction.run

    def find(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        # Triton's warm-up finds or compiles a kernel without launching it.
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def note(*, cache_hit: bool, **_: Any) -> None:
        hits.append(cache_hit)

    with (
        mock.patch.object(driver, "_active", absent_device(arch)),
        mock.patch.object(knobs.compilation, "listener", note),
        mock.patch.object(JITFunction, "run", find),
    ):
        yield hits


def sweeps(arch: int) -> None:
    """Launch the losses and gradients of one process for the dtypes and widths of the suite."""
    tiles = TritonTiles(arch=table_arch(divmod(arch, 10)))
    losses = ("both", True, True), ("image_to_text", True, False), ("text_to_image", False, True)
    for dtype, width, loss in itertools.product((BF16, FP16, FP32), WIDTHS, losses):
        directions, *sides = loss
        # Fake tensors skip the gradient products, which cuBLAS computes. They have no address;
        # CUDA's allocator returns aligned addresses such as this one.
        with FakeTensorMode(), mock.patch.object(FakeTensor, "data_ptr", return_value=4096):
            rows, columns = (torch.empty(ROWS, width, dtype=dtype) for _ in range(2))
            request, alone = Request(rows, columns, torch.empty(())), Ring([ROWS])
            softmax_loss(Plan(request, alone, tiles, NeedsGrad(False, False, False)))
            for keeps in (True, False):
                asked = dataclasses.replace(request, directions=directions, stores_tiles=keeps)
                softmax_loss(Plan(asked, alone, tiles, NeedsGrad(*sides, True)))
            for other in {dtype, FP32}:  # the other losses
                fused_row_dots(rows, columns.to(other))


def optimizer(arch: int) -> None:
    """Launch a step of SafeAdamW's fused kernel for fp32, fp16 and bf16 weights."""
    for dtype, clip in itertools.product((FP32, FP16, BF16), (None, 1.0)):
        params = [torch.zeros(64, dtype=dtype, requires_grad=True) for _ in range(7)]
        for param in params:
            param.grad = torch.zeros_like(param)
        adamw = SafeAdamW(params, lr=1e-3, clip_update_rms=clip)
        adamw.param_groups[0]["fused"] = True  # the constructor refuses this without a GPU
        adamw.step()


def statistics(arch: int) -> None:
    """Launch the kernels of the monitors' tensor statistics."""
    values = [torch.zeros(2**16, dtype=dtype) for dtype in (FP32, FP16, BF16)]
    fused_stats(values, torch.tensor(2.0**-14))


def settle(cache: Path) -> int:
    """Correct the paths that a moved cache records; return the number of corrected files."""
    changed = 0
    for note in cache.glob("*/__grp__*"):
        old = json.loads(note.read_text())["child_paths"]
        new = {name: str(note.parent / Path(path).name) for name, path in old.items()}
        if new != old:
            note.write_text(json.dumps({"child_paths": new}))
            changed += 1
    return changed


GROUPS = {launch.__name__: launch for launch in (sweeps, optimizer, statistics)}


def main(argv: Sequence[str] | None = None) -> None:
    """Compile the kernels that are not in the cache, and print how many are."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--arch", type=int, help="compute capability times ten; default: this GPU's"
    )
    parser.add_argument("--groups", choices=GROUPS, nargs="+", default=[*GROUPS])
    args = parser.parse_args(argv)
    if args.arch is None and not torch.cuda.is_available():
        parser.error("torch sees no GPU. Pass the architecture to compile for, such as --arch 90.")
    arch = args.arch or int("".join(map(str, torch.cuda.get_device_capability())))
    if moved := settle(Path(knobs.cache.dir).absolute()):
        print(f"Corrected the paths of {moved} kernels, whose folder was moved.")
    for group in args.groups:
        with pretend(arch) as hits:
            GROUPS[group](arch)
        compiled = hits.count(False)
        print(f"sm{arch}, {group}: {sum(hits)} in the cache, {compiled} compiled", flush=True)


if __name__ == "__main__":
    main()
