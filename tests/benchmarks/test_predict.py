"""The prediction for an H100 follows its formula, and the table of tile shapes follows it."""

import csv
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks._launches import Launch
from benchmarks._machine_code import Compiled, Compiler
from benchmarks.predict import ARCH, CLOCK, MULTIPROCESSORS, predicted, sweep_launches
from lightning_mp.contrastive._tiles.triton_tiles.configs import TileConfig, find_configs
from tests.contrastive.triton_tiles.compiling import kernels_of

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "tile_rows.csv"
BATCH = 65536


def code(behind: list[str], shared: int = 200 * 1024) -> Compiled:
    listing = ("LDG.E", "HGMMA.64x128x16.F32.BF16", *behind)
    return Compiled(200, 256, 0, shared, listing, (), (), "")


def launch(kernel: str, tile: tuple[int, int, int]) -> Any:
    return SimpleNamespace(kernel=kernel, tile=tile)


def test_main_loop_takes_the_slowest_of_products_shared_memory_and_l2() -> None:
    tall = predicted(launch("lse_kernel", (256, 128, 64)), code([]), 768)
    assert tall.main == 2 * (256 + 128) * 768 / (5120 / 132)
    # Instructions of 64 x 32 read each operand four times; the copy engine writes both once.
    narrow = dataclasses.replace(code([]), listing=("HGMMA.64x32x16.F32.BF16",))
    shared = (4 * 256 * 32 + 4 * 128 * 32 + (256 + 128) * 32) * 48 / 128
    assert predicted(launch("lse_kernel", (256, 128, 64)), narrow, 768).main == shared
    assert tall.epilogue == 256 * 128 / 16
    clocks = tall.main + tall.epilogue + 1700
    tiles = BATCH**2 / (256 * 128)
    assert tall.seconds(BATCH) == pytest.approx(clocks * tiles / MULTIPROCESSORS / CLOCK)


def test_epilogue_counts_instructions_shuffles_and_barriers() -> None:
    behind = ["FADD"] * 9 + ["MUFU.EX2"] + ["SHFL.BFLY"] * 300 + ["BAR.SYNC"] * 2 + ["FADD"] * 8
    tile = predicted(launch("lse_kernel", (256, 128, 64)), code(behind), 768)
    assert tile.epilogue == 256 * 128 / 16 + 300 * 8 + 2 * 30


def test_prediction_is_the_mean_of_perfect_and_no_overlap_where_two_programs_fit() -> None:
    small = dataclasses.replace(code([]), shared_bytes=96 * 1024, registers=120)
    tile = launch("softmax_kernel", (128, 128, 64))
    one, two = (predicted(tile, each, 768) for each in (code([]), small))
    assert one.epilogue == 128 * 128 / 16 + 2 * 128 * 128 / 32  # includes storing the tile
    assert (one.programs, two.programs) == (1, 2)
    assert one.range(BATCH) == (one.seconds(BATCH), one.seconds(BATCH))
    low, high = two.range(BATCH)
    assert (high, low) == (one.seconds(BATCH), pytest.approx(high * two.main / one.bounds[1]))
    assert two.seconds(BATCH) == pytest.approx((low + high) / 2)


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config) -> Iterator[Compiler]:
    with kernels_of(pytestconfig) as compile_:
        yield compile_


@pytest.fixture(scope="module")
def launches() -> list[Launch]:
    """Return the launches of every row; the machine code does not depend on the width."""
    return sweep_launches(768, autotune=True)


def measured(kernel: str, width: int) -> dict[str, float]:
    """Return the measured milliseconds by tile, empty before the first run on a GPU."""
    if not RESULTS.exists():
        return {}
    asked = {"arch": str(ARCH), "kernel": kernel, "dtype": "bf16", "width": str(width)}
    with RESULTS.open(newline="") as file:
        return {
            row["tile"]: float(row["ms"])
            for row in csv.DictReader(file)
            if asked.items() <= row.items()
        }


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["lse", "softmax"])
@pytest.mark.parametrize("width", [64, 128, 256, 512, 768, 1024, 1280])
def test_default_row_is_the_fastest_measured_or_else_predicted(
    kernel: Any, width: int, launches: list[Launch], compiled: Compiler
) -> None:
    rows, times = find_configs(kernel, ARCH, torch.bfloat16, width), measured(kernel, width)
    assert len(rows) == 3

    def launch_of(row: TileConfig) -> Launch:
        (own,) = (x for x in launches if x.is_row(row) and x.kernel == f"{kernel}_kernel")
        return own

    def time(row: TileConfig) -> float:
        if times:
            return times["x".join(map(str, row.tile))]
        own = launch_of(row)
        return predicted(own, compiled(own), width).seconds(BATCH)

    if not times:
        compiled.all([launch_of(row) for row in rows])
    assert min(rows, key=time) == rows[0]
