"""Replay of a failing step, and the search for where it began."""
