"""Simulates a full disk for this process."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def full_disk(most: int = 1000) -> Iterator[None]:
    """Make writes beyond the first bytes of a file raise `OSError`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # pytest captures output in a file as well.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
