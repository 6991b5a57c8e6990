"""The name of the processor, read without further packages."""

import platform
from pathlib import Path

__all__ = ["cpu_name"]


def cpu_name() -> str:
    """Return the model of this machine's CPU, or its architecture if the model is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
