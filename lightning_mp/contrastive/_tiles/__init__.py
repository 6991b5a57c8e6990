"""Tile backends: plain torch for every device, Triton for NVIDIA GPUs."""
