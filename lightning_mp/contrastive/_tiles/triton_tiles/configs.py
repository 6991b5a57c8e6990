"""The table of tile shapes by kernel, architecture, dtype and width; `configs.json` holds it.

Every row states its reason and is compiled by the tests for its architecture, with no spilled
register. Rows of one key stand in order of preference: the first is used, autotuning times all.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, Literal

import torch

__all__ = [
    "Kernel",
    "TileConfig",
    "all_configs",
    "arch_of",
    "fastest",
    "find_configs",
    "find_stored_configs",
    "find_threshold_config",
    "table_arch",
]

Kernel = Literal["lse", "softmax", "softmax_wide"]

_FIRST_ARCH = 80  # bf16 on tensor cores and asynchronous copies
_ARCHS = {(9, 0): 90, (10, 0): 100, (10, 3): 100, (12, 0): 120, (12, 1): 120}
_ROUNDS = 3
_RUNS = 20  # that follow each other without a gap
_CYCLES_A_SECOND = 2e9  # of a GPU's clock; a sleep that is twice as long as it must be will do


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How one kernel cuts its work.

    Args:
        kernel: What it is for; the rows of `"lse"` also serve the tiles that are redone.
        arch: Compute capability times ten that it was chosen for.
        dtypes: Names of the operands' dtypes.
        max_width: The largest width, in values, that it is for; `None` is any.
        tile: Rows, columns and slice of the width of a tile, in values.
        group: Rows of tiles that neighbouring programs go through together.
        warps: Warps of a program.
        stages: Slices in flight.
        tma: Whether Hopper's copy engine moves operands and softmax tiles.
        reason: Why this row.
    """

    kernel: Kernel
    arch: int
    dtypes: tuple[str, ...]
    max_width: int | None
    tile: tuple[int, int, int]
    group: int
    warps: int
    stages: int
    tma: bool
    reason: str

    @property
    def launch_options(self) -> dict[str, Any]:
        """The compile-time arguments that the kernels of all sweeps take, and compiler options."""
        tile_m, tile_n, tile_k = self.tile
        return {
            "TILE_M": tile_m, "TILE_N": tile_n, "TILE_K": tile_k, "TMA": self.tma,
            "GROUP": self.group, "num_warps": self.warps, "num_stages": self.stages,
            # Not every version of Triton fuses multiply-adds unless it is asked to.
            "enable_fp_fusion": True,
        }  # fmt: skip

    def tiles(self, rows: int, columns: int) -> tuple[int, int]:
        """Return how many tiles cover a block, down and across."""
        return -(-rows // self.tile[0]), -(-columns // self.tile[1])


@functools.cache
def all_configs() -> tuple[TileConfig, ...]:
    """Return the whole table."""
    text = resources.files(__package__).joinpath("configs.json").read_text(encoding="utf-8")
    rows = json.loads(text)
    return tuple(
        TileConfig(**{**row, "dtypes": tuple(row["dtypes"]), "tile": tuple(row["tile"])})
        for row in rows
    )


def find_configs(
    kernel: Kernel, arch: int, dtype: torch.dtype, width: int
) -> tuple[TileConfig, ...]:
    """Return the rows for a kernel, best guess first.

    Raises:
        ValueError: The table has no such dtype or architecture.
    """
    name = str(dtype).removeprefix("torch.")
    found = tuple(
        row
        for row in all_configs()
        if row.kernel == kernel
        and row.arch == arch
        and name in row.dtypes
        and (row.max_width is None or width <= row.max_width)
    )
    if not found:
        known = sorted({(row.arch, dtype) for row in all_configs() for dtype in row.dtypes})
        raise ValueError(
            f"Passed dtype {name} on architecture {arch} for the kernel {kernel!r}. The table has "
            f"rows for {known}. Use one of these, or `backend='torch'`."
        )
    return found


def find_stored_configs(arch: int, dtype: torch.dtype, width: int) -> tuple[TileConfig, TileConfig]:
    """Return the shapes of tiles whose products one sweep keeps, and of those that are read again.

    To keep tiles of 128 x 256 takes registers that sums of theirs leave to no chip. What is read
    is not multiplied: small tiles wait for memory beside each other.
    """
    lse = next(row for row in find_configs("lse", arch, dtype, width) if row.tile[1] < 256)
    wide = find_configs("softmax_wide", arch, dtype, width)[0]
    return lse, dataclasses.replace(wide, tile=(64, 64, wide.tile[2]), warps=4)


def find_threshold_config(
    arch: int, dtype: torch.dtype, width: int, *, has_ids: bool, has_guides: bool
) -> TileConfig:
    """Return the shape of tiles whose log-sum-exps leave out what is too similar.

    Thresholds take registers: tiles of 128 x 256 spill with them on all chips, and on 9.0 those of
    128 x 128 with ids as well. Guides have a second product, so the row that keeps the least in
    registers, the last one, is theirs.
    """
    wide = find_configs("softmax_wide", arch, dtype, width)[-1 if has_guides else 0]
    if arch == 90 and has_ids:
        return dataclasses.replace(wide, tile=(128, 64, wide.tile[2]), warps=8)
    return wide


def arch_of(device: torch.device) -> int:
    """Return the architecture whose rows serve a device: its own, or 80 for all that have none.

    A row for 80 needs nothing that a later chip lacks, and shared memory that the smallest has.
    Those of 100 (B200) serve 10.3 (B300), those of 120 (RTX 50) also 12.1: one family each.
    """
    if device.type != "cuda":
        return _FIRST_ARCH  # Triton's interpreter
    return table_arch(torch.cuda.get_device_capability(device))


def table_arch(capability: tuple[int, int]) -> int:
    """Return the architecture whose rows serve a compute capability."""
    return _ARCHS.get(capability, _FIRST_ARCH)


def fastest(
    configs: Sequence[TileConfig], run: Callable[[TileConfig], object], device: torch.device
) -> TileConfig:
    """Return the tile shape with the shortest of three timings, after a run that compiles.

    On CUDA the device's own time counts: launching a kernel can take the host longer than the
    device needs for it. A timing is that of 20 runs which are queued while the device sleeps.

    Raises:
        RuntimeError: None of them runs on the device.
    """
    measure = _time_on_device if device.type == "cuda" else _time_on_host  # of the interpreter
    seconds: dict[TileConfig, float] = {}
    failures: list[str] = []
    for config in configs:
        try:
            run(config)
        except Exception as error:  # a shape may need more shared memory than this chip has
            failures.append(f"{config.tile}: {error}")
            continue
        # The least of them: what disturbs a run only makes it longer.
        seconds[config] = min(measure(run, config) for _ in range(_ROUNDS))
    if not seconds:
        raise RuntimeError(
            f"No tile shape for {configs[0].kernel!r} runs on {device}: {'; '.join(failures)}. "
            "Use `backend='torch'`."
        )
    return min(seconds, key=lambda config: seconds[config])


def _time_on_host(run: Callable[[TileConfig], object], config: TileConfig) -> float:
    start = time.perf_counter()
    run(config)
    return time.perf_counter() - start


def _time_on_device(run: Callable[[TileConfig], object], config: TileConfig) -> float:
    # The device sleeps until the host has queued all runs, so that it never waits for a launch.
    launch_seconds = _time_on_host(run, config)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(_RUNS * launch_seconds * _CYCLES_A_SECOND))
    start.record()
    for _ in range(_RUNS):
        run(config)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _RUNS
