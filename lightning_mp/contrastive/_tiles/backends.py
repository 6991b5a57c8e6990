"""Where the Triton tiles run, and why they cannot elsewhere."""

import functools
import importlib.util

import torch

from lightning_mp.contrastive._tiles.literals import TileDtype
from lightning_mp.contrastive._tiles.tile_backend import TileBackend
from lightning_mp.numerics import triton_support

__all__ = ["triton_problem", "triton_tiles"]


def triton_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the Triton tiles cannot take features of a dtype on a device, `None` if they can.

    They need an NVIDIA GPU of compute capability 8.0 (A100, RTX 30), for bf16 on its tensor cores.
    On a CPU they run under Triton's interpreter, which is for tests.
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
        "capability 8.0 or higher, and Triton. Leave `backend` out, and other machines get the "
        "torch tiles."
    )


def _is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, which is settled at their import."""
    if importlib.util.find_spec("triton") is None:
        return False
    from triton.runtime import JITFunction

    from lightning_mp.contrastive._tiles.triton_tiles.device_functions import tile_dots

    # By what a kernel is: `TRITON_INTERPRET` was read when it was decorated, and may have changed.
    return not isinstance(tile_dots, JITFunction)


# One object for equal choices: what autotuning finds out lives as long as the process.
@functools.cache
def triton_tiles(workspace_bytes: int | None, tile_dtype: TileDtype, autotune: bool) -> TileBackend:
    """Return the Triton tiles; equal arguments get the same ones."""
    # Triton is there on Linux only.
    from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles

    return TritonTiles(workspace_bytes, tile_dtype, autotune)
