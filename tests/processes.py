"""Runs a function in other processes: on several gloo ranks of this machine, or in one process."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A fork server imports the module once, before it has threads, and then forks ranks cheaply.
_CONTEXT = multiprocessing.get_context("forkserver")
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # by kernels, which use no Lightning
_CONTEXT.set_forkserver_preload(
    ["lightning_mp.contrastive.loss" if _IS_INTERPRETED else "tests.preloaded"]
)


def exit_code_of(function: Callable[..., Any], *args: Any) -> int | None:
    """Call a function in a process; return its exit status, negative if a signal ended it."""
    process = _CONTEXT.Process(target=function, args=args)
    process.start()
    process.join(timeout=120)
    return process.exitcode


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(rank, *args)` on `world_size` ranks in an initialized default group."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _run_rank,
            args=(function, world_size, folder, args),
            nprocs=world_size,
            start_method="forkserver",
        )
        paths = [Path(folder) / str(rank) for rank in range(world_size)]
        return [torch.load(path, weights_only=False) for path in paths]


def _run_rank(
    rank: int, function: Callable[..., Any], world_size: int, folder: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    # With these variables Lightning uses the existing ranks, as under a launcher.
    environment = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size}
    environment |= {"LOCAL_WORLD_SIZE": world_size, "TORCHELASTIC_RUN_ID": "tests"}
    os.environ.update({name: str(value) for name, value in environment.items()})
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    result = function(rank, *args)
    torch.save(result, Path(folder) / str(rank))  # faster than `pickle` with tensors
    dist.barrier()  # otherwise ranks may abort when the first rank exits
    dist.destroy_process_group()
