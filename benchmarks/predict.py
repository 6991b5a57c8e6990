"""Predict the contrastive loss on an H100 from the machine code of its kernels, without a GPU.

    python benchmarks/predict.py
    python benchmarks/predict.py --width 1024 --rows

The kernels are compiled for the architecture by Triton on any machine, and their machine code is
counted. A tile of M x N logits of width D takes, in clocks of one multiprocessor:

    main     = max(M N D / 2048,  bytes that the products read from shared memory / 128)
    epilogue = max(M N / 16,  instructions up to the last exponential x warps / 4)
               + max(instructions after it x warps / 4,  shuffles x warps)
               + 30 x barriers + bytes of the stored tile / 32
    tile     = main + epilogue + 1700, or max(2 main, main + epilogue + 1700) / 2 for two programs

2048 products of bf16 (4096 FLOP) a clock by tensor cores, 128 bytes by shared memory, 16
exponentials and 4 instructions of a warp are the chip's; 1700 clocks from the launch of a program
to its first product and 30 for a barrier are estimates. The two products of the gradients are those
of cuBLAS, at an assumed 720 TFLOP/s, and passes over features move an assumed 162 bytes a value at
3 TB/s. Instructions are counted where they stand, of branches that are not taken too, so that the
epilogue is an upper bound; two programs are taken to overlap without loss, which is a lower one. It
is a prediction: the first measurement replaces it.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks._launches import Launch, fake_gpu, launches_in
from benchmarks._machine_code import Compiled, Compiler
from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._sums.softmax import softmax_loss
from lightning_mp.contrastive._sums.sweep import NeedsGrad, OneRank, plan_of
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles
from lightning_mp.contrastive._tiles.triton_tiles.configs import table_arch

MULTIPROCESSORS, CLOCK = 132, 1.755e9
ROWS = 8192
SHARED_BYTES, REGISTERS = 228 * 1024, 65536
GEMM, PEAK, BANDWIDTH = 720e12, 790e12, 3.0e12
PASSES = 162  # bytes of a value of the features, in all passes over them
LAUNCHES = 0.3e-3  # seconds
START, BARRIER = 1700, 30
_WGMMA = re.compile(r"HGMMA\.64x(\d+)x16")


class Prediction(NamedTuple):
    """What a row of the table is predicted to do.

    Args:
        name: The kernel, its tile, warps and stages.
        main: Clocks of products.
        epilogue: Clocks behind them.
        programs: At a time on a multiprocessor.
        rate: FLOP/s.
    """

    name: str
    main: float
    epilogue: float
    programs: int
    rate: float


def predicted(launch: Launch, code: Compiled, width: int) -> Prediction:
    """Return what follows from the machine code of a launch."""
    assert launch.tile is not None
    rows, columns, _ = launch.tile
    wide = max(int(n) for each in code.listing for n in _WGMMA.findall(each))
    warps, steps = code.threads / 32, width / 16
    shared = (rows * columns / wide + rows * columns / 64 + rows + columns) * 32 * steps / 128
    main = max(rows * columns * width / 2048, shared)
    last = max(at for at, each in enumerate(code.listing) if each.startswith("HGMMA"))
    behind = code.listing[last + 1 :]
    exponential = max((at for at, each in enumerate(behind) if each.startswith("MUFU")), default=0)
    after = behind[exponential + 1 :]
    shuffles = sum(each.startswith("SHFL") for each in after)
    barriers = sum(each.startswith("BAR") for each in behind)
    stored = 2 * rows * columns / 32 if launch.kernel == "softmax_kernel" else 0.0
    epilogue = max(rows * columns / 16, exponential * warps / 4)
    epilogue += max(len(after) * warps / 4, shuffles * warps) + BARRIER * barriers + stored
    fit = SHARED_BYTES // max(code.shared_bytes, 1), REGISTERS // (code.registers * code.threads)
    programs = min(2, max(1, min(fit)))
    clocks = main + epilogue + START
    if programs == 2:
        clocks = max(2 * main, clocks) / 2
    rate = 2 * rows * columns * width / clocks * MULTIPROCESSORS * CLOCK
    words = str(launch).partition("[")[0].strip()
    return Prediction(words, main, epilogue, programs, rate)


def tiles(width: int, every_row: bool) -> dict[str, list[Prediction]]:
    """Return predictions of the kernels of both sweeps, those of the default first."""
    found: dict[str, list[Prediction]] = {"lse_kernel": [], "softmax_kernel": []}
    with tempfile.TemporaryDirectory() as folder:
        compiler = Compiler(Path(folder))
        for autotune in (False, True) if every_row else (False,):
            with launches_in(90) as launches, fake_gpu(90):
                rows, columns = (torch.empty(ROWS, width, dtype=torch.bfloat16) for _ in range(2))
                table = TritonTiles(arch=table_arch((9, 0)), autotune=autotune)
                request = Request(rows, columns, torch.empty(()), stores_tiles=False)
                softmax_loss(plan_of(request, OneRank(ROWS), table, NeedsGrad(True, True, True)))
            for launch in launches.values():
                if launch.kernel in found and launch.multiplies:
                    tile = predicted(launch, compiler(launch), width)
                    if tile.name not in {each.name for each in found[launch.kernel]}:
                        found[launch.kernel].append(tile)
    return found


def main() -> None:
    """Print the prediction."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=65536, help="pairs")
    parser.add_argument("--width", type=int, default=768, help="of features")
    parser.add_argument("--rows", action="store_true", help="all rows of the table, by autotune")
    args = parser.parse_args()
    found, product = tiles(args.width, args.rows), 2 * args.batch**2 * args.width
    print(
        "| kernel | main loop | epilogue | programs | TFLOP/s | time |\n|---|---|---|---|---|---|"
    )
    for tile in (each for kernel in found.values() for each in kernel):
        print(
            f"| {tile.name} | {tile.main:.0f} | {tile.epilogue:.0f} | {tile.programs} "
            f"| {tile.rate / 1e12:.0f} | {product / tile.rate * 1e3:.1f} ms |"
        )
    lse, softmax = (product / kernel[0].rate for kernel in found.values())
    gemms = 2 * product / GEMM
    passes = PASSES * args.batch * args.width / BANDWIDTH
    total = lse + softmax + gemms + passes + LAUNCHES
    floor = 4 * product / PEAK
    print(f"\nFour products alone, at {PEAK / 1e12:.0f} TFLOP/s: {floor * 1e3:.1f} ms.")
    print(
        f"Predicted, not measured: {total * 1e3:.1f} ms forward and backward at b = "
        f"{args.batch:,}, D = {args.width}, bf16, H100 (lse {lse * 1e3:.1f}, softmax "
        f"{softmax * 1e3:.1f}, products of the gradients {gemms * 1e3:.1f}, passes over features "
        f"{passes * 1e3:.1f}, launches {LAUNCHES * 1e3:.1f})."
    )


if __name__ == "__main__":
    main()
