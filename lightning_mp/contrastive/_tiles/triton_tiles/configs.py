"""The table of tile shapes by kernel, architecture, dtype and width, read from `configs.json`.

Every row states its reason, and the tests compile it for its architecture without a spilled
register. Rows of the same kernel, architecture and dtype are in order of preference: the first row
whose `max_width` fits is the default, and autotuning times all that fit.
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
    "timings",
]

Kernel = Literal["lse", "softmax", "softmax_wide"]

_FIRST_ARCH = 80  # the first with bf16 tensor cores and asynchronous copies
_ARCHS = {(9, 0): 90, (10, 0): 100, (10, 3): 100, (12, 0): 120, (12, 1): 120}
_ROUNDS = 3
_RUNS = 20  # queued back to back
_CYCLES_PER_SECOND = 2e9  # no GPU's clock is faster; a longer sleep does no harm


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """A tile shape and the launch options of one kernel."""

    kernel: Kernel
    arch: int  # compute capability times ten of the GPUs that the row is for
    dtypes: tuple[str, ...]  # of the operands
    max_width: int | None  # the largest feature width that the row is for; `None`: any
    tile: tuple[int, int, int]  # rows, columns and width slice, in values
    group: int  # rows of tiles that consecutive programs share, so that operands stay in L2
    warps: int  # of a program
    stages: int  # width slices in flight
    tma: bool  # whether the copy engine (TMA) moves operands and softmax tiles
    reason: str  # why this row is in the table

    @property
    def launch_options(self) -> dict[str, Any]:
        """Compile-time arguments of all sweep kernels, and compiler options."""
        tile_m, tile_n, tile_k = self.tile
        return {
            "TILE_M": tile_m, "TILE_N": tile_n, "TILE_K": tile_k, "TMA": self.tma,
            "GROUP": self.group, "num_warps": self.warps, "num_stages": self.stages,
            # The default depends on the version of Triton.
            "enable_fp_fusion": True,
        }  # fmt: skip

    def tiles(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.tile[0]), -(-columns // self.tile[1])


@functools.cache
def all_configs() -> tuple[TileConfig, ...]:
    text = resources.files(__package__).joinpath("configs.json").read_text(encoding="utf-8")
    rows = json.loads(text)
    return tuple(
        TileConfig(**{**row, "dtypes": tuple(row["dtypes"]), "tile": tuple(row["tile"])})
        for row in rows
    )


def find_configs(
    kernel: Kernel, arch: int, dtype: torch.dtype, width: int
) -> tuple[TileConfig, ...]:
    """Return the rows for a kernel, the default first."""
    name = str(dtype).removeprefix("torch.")
    found: dict[object, TileConfig] = {}
    for row in all_configs():
        is_wide_enough = row.max_width is None or width <= row.max_width
        if (row.kernel, row.arch) == (kernel, arch) and name in row.dtypes and is_wide_enough:
            # A default for small widths may be an alternative for all widths as well.
            found.setdefault((row.tile, row.warps, row.stages), row)
    if not found:
        known = sorted({(row.arch, dtype) for row in all_configs() for dtype in row.dtypes})
        raise ValueError(
            f"Passed dtype {name} on architecture {arch} for the kernel {kernel!r}. The table has "
            f"rows for {known}. Use one of these, or `backend='torch'`."
        )
    return tuple(found.values())


def find_stored_configs(arch: int, dtype: torch.dtype, width: int) -> tuple[TileConfig, TileConfig]:
    """Return the rows for the sweep that stores its logits and for the sweep that reads them.

    Storing logits takes registers, and a tile of 128 x 256 has none to spare on any chip. The
    second sweep reads logits instead of multiplying, so many small tiles hide the memory latency.
    """
    lse = next(row for row in find_configs("lse", arch, dtype, width) if row.tile[1] < 256)
    wide = find_configs("softmax_wide", arch, dtype, width)[0]
    return lse, dataclasses.replace(wide, tile=(64, 64, wide.tile[2]), warps=4)


def find_threshold_config(
    arch: int, dtype: torch.dtype, width: int, *, has_ids: bool, has_guides: bool
) -> TileConfig:
    """Return the row for log-sum-exps with masked false negatives.

    Thresholds take registers: with them, tiles of 128 x 256 spill on every chip. On 9.0 tiles of
    128 x 128 spill with thresholds and ids, and under Triton 3.6 with thresholds and guides. Guides
    add a second product, so they take the last row, which needs the fewest registers.
    """
    wide = find_configs("softmax_wide", arch, dtype, width)[-1 if has_guides else 0]
    if arch == 90 and (has_ids or has_guides):
        return dataclasses.replace(wide, tile=(128, 64, wide.tile[2]), warps=8)
    return wide


def arch_of(device: torch.device) -> int:
    """Return the architecture whose rows serve a device: its own, or 80 if it has no rows.

    Every later chip has the instructions that rows for 80 need, and enough shared memory. Rows for
    100 (B200) also serve 10.3 (B300), rows for 120 (RTX 50) also 12.1: the same families.
    """
    if device.type != "cuda":
        return _FIRST_ARCH  # Triton's interpreter
    return table_arch(torch.cuda.get_device_capability(device))


def table_arch(capability: tuple[int, int]) -> int:
    return _ARCHS.get(capability, _FIRST_ARCH)


def fastest(
    configs: Sequence[TileConfig], run: Callable[[TileConfig], object], device: torch.device
) -> TileConfig:
    seconds = timings(configs, run, device)
    return min(seconds, key=lambda config: seconds[config])


def timings(
    configs: Sequence[TileConfig], run: Callable[[TileConfig], object], device: torch.device
) -> dict[TileConfig, float]:
    """Return the seconds of each row that runs: the least of three timings, after compilation.

    On CUDA the time is that of the device, because launching a kernel can take the host longer than
    running it takes the device. A timing averages 20 runs, queued while the device sleeps.
    """
    measure = _time_on_device if device.type == "cuda" else _time_on_host  # Triton's interpreter
    seconds: dict[TileConfig, float] = {}
    failures: list[str] = []
    for config in configs:
        try:
            run(config)
        except Exception as error:  # a shape may need more shared memory than this chip has
            failures.append(f"{config.tile}: {error}")
            continue
        # The least, because disturbances only make a run longer.
        seconds[config] = min(measure(run, config) for _ in range(_ROUNDS))
    if not seconds:
        raise RuntimeError(
            f"No tile shape for the kernel {configs[0].kernel!r} runs on {device}: "
            f"{'; '.join(failures)}. "
            "Use `backend='torch'`."
        )
    return seconds


def _time_on_host(run: Callable[[TileConfig], object], config: TileConfig) -> float:
    start = time.perf_counter()
    run(config)
    return time.perf_counter() - start


def _time_on_device(run: Callable[[TileConfig], object], config: TileConfig) -> float:
    # The device sleeps until the host has queued all runs, so it never waits for a launch.
    launch_seconds = _time_on_host(run, config)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(_RUNS * launch_seconds * _CYCLES_PER_SECOND))
    start.record()
    for _ in range(_RUNS):
        run(config)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _RUNS
