"""Whether Triton's kernels run on a device, found out by running one."""

import contextlib
import functools
import importlib.util
import warnings

import torch

__all__ = ["launching_on", "triton_problem"]

_FIRST_CAPABILITY = (8, 0)  # the oldest for which the kernels are compiled and tested


@functools.cache
def triton_problem(device: torch.device) -> str | None:
    """Return why Triton's kernels cannot run on a device, `None` if they can.

    A kernel of one instruction is launched once a process and device. A launch that fails is warned
    of, since the user can do something about it.
    """
    if device.type != "cuda":
        return "it is no CUDA device"
    if torch.version.hip:
        # ROCm reports capabilities, such as (9, 0), that mean something else.
        return "it is an AMD GPU, for which no kernel here has been compiled"
    capability = torch.cuda.get_device_capability(device)
    if capability < _FIRST_CAPABILITY:
        return "the device has compute capability {}.{}".format(*capability)
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    # Triton compiles a launcher with the C compiler of the machine, and its own compiler knows only
    # the GPUs of its time: neither the package nor the device says whether it works.
    try:
        _launch_probe(device)
    except Exception as error:  # of any kind: compilers, drivers and linkers raise their own
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        reason = f"Triton cannot launch a kernel: {type(error).__name__}: {first_line}"
        warnings.warn(
            f"{reason}. lightning_mp goes on with torch's own operations on {device}, which are "
            "slower. Triton needs a C compiler (`CC`, gcc or clang), Python's headers, and a "
            "driver that knows the GPU.",
            stacklevel=2,
        )
        return reason
    return None


def launching_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which Triton launches on a device; it follows the current one."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


def _launch_probe(device: torch.device) -> None:
    """Launch the smallest kernel there is. What fails does so before it runs: no need to wait."""
    from lightning_mp.numerics.probe_kernels import probe_kernel

    with launching_on(device):
        probe_kernel[(1,)](torch.empty((), dtype=torch.int32, device=device))
