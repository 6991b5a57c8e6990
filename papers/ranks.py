"""Runs a function on several gloo ranks of this machine, one process each."""

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
    """Call `function(rank, *args)` on all ranks of a gloo group; return the results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        # Spawned, because a forked child of a process with OpenMP threads may hang.
        mp.start_processes(  # type: ignore[attr-defined]
            _run_rank, args=(function, ranks, folder, args), nprocs=ranks, start_method="spawn"
        )
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]


def _run_rank(
    rank: int, function: Callable[..., Any], ranks: int, folder: str, args: tuple[Any, ...]
) -> None:
    # Ranks share the cores; more threads would only compete for them.
    torch.set_num_threads(1)
    # With these variables a Trainer uses the existing ranks, as under a launcher.
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "reproduce"}
    # Through a file, because another run may use the same port.
    store = dist.FileStore(str(Path(folder) / "store"), ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    result = function(rank, *args)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
    dist.barrier()  # otherwise the first rank that leaves may abort the others
    dist.destroy_process_group()
