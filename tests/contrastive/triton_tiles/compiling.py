"""Compiles kernels of single launches for GPUs that are not there, for tests of what they must be.

What was read is kept in pytest's cache, under all that can change it, so a change compiles the
kernels that it can break, and two workers compile none twice.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks._launches import launches_in
from benchmarks._machine_code import Compiled, Compiler

__all__ = ["Compiled", "compiler", "kernels_of"]


@contextmanager
def kernels_of(config: pytest.Config) -> Iterator[Compiler]:
    """Set up what compiles launches, with pytest's cache: the body of a module's fixture."""
    with tempfile.TemporaryDirectory() as folder:
        has_cache = config.pluginmanager.hasplugin("cacheprovider")
        yield Compiler(config.cache.mkdir("compiled_kernels") if has_cache else Path(folder))


@contextmanager
def compiler(
    config: pytest.Config, launch: Callable[[Any], None]
) -> Iterator[Callable[[Any], Compiled]]:
    """Set up what compiles a request, which names its `kernel` and `arch`; `launch` launches it."""
    with kernels_of(config) as compile_:

        @functools.cache
        def compiled(request: Any) -> Compiled:
            with launches_in(request.arch) as found:
                launch(request)
            return compile_(next(x for x in found.values() if x.kernel == request.kernel))

        yield compiled
