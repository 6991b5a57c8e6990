"""Compares a training step in half with the same step in fp32, module by module."""
