"""Replay of a failing step and search for the source of the first non-finite value."""
