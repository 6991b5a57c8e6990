"""Inf-CL, https://arxiv.org/abs/2410.17243: its tables and figures at this machine's size."""
