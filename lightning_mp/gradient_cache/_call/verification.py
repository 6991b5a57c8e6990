"""Whether a replay gave what the call gave, without keeping the call's outputs.

Shapes:
    m: rows of one micro-batch. F: values in a row of an output.
"""

import functools

import torch
from torch import Tensor

__all__ = ["Sketch", "difference_error", "rounding_noise"]


class Sketch:
    """Two numbers for each row of an output: its sum under random weights, and its square norm.

    For rows `x` and `y` and standard normal `w`, the mean of `(w.x - w.y)^2` is `|x - y|^2`, so
    sums over a micro-batch tell how far its outputs are from each other. Outputs that are equal bit
    for bit have sketches that are. That takes one pass over an output and 8 bytes a row, where a
    copy would double the memory of the features.
    """

    def __init__(self, output: Tensor) -> None:
        with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
            rows = output.detach().flatten(1) if output.ndim > 1 else output.detach()[:, None]
            rows = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
            # The square of an fp16 value of 256 is no fp16 number.
            values_mF = rows.to(torch.promote_types(rows.dtype, torch.float32))
            # Random weights: with equal ones, changes that sum to 0 would go unseen.
            self._sum_m = (values_mF * _weights(values_mF)).sum(1)
            self._square_m = values_mF.square().sum(1)

    def difference(self, replayed: Tensor) -> Tensor:
        """Return the norm of the difference to a replayed output over the norm of the output.

        inf where the replay alone is not finite, 0 where the output was not: such a loss trains
        nothing.
        """
        other = Sketch(replayed)
        square = self._square_m.sum()
        difference = (other._sum_m - self._sum_m).square().sum() / square
        # Equal outputs of zeros are 0 / 0.
        difference = torch.where((other._sum_m == self._sum_m).all(), 0.0, difference.sqrt())
        difference = torch.nan_to_num(difference, nan=torch.inf, posinf=torch.inf)
        return torch.where(square.isfinite(), difference, 0.0).to(torch.float32)


def rounding_noise(dtypes: set[torch.dtype], device: torch.device) -> float:
    """Return by how much two runs of one network may differ by rounding, relative to its outputs.

    Eight roundings of the coarsest dtype in use where that is 16 bits or tf32, as most of its
    roundings fall alike; else 128, for sums in another order that go through a deep network. 0
    under `torch.use_deterministic_algorithms(True)`.

    Args:
        dtypes: Of outputs, of what is trained, and of autocast.
        device: fp32 on CUDA counts as tf32 wherever torch may multiply in it.
    """
    if torch.are_deterministic_algorithms_enabled():
        return 0.0
    eps = max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)
    is_tf32 = device.type == "cuda" and (
        torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    )
    if is_tf32 and torch.float32 in dtypes:
        # tf32 has 10 bits of mantissa.
        eps = max(eps, 2.0**-10)
    return (8 if eps > torch.finfo(torch.float32).eps else 128) * eps


def difference_error(tower: str, difference: float, tolerance: float) -> RuntimeError:
    """Return the error for a replay that differs, with its likely causes in order."""
    return RuntimeError(
        f"The tower `{tower}` gave other outputs when it was replayed for its gradients: they "
        f"differ by {difference:.1e} of their norm, where {tolerance:.1e} is allowed. Its "
        "gradients are wrong. Likely causes, in this order: its input was changed in place unseen, "
        "as through memory shared with numpy or `.data`; it draws from a generator that is no "
        "attribute of its modules; it keeps state outside of buffers that moves with every call, "
        "such as a counter; its weights were changed through `.data`. If its kernels are just not "
        "deterministic, pass a larger `replay_tolerance`, or `inf` to compare nothing."
    )


def _weights(values_mF: Tensor) -> Tensor:
    return _normal(values_mF.shape[1], values_mF.device).to(values_mF.dtype)


# Bounded, as outputs of ever new lengths would leave a vector each on the device.
@functools.lru_cache(maxsize=32)
def _normal(count: int, device: torch.device) -> Tensor:
    """Return the same random numbers every time, without moving a generator of the user's."""
    # Drawn on the CPU, so that all devices have the same.
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(device)
