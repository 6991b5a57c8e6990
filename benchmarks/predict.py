"""Predict the contrastive losses on an H100 from the machine code of their kernels, without a GPU.

    python benchmarks/predict.py
    python benchmarks/predict.py --objective sigmoid --width 1024
    python benchmarks/predict.py --rows

Triton compiles the kernels for an H100 on any machine, and the instructions of the machine code are
counted. A program computes a tile of M x N logits of width D, in clocks of a multiprocessor (SM):

    main     = max(M N D / 2048, bytes that products read from shared memory / 128,
                   bytes of operands / 38.8)
    epilogue = max(M N / 16, instructions up to the last exponential x warps / 4)
               + max(instructions after it x warps / 4, shuffles x warps)
               + 30 x barriers + bytes of the stored tile / 32
    tile     = main + epilogue + 1700

Where two programs fit on an SM, one can multiply while the other is in its epilogue. The time of a
tile then lies between `tile` (no overlap) and `max(main, tile / 2)` (perfect overlap); the
prediction is the mean of the two.

An SM multiplies 2048 pairs of bf16 values a clock (4096 FLOP), reads 128 bytes of shared memory,
and executes 16 exponentials and 4 warp instructions. Assumptions: an L2 cache that delivers 5120
bytes a clock, which NVIDIA states for the A100, 38.8 for each SM; 1700 clocks from the launch of a
program to its first product; 30 clocks for a barrier; 720 TFLOP/s of cuBLAS for the two products of
the gradients; 162 bytes for each value of the features in all passes over them, at 3 TB/s.
Instructions in branches that are not taken are counted as well, so the epilogue is an upper bound.

The order of the rows for 9.0 in `configs.json` follows this prediction until `tile_rows.py` has
measured the rows on a GPU; a test compares them.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks._launches import Launch, call_loss, fake_gpu, launches_in
from benchmarks._machine_code import Compiled, Compiler
from lightning_mp import ContrastiveLoss, SigmoidContrastiveLoss

ARCH = 90
MULTIPROCESSORS, CLOCK = 132, 1.755e9
ROWS = 8192
SHARED_BYTES, REGISTERS = 228 * 1024, 65536
L2_BYTES = 5120 / MULTIPROCESSORS
GEMM, PEAK, BANDWIDTH = 720e12, 790e12, 3.0e12
PASSES = 162  # bytes for each value of the features, in all passes over them
LAUNCHES = 0.3e-3  # seconds
START, BARRIER = 1700, 30
LOSSES = {"softmax": ContrastiveLoss, "sigmoid": SigmoidContrastiveLoss}
# The kernels of the sweeps; each computes the logits once.
KERNELS = {"softmax": ("lse_kernel", "softmax_kernel"), "sigmoid": ("sigmoid_kernel",)}
_WGMMA = re.compile(r"HGMMA\.64x(\d+)x16")


@dataclass(frozen=True)
class Prediction:
    """The predicted clocks of one tile.

    Args:
        main: Clocks of the products.
        epilogue: Clocks of the work on the tile after the products.
        programs: Number of programs that run on an SM at the same time, 1 or 2.
        tile: Rows and columns of the tile.
    """

    main: float
    epilogue: float
    programs: int
    tile: tuple[int, int]

    @property
    def bounds(self) -> tuple[float, float]:
        """Clocks of a tile with perfect and with no overlap of the programs on an SM."""
        alone = self.main + self.epilogue + START
        return (alone if self.programs == 1 else max(self.main, alone / 2)), alone

    def seconds(self, batch: int) -> float:
        """Return the predicted time of all tiles of a batch."""
        return self._seconds(sum(self.bounds) / 2, batch)

    def range(self, batch: int) -> tuple[float, float]:
        """Return the time of all tiles of a batch with perfect and with no overlap."""
        low, high = self.bounds
        return self._seconds(low, batch), self._seconds(high, batch)

    def _seconds(self, clocks: float, batch: int) -> float:
        tiles = batch**2 / (self.tile[0] * self.tile[1])
        return clocks * tiles / MULTIPROCESSORS / CLOCK


def predicted(launch: Launch, code: Compiled, width: int) -> Prediction:
    """Return the prediction for a launch, from its machine code."""
    assert launch.tile is not None
    rows, columns, _ = launch.tile
    wide = max(int(n) for each in code.listing for n in _WGMMA.findall(each))
    warps, steps = code.threads / 32, width / 16
    shared = (rows * columns / wide + rows * columns / 64 + rows + columns) * 32 * steps / 128
    operands = 2 * (rows + columns) * width / L2_BYTES
    main = max(rows * columns * width / 2048, shared, operands)
    last = max(at for at, each in enumerate(code.listing) if each.startswith("HGMMA"))
    behind = code.listing[last + 1 :]
    exponential = max((at for at, each in enumerate(behind) if each.startswith("MUFU")), default=0)
    after = behind[exponential + 1 :]
    shuffles = sum(each.startswith("SHFL") for each in after)
    barriers = sum(each.startswith("BAR") for each in behind)
    stored = 0.0 if launch.kernel == "lse_kernel" else 2 * rows * columns / 32
    epilogue = max(rows * columns / 16, exponential * warps / 4)
    epilogue += max(len(after) * warps / 4, shuffles * warps) + BARRIER * barriers + stored
    fit = SHARED_BYTES // max(code.shared_bytes, 1), REGISTERS // (code.registers * code.threads)
    return Prediction(main, epilogue, min(2, max(1, min(fit))), (rows, columns))


def sweep_launches(width: int, objective: str = "softmax", autotune: bool = False) -> list[Launch]:
    """Return the launches of a loss that multiply bf16 tiles on an H100, in their order.

    Args:
        width: Of the features.
        objective: `"softmax"` or `"sigmoid"`.
        autotune: Whether every row of the table is launched, or only the first of each kernel.
    """
    with launches_in(ARCH) as launches, fake_gpu(ARCH):
        image, text = (torch.empty(ROWS, width, dtype=torch.bfloat16) for _ in range(2))
        loss = LOSSES[objective](backend="triton", autotune=autotune)
        call_loss(loss, image.requires_grad_(), text.requires_grad_(), torch.empty(()))
    # The variant with two exponentials returns at once unless one exponential would overflow.
    return [
        launch
        for launch in launches.values()
        if launch.kernel in KERNELS[objective] and not launch.constants.get("WIDE", False)
    ]


def _lines(found: list[tuple[Launch, Prediction]], batch: int) -> Iterator[str]:
    yield "| kernel | main loop | epilogue | programs | time | overlap: perfect to none |"
    yield "|---|---|---|---|---|---|"
    for launch, tile in found:
        name = str(launch).partition("[")[0].strip()
        low, high = (1e3 * each for each in tile.range(batch))
        yield (
            f"| {name} | {tile.main:.0f} | {tile.epilogue:.0f} | {tile.programs} "
            f"| {1e3 * tile.seconds(batch):.1f} ms | {low:.1f} to {high:.1f} ms |"
        )


def main() -> None:
    """Print the prediction."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--objective", choices=LOSSES, default="softmax")
    parser.add_argument("--batch", type=int, default=65536, help="number of pairs")
    parser.add_argument("--width", type=int, default=768, help="width of the features")
    parser.add_argument("--rows", action="store_true", help="predict all rows of the table")
    args = parser.parse_args()
    launches = sweep_launches(args.width, args.objective, args.rows)
    with tempfile.TemporaryDirectory() as folder:
        compiler = Compiler(Path(folder))
        found = [(each, predicted(each, compiler(each), args.width)) for each in launches]
    print("\n".join(_lines(found, args.batch)))
    # The default of each kernel is launched first.
    sweeps = {
        kernel: next(tile for launch, tile in found if launch.kernel == kernel)
        for kernel in KERNELS[args.objective]
    }
    product = 2 * args.batch**2 * args.width
    seconds = {name.removesuffix("_kernel"): x.seconds(args.batch) for name, x in sweeps.items()}
    seconds["gradient products"] = 2 * product / GEMM
    seconds["passes over features"] = PASSES * args.batch * args.width / BANDWIDTH
    seconds["launches"] = LAUNCHES
    units = len(sweeps) + 2
    floor = 1e3 * units * product / PEAK
    print(f"\n{units} products alone, at {PEAK / 1e12:.0f} TFLOP/s: {floor:.1f} ms.")
    parts = ", ".join(f"{name} {1e3 * each:.1f}" for name, each in seconds.items())
    print(
        f"Predicted, not measured: {1e3 * sum(seconds.values()):.1f} ms forward and backward of "
        f"the {args.objective} loss at b = {args.batch:,}, D = {args.width}, bf16, H100 ({parts})."
    )


if __name__ == "__main__":
    main()
