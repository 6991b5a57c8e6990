"""Which code multiplies tiles: the choice by device and dtype, and why a choice cannot be met."""

import functools
import importlib.util
from typing import Literal, NamedTuple

import torch

from lightning_mp.contrastive._tiles.tile_backend import TileBackend
from lightning_mp.contrastive._tiles.torch_tiles import TorchTiles
from lightning_mp.numerics import triton_support

__all__ = [
    "Backend",
    "Directions",
    "ExchangeName",
    "TileChoice",
    "TileDtype",
    "triton_problem",
]

Backend = Literal["auto", "triton", "torch"]
Directions = Literal["both", "image_to_text", "text_to_image"]
ExchangeName = Literal["slices", "ring"]
TileDtype = Literal["auto", "bf16", "fp16", "tf32", "fp32"]


class TileChoice(NamedTuple):
    """The arguments of `ContrastiveLoss` that say which code multiplies tiles, and how.

    Without `keeps_tiles` all logits are worked out for the gradients once more, as 16-bit features
    on a GPU have it, whatever the workspace.
    """

    backend: str = "auto"
    tile_dtype: str = "auto"
    workspace_bytes: int | None = None
    autotune: bool = False
    keeps_tiles: bool = True

    def tiles(self, device: torch.device, dtype: torch.dtype) -> TileBackend:
        """Return the tile backend for features on a device; equal choices get an equal one.

        Raises:
            ValueError: `backend="triton"` cannot run there.
        """
        # Triton's interpreter is for tests that ask for it: in bf16 it is wrong without repairs.
        if self.backend == "torch" or (self.backend == "auto" and device.type != "cuda"):
            return TorchTiles(self.workspace_bytes)
        problem = triton_problem(device, dtype)
        if self.backend == "auto" and problem is not None:
            return TorchTiles(self.workspace_bytes)
        if problem is not None:
            raise ValueError(problem)
        return _triton_tiles(self.workspace_bytes, self.tile_dtype, self.autotune)


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
def _triton_tiles(workspace_bytes: int | None, tile_dtype: str, autotune: bool) -> TileBackend:
    # Triton is there on Linux only.
    from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles

    return TritonTiles(workspace_bytes, tile_dtype, autotune)  # type: ignore[arg-type]
