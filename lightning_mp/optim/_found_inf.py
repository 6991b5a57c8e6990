"""Steps that change nothing if `optimizer.found_inf` is nonzero, decided on the device."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_mp.optim.safe_adamw import SafeAdamW, is_fused

__all__ = ["found_inf_of", "skips_on_gpu", "takes_found_inf", "takes_grad_scale"]


def takes_grad_scale(optimizer: Optimizer) -> bool:
    """Return whether an optimizer unscales and skips in its step, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Return whether the next step reads `optimizer.found_inf`, as torch's fused steps do."""
    if isinstance(optimizer, SafeAdamW):
        return True
    # A loaded state may set `fused=False` in groups of an optimizer that was created as fused.
    is_fused = all(group.get("fused", True) for group in optimizer.param_groups)
    return takes_grad_scale(optimizer) and is_fused and not _starts_momentum(optimizer)


def _starts_momentum(optimizer: Optimizer) -> bool:
    """Return whether the next step creates a momentum of SGD, uninitialized if it is skipped."""
    return isinstance(optimizer, SGD) and any(
        optimizer.state.get(p, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"] != 0
        for p in group["params"]
        if p.grad is not None
    )


def skips_on_gpu(optimizer: Optimizer) -> bool:
    """Return whether the next step reads `optimizer.found_inf` on a GPU, in its own kernel."""
    # A subclass may do more in its step, such as decay weights, and a wrapper may hide the flag.
    if type(optimizer) not in (Adam, AdamW, SGD, SafeAdamW):
        return False
    firsts = [(group["params"][0], group) for group in optimizer.param_groups if group["params"]]
    # torch's fused steps do not accept DTensors beside a plain `found_inf`.
    if not all(p.is_cuda and not hasattr(p, "to_local") for p, _ in firsts):
        return False
    # Without its kernel, `SafeAdamW` skips by copies of weights and states.
    has_kernel = not isinstance(optimizer, SafeAdamW) or all(is_fused(*first) for first in firsts)
    return has_kernel and takes_found_inf(optimizer)


@contextlib.contextmanager
def found_inf_of(optimizer: Any, *flags: Tensor | None) -> Iterator[None]:
    """Skip a step of an optimizer if any flag is nonzero, as `torch.amp.GradScaler` does."""
    found = [(flag != 0).float() for flag in flags if flag is not None]
    if not found:
        yield
        return
    # The maximum, because torch's kernels skip at exactly 1.
    optimizer.found_inf = torch.stack([flag.to(found[0].device) for flag in found]).amax()
    optimizer.grad_scale = None
    try:
        yield
    finally:
        del optimizer.found_inf, optimizer.grad_scale
