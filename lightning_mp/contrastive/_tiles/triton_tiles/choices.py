"""Choices of autotuning, stored in the user's cache directory for later processes."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from lightning_mp.contrastive._tiles.triton_tiles.configs import TileConfig

__all__ = ["cached_choice"]


def cached_choice(
    configs: Sequence[TileConfig], what: str, device: torch.device, choose: Callable[[], TileConfig]
) -> TileConfig:
    """Return the choice of an earlier process for this GPU, or call `choose` and store its result.

    `what` names kernel, dtype and width of the choice among `configs`. If several processes choose
    at the same time, all use the first stored result. If the folder cannot be read or written,
    every process chooses for itself.
    """
    if device.type != "cuda":
        return choose()
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    # Choices are valid for these rows of the table and this version of Triton only.
    key = [name, *capability, version("triton"), what, [repr(config) for config in configs]]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home directory, as in containers
        return choose()
    path = Path(base, "lightning-mp", "tiles", f"{digest}.json")
    found = _stored_choice(path, configs)
    if found is not None:
        return found
    choice = choose()
    description = {"gpu": name, "triton": key[3], "for": what, "tile": list(choice.tile)}
    _create(path, json.dumps({**description, "row": configs.index(choice)}), configs)
    return _stored_choice(path, configs) or choice


def _stored_choice(path: Path, configs: Sequence[TileConfig]) -> TileConfig | None:
    try:
        row = json.loads(path.read_text(encoding="utf-8"))["row"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    is_row = isinstance(row, int) and 0 <= row < len(configs)
    return configs[row] if is_row else None


def _create(path: Path, text: str, configs: Sequence[TileConfig]) -> None:
    """Write a file atomically, unless a readable one exists."""
    part = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(text, encoding="utf-8")
            with contextlib.suppress(FileExistsError):
                os.link(part, path)  # unlike `replace`, fails if the file exists
            if _stored_choice(path, configs) is None:
                part.replace(path)
        finally:
            part.unlink(missing_ok=True)
