"""Availability and creation of the Triton tile backend."""

import functools
import importlib.util

import torch

from lightning_mp.contrastive._tiles.literals import TileDtype
from lightning_mp.contrastive._tiles.tile_backend import TileBackend
from lightning_mp.numerics import triton_support

__all__ = ["tiles_problem", "triton_tiles"]


def tiles_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why Triton tiles cannot process features of a dtype on a device; `None` if they can.

    They need an NVIDIA GPU of compute capability 8.0 or higher (A100, RTX 30), whose tensor cores
    support bf16. On a CPU they run in Triton's interpreter, for tests.
    """
    if dtype == torch.float64:
        reason: str | None = "the features are float64, which tensor cores would round"
    elif device.type == "cpu" and _is_interpreted():  # in tests
        reason = None
    else:
        reason = triton_support.triton_problem(device)
    if reason is None:
        return None
    return (
        f"Passed `backend='triton'` with features of {dtype} on {device}: "
        f"{reason}. Triton tiles need fp16, bf16 or fp32 features on a CUDA device of compute "
        "capability 8.0 or higher, and Triton. Leave `backend` out: the default takes torch's "
        "tiles where Triton cannot run."
    )


def _is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, which is decided at their import."""
    if importlib.util.find_spec("triton") is None:
        return False
    from triton.runtime import JITFunction

    from lightning_mp.contrastive._tiles.triton_tiles.device_functions import tile_dots

    # `TRITON_INTERPRET` was read when kernels were decorated, and may have changed since.
    return not isinstance(tile_dots, JITFunction)


# Cached, so that results of autotuning last as long as the process.
@functools.cache
def triton_tiles(workspace_bytes: int | None, tile_dtype: TileDtype, autotune: bool) -> TileBackend:
    """Return the Triton tiles; equal arguments return the same object."""
    # Triton exists on Linux only.
    from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles

    return TritonTiles(workspace_bytes, tile_dtype, autotune)
