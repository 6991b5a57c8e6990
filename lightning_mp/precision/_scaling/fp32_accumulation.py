"""Sums of half products in fp32, which CUDA's matrix products may also take in half."""

from typing import Any

import torch

__all__ = ["accumulate_in_fp32"]

_SETTINGS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)


class _Restore:
    """Puts settings of torch back; removed like the handle of a hook."""

    def __init__(self, before: dict[str, Any]) -> None:
        self._before = before

    def remove(self) -> None:
        for name, value in self._before.items():
            setattr(torch.backends.cuda.matmul, name, value)
        self._before = {}


def accumulate_in_fp32() -> Any:
    """Let matrix products of halves add up in fp32, until the handle that returns is removed.

    By default cuBLAS may split a long sum and add the parts in half: in fp16 a part above 65504
    is inf, and every part is rounded to 11 bits.

    References:
        Mixed Precision Training, arXiv:1710.03740, section 3.3.
    """
    before = {name: getattr(torch.backends.cuda.matmul, name) for name in _SETTINGS}
    for name in _SETTINGS:
        setattr(torch.backends.cuda.matmul, name, False)
    return _Restore(before)
