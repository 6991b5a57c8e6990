"""The table of tile shapes by kernel, architecture, dtype and width; `configs.json` holds it.

Every row states its reason and is compiled by the tests for its architecture, with no spilled
register. Rows of one key stand in order of preference: the first is used, autotuning times all.
"""

import dataclasses
import functools
import json
from importlib import resources
from typing import Any, Literal

import torch

__all__ = ["Kernel", "TileConfig", "all_configs", "arch_of", "find_configs", "find_kept_configs"]

Kernel = Literal["lse", "softmax", "softmax_wide"]

_FIRST_ARCH = 80  # bf16 on tensor cores and asynchronous copies
_ARCHS = {(9, 0): 90, (10, 0): 100, (10, 3): 100, (12, 0): 120, (12, 1): 120}


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
    def shape(self) -> dict[str, Any]:
        """The compile-time arguments that all kernels take."""
        names = ("TILE_M", "TILE_N", "TILE_K")
        return {**dict(zip(names, self.tile, strict=True)), "TMA": self.tma}

    @property
    def options(self) -> dict[str, Any]:
        """The compiler options. Fused multiply-adds are asked for: not every Triton defaults so."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


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


def find_kept_configs(arch: int, dtype: torch.dtype, width: int) -> tuple[TileConfig, TileConfig]:
    """Return the shapes of tiles whose products one sweep keeps, and of those that are read again.

    To keep tiles of 128 x 256 takes registers that sums of theirs leave to no chip. What is read
    is not multiplied: small tiles wait for memory beside each other.
    """
    lse = next(row for row in find_configs("lse", arch, dtype, width) if row.tile[1] < 256)
    wide = find_configs("softmax_wide", arch, dtype, width)[0]
    return lse, dataclasses.replace(wide, tile=(64, 64, wide.tile[2]), warps=4)


def arch_of(device: torch.device) -> int:
    """Return the architecture whose rows serve a device: its own, or 80 for all that have none.

    A row for 80 needs nothing that a later chip lacks, and shared memory that the smallest has.
    Those of 100 (B200) serve 10.3 (B300), those of 120 (RTX 50) also 12.1: one family each.
    """
    if device.type != "cuda":
        return _FIRST_ARCH  # Triton's interpreter
    return _ARCHS.get(torch.cuda.get_device_capability(device), _FIRST_ARCH)
