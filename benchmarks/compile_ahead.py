"""Compile the kernels for a GPU that need not be there, into a cache that can be carried to it.

    TRITON_CACHE_DIR=kernels python benchmarks/compile_ahead.py --arch 90

The launchers of the package run as on a device, on CPU tensors and up to the launch. Triton's key
is made of its own files, the source of the kernel and of all that it calls, the specialisation, the
options, the assembler's version and the architecture, and of no path and no device; so the same
wheels on the GPU's machine find what lies here. Only the cache itself notes where its files lay: a
folder that was moved is put right first, or all of it would be compiled again.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import JITFunction, driver  # noqa: E402

from lightning_mp.contrastive._tiles.tile_backend import Kept, Logits  # noqa: E402
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles  # noqa: E402
from lightning_mp.contrastive._tiles.triton_tiles.configs import _ARCHS  # noqa: E402
from lightning_mp.numerics.fused_stats import fused_stats  # noqa: E402
from lightning_mp.numerics.row_dots import fused_row_dots  # noqa: E402
from lightning_mp.optim._adamw.foreach import AdamWOptions  # noqa: E402
from lightning_mp.optim._adamw.fused import fused_adamw_step  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Counts of tiles are multiples of 16, as at all larger batches of the suite; and shards are not so
# small that one of the twins will do.
ROWS = 8192
WIDTHS = 512, 768, 1024
# Triton remembers kernels by the number of the device: those are of one that is new.
_NUMBERS = itertools.count(-1, -1)


def absent_device(arch: int) -> Any:
    """Return Triton's driver, as far as finding a kernel needs one."""
    number = next(_NUMBERS)
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, warp_size=32),
        get_current_device=lambda: number,
        get_current_stream=lambda device: 0,
    )


@contextmanager
def pretend(arch: int) -> Iterator[list[bool]]:
    """Let launches find or compile kernels; list for each whether it lay in the cache."""
    hits: list[bool] = []
    run = JITFunction.run

    def find(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
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
    """Launch both sweeps of the loss, for the dtypes and widths of the suite."""
    tiles = TritonTiles(arch=_ARCHS.get(divmod(arch, 10), 80))
    for dtype in (BF16, FP16, FP32):
        for width in WIDTHS:
            rows, columns = (torch.zeros(ROWS, width, dtype=dtype) for _ in range(2))
            scale, lses = torch.tensor(100.0), torch.zeros(2, ROWS, dtype=torch.float64)
            prepared = tiles.prepare(rows, columns, scale)
            logits = Logits(rows, columns, scale, 0)
            kept = torch.empty(tiles.kept_values(ROWS, ROWS, dtype, rows.device))
            for memory in (kept[:0], kept)[: 1 + len(kept)]:
                keeping = logits._replace(kept=Kept(memory))
                tiles.lse_sweep(keeping, *lses, prepared=prepared)
            for wanted in ((True, True), (True, False), (False, True)):
                terms = tiles.pair_terms(lses[0], lses[1:], prepared.pos_b, wanted, ROWS)
            # The gradient products are cuBLAS'.
            for memory in (kept[:0], kept)[: 1 + len(kept)]:
                tiles.grad_sweep(logits._replace(kept=Kept(memory)), *lses, None, None)
            gradients = torch.zeros(2, ROWS, width)
            for d_rows, d_columns in (gradients, (gradients[0], None), (None, gradients[1])):
                tiles.finish(
                    rows, columns, d_rows, d_columns, terms.weight_b, scale, scale, ROWS, 1, True
                )  # fmt: skip
            for other in {dtype, FP32}:  # the same for the sigmoid loss
                fused_row_dots(rows, columns.to(other))


def optimizer(arch: int) -> None:
    """Launch the fused AdamW as SafeAdamW does, for fp32 and half weights."""
    for dtype, write_back in ((FP32, "nearest"), (FP16, "kahan"), (BF16, "kahan")):
        for clip in (None, 1.0):
            params, grads, residuals = ([torch.zeros(64, dtype=dtype)] * 7 for _ in range(3))
            moments, steps = [[torch.zeros(64)] * 7] * 2, [torch.ones(())] * 7
            fused_adamw_step(
                params, grads, *moments, residuals if write_back == "kahan" else None, steps,
                AdamWOptions(
                    lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, maximize=False,
                    rule="adam", write_back=write_back, seed=0, clip_update_rms=clip,
                    grad_scale=None, found_inf=None,
                ),
            )  # fmt: skip


def statistics(arch: int) -> None:
    """Launch the monitors' statistics of tensors."""
    values: Sequence[Tensor] = [torch.zeros(2**16, dtype=dtype) for dtype in (FP32, FP16, BF16)]
    fused_stats(values, (torch.tensor(2.0**-14), torch.tensor(2.0**-25)))


def settle(cache: Path) -> int:
    """Let the notes of a cache that was carried here name its present place; count the changes."""
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
    """Compile what the cache has not, and count what it has."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", type=int, help="capability times ten; this GPU's if not given")
    parser.add_argument("--groups", choices=GROUPS, nargs="+", default=[*GROUPS])
    args = parser.parse_args(argv)
    if args.arch is None and not torch.cuda.is_available():
        parser.error("torch sees no GPU. Say what to compile for, such as --arch 90.")
    arch = args.arch or int("".join(map(str, torch.cuda.get_device_capability())))
    if moved := settle(Path(knobs.cache.dir).absolute()):
        print(f"{moved} kernels were carried here from another folder.")
    for group in args.groups:
        with pretend(arch) as hits:
            GROUPS[group](arch)
        counts = f"{sum(hits)} in the cache, {len(hits) - sum(hits)} compiled"
        print(f"sm{arch}, {group}: {counts}", flush=True)


if __name__ == "__main__":
    main()
