"""Reads, samples, skips and rewinds training steps."""
