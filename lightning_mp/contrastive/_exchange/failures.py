"""Errors of collectives, in the name of the loss that called them."""

import os
import traceback

import torch
import torch.distributed as dist

__all__ = ["CollectiveError", "collective_error"]

_FOLDERS = (os.path.dirname(dist.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


class CollectiveError(RuntimeError):
    """A collective of a loss failed; `__cause__` is the original error."""


def collective_error(owner: str, error: RuntimeError) -> CollectiveError | None:
    """Return the error to raise if a collective raised `error`, `None` otherwise."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    # Errors of torch's C++ end in a Python frame of these folders.
    name = last.f_code.co_filename
    if isinstance(error, torch.OutOfMemoryError) or not name.startswith(_FOLDERS):
        return None
    return CollectiveError(
        f"A collective of `{owner}` failed on rank {dist.get_rank()}: {error}. Another rank has "
        "probably stopped before: look at the other ranks' logs first, for the earliest error. "
        "All ranks of the group must call the loss the same number of times."
    )
