"""Tells whether Triton kernels run on a device, by running a kernel."""

import contextlib
import functools
import importlib.util
import warnings

import torch

__all__ = ["launching_on", "triton_problem"]

_FIRST_CAPABILITY = (8, 0)  # the lowest that kernels are compiled and tested for


@functools.cache
def triton_problem(device: torch.device) -> str | None:
    """Return the reason why Triton kernels cannot run on a device; `None` if they can.

    A minimal kernel is launched once per process and device. A failed launch draws a warning,
    because the user can fix its cause.
    """
    if device.type != "cuda":
        return "the device is not a CUDA device"
    if torch.version.hip:
        # ROCm reports capabilities, such as (9, 0), that mean something else.
        return "the device is an AMD GPU, for which no kernel of this package has been compiled"
    capability = torch.cuda.get_device_capability(device)
    if capability < _FIRST_CAPABILITY:
        return "the device has compute capability {}.{}".format(*capability)
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    # Only a launch shows whether Triton works: it needs a C compiler for its launcher, and its own
    # compiler may not support a newer GPU.
    try:
        _launch_probe(device)
    except Exception as error:  # compilers, drivers and linkers raise different errors
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        reason = f"Triton cannot launch a kernel: {type(error).__name__}: {first_line}"
        warnings.warn(
            f"{reason}. lightning_mp uses torch's own operations on {device} instead, which are "
            "slower. Triton needs a C compiler (`CC`, gcc or clang), Python's headers, and a "
            "driver that knows the GPU.",
            stacklevel=2,
        )
        return reason
    return None


def launching_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which Triton, which uses the current device, launches on `device`."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


def _launch_probe(device: torch.device) -> None:
    """Launch a minimal kernel; without synchronization, because failures precede its execution."""
    from lightning_mp.numerics.probe_kernels import probe_kernel

    with launching_on(device):
        probe_kernel[(1,)](torch.empty((), dtype=torch.int32, device=device))
