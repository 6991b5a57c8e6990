"""A collective that fails, in the words of the loss that asked for it."""

import os

import torch
import torch.distributed as dist

__all__ = ["CollectiveError", "collective_error"]

_ROOMS = (os.path.dirname(dist.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


class CollectiveError(RuntimeError):
    """A collective of a loss has failed; its cause says how."""


def collective_error(owner: str, error: RuntimeError) -> CollectiveError | None:
    """Return what an error says about a collective of a loss; `None` if it is of none."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    # Raised by torch's C++, which a line of these folders has called.
    name = "" if traceback is None else traceback.tb_frame.f_code.co_filename
    if isinstance(error, torch.OutOfMemoryError) or not name.startswith(_ROOMS):
        return None
    return CollectiveError(
        f"A collective of `{owner}` failed on rank {dist.get_rank()}: {error}. Another rank has "
        "probably stopped before: look at the other ranks' logs first, for the earliest error. "
        "All ranks of the group must call the loss equally often."
    )
