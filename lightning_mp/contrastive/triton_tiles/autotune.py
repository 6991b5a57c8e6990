"""Choosing a tile shape by the clock, for those who ask for it."""

import time
from collections.abc import Callable, Sequence

import torch

from lightning_mp.contrastive.triton_tiles.configs import TileConfig

__all__ = ["fastest"]

_ROUNDS = 3


def fastest(
    configs: Sequence[TileConfig], run: Callable[[TileConfig], object], device: torch.device
) -> TileConfig:
    """Return the tile shape with the shortest of three runs, after one that compiles.

    Args:
        configs: What to try, at least one.
        run: Does the work; it must leave nothing behind.
        device: Where it works; waited for.

    Raises:
        RuntimeError: None of them runs on the device.
    """
    seconds: dict[TileConfig, float] = {}
    failures: list[str] = []
    for config in configs:
        try:
            run(config)
        except Exception as error:  # a shape may need more shared memory than this chip has
            failures.append(f"{config.tile}: {error}")
            continue
        seconds[config] = min(_time(run, config, device) for _ in range(_ROUNDS))
    if not seconds:
        raise RuntimeError(
            f"No tile shape for {configs[0].kernel!r} runs on {device}: {'; '.join(failures)}. "
            "Use `backend='torch'`."
        )
    return min(seconds, key=lambda config: seconds[config])


def _time(run: Callable[[TileConfig], object], config: TileConfig, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    run(config)
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
