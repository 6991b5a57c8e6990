"""Scaled losses, unscaled gradients and skipped steps, which all precision plugins share."""
