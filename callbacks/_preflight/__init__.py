"""Compares a training step in half precision with the same step in fp32, module by module."""
