"""Runs a function on several gloo ranks of this machine, each a process of its own."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["on_ranks"]


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Call `function(rank, *args)` on all ranks in an initialised default group; return by rank."""
    with tempfile.TemporaryDirectory() as folder:
        # Spawned: a forked child of a process with OpenMP threads may hang.
        mp.start_processes(  # type: ignore[attr-defined]
            _run, args=(function, ranks, folder, args), nprocs=ranks, start_method="spawn"
        )
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]


def _run(
    rank: int, function: Callable[..., Any], ranks: int, folder: str, args: tuple[Any, ...]
) -> None:
    # Ranks share the cores, and more threads would only take turns on them.
    torch.set_num_threads(1)
    # A Trainer takes the ranks as they are where a launcher has set these.
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "reproduce"}
    # Through a file, as a port may be another run's.
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    result = function(rank, *args)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
    dist.barrier()  # without it, ranks abort now and then when the first of them leaves
    dist.destroy_process_group()
