"""Choosing a tile shape by the clock, for those who ask for it."""

import time
from collections.abc import Callable, Sequence

import torch

from lightning_mp.contrastive._tiles.triton_tiles.configs import TileConfig

__all__ = ["fastest"]

_ROUNDS = 3
_RUNS = 20  # that follow each other without a gap
_CYCLES_A_SECOND = 2e9  # of a GPU's clock; a sleep that is twice as long as it must be will do


def fastest(
    configs: Sequence[TileConfig], run: Callable[[TileConfig], object], device: torch.device
) -> TileConfig:
    """Return the tile shape with the shortest of three timings, after a run that compiles.

    On CUDA the device's own time counts: launching a kernel can take the host longer than the
    device needs for it. A timing is that of 20 runs which are queued while the device sleeps.

    Raises:
        RuntimeError: None of them runs on the device.
    """
    measure = _time_on_device if device.type == "cuda" else _time_on_host
    seconds: dict[TileConfig, float] = {}
    failures: list[str] = []
    for config in configs:
        try:
            run(config)
        except Exception as error:  # a shape may need more shared memory than this chip has
            failures.append(f"{config.tile}: {error}")
            continue
        seconds[config] = min(measure(run, config) for _ in range(_ROUNDS))
    if not seconds:
        raise RuntimeError(
            f"No tile shape for {configs[0].kernel!r} runs on {device}: {'; '.join(failures)}. "
            "Use `backend='torch'`."
        )
    return min(seconds, key=lambda config: seconds[config])


def _time_on_host(run: Callable[[TileConfig], object], config: TileConfig) -> float:
    start = time.perf_counter()
    run(config)
    return time.perf_counter() - start


def _time_on_device(run: Callable[[TileConfig], object], config: TileConfig) -> float:
    launch_seconds = _time_on_host(run, config)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(_RUNS * launch_seconds * _CYCLES_A_SECOND))
    start.record()
    for _ in range(_RUNS):
        run(config)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _RUNS
