"""The losses: sums over all pairs of the global batch, with gradients in closed form."""
