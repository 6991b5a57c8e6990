"""The package uses `torch.accelerator` where it replaces `torch.cuda`."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
RENAMED = {"device", "mem_get_info", "set_device", "current_device"}
# Functions of `torch.accelerator` that differ: they answer for any device, return other facts, or
# return streams that do not accept CUDA's events.
OTHERWISE = {"is_available", "device_count", "get_device_capability", "current_stream"}


def test_torch_cuda_is_used_only_where_torch_accelerator_has_no_equivalent() -> None:
    offered = RENAMED | set(dir(torch.accelerator)) - OTHERWISE
    asked = {
        (path.relative_to(ROOT).as_posix(), name)
        for folder in ("lightning_mp", "callbacks", "strategies", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"torch\.cuda\.(\w+)", path.read_text())
    }
    assert {name for _, name in asked} > {"Stream", "Event"}
    assert [each for each in asked if each[1] in offered] == []
