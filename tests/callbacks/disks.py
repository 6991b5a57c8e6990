"""A disk that is full, as far as this process can tell."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def full_disk(most: int = 1000) -> Iterator[None]:
    """Let the system refuse to write more than the first bytes of a file, with `OSError`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # What pytest captures goes to a file as well.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
