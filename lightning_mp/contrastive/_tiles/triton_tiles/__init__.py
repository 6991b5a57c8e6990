"""The tile backend in Triton, for NVIDIA GPUs of compute capability 8.0 or higher."""

from lightning_mp.contrastive._tiles.triton_tiles.tiles import TritonTiles

__all__ = ["TritonTiles"]
