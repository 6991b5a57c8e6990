"""The prediction for an H100 is its formula, on machine code that is written here."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks._machine_code import Compiled
from benchmarks.predict import CLOCK, MULTIPROCESSORS, predicted


def code(behind: list[str], shared: int = 200 * 1024) -> Compiled:
    listing = ("LDG.E", "HGMMA.64x128x16.F32.BF16", *behind)
    return Compiled(200, 256, 0, shared, listing, (), (), "")


def launch(kernel: str, tile: tuple[int, int, int]) -> Any:
    return SimpleNamespace(kernel=kernel, tile=tile)


def test_tile_without_epilogue_is_bound_by_shared_memory() -> None:
    tile = predicted(launch("lse_kernel", (256, 128, 64)), code([]), 768)
    # Reads of A and B for every instruction of 64 x 128, and what the copy engine writes.
    assert tile.main == (256 * 32 + 4 * 128 * 32 + (256 + 128) * 32) * 48 / 128
    assert tile.epilogue == 256 * 128 / 16
    clocks = tile.main + tile.epilogue + 1700
    assert tile.rate == pytest.approx(2 * 256 * 128 * 768 / clocks * MULTIPROCESSORS * CLOCK)


def test_epilogue_counts_instructions_shuffles_and_barriers() -> None:
    behind = ["FADD"] * 9 + ["MUFU.EX2"] + ["SHFL.BFLY"] * 300 + ["BAR.SYNC"] * 2 + ["FADD"] * 8
    tile = predicted(launch("lse_kernel", (256, 128, 64)), code(behind), 768)
    assert tile.epilogue == 256 * 128 / 16 + 300 * 8 + 2 * 30


def test_two_programs_overlap_where_both_fit() -> None:
    small = dataclasses.replace(code([]), shared_bytes=96 * 1024, registers=120)
    tile = launch("softmax_kernel", (128, 128, 64))
    one, two = (predicted(tile, each, 768) for each in (code([]), small))
    assert one.epilogue == 128 * 128 / 16 + 2 * 128 * 128 / 32  # and the tile is stored
    assert (one.programs, two.programs) == (1, 2)
    assert two.rate > one.rate
