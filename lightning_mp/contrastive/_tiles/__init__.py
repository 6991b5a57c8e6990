"""What multiplies tiles of the logits: plain torch everywhere, Triton on NVIDIA GPUs."""
