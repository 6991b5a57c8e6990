"""Compiles the kernels of launches without a GPU, for tests.

Results are stored in pytest's cache. A change of the sources compiles only the kernels that it
affects, and two workers compile no kernel twice.
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
    """Yield a compiler of launches that uses pytest's cache, for a fixture."""
    with tempfile.TemporaryDirectory() as folder:
        has_cache = config.pluginmanager.hasplugin("cacheprovider")
        yield Compiler(config.cache.mkdir("compiled_kernels") if has_cache else Path(folder))


@contextmanager
def compiler(
    config: pytest.Config, launch: Callable[[Any], None]
) -> Iterator[Callable[[Any], Compiled]]:
    """Yield a function that compiles the kernel of a request, which `launch` launches."""
    with kernels_of(config) as compile_:

        @functools.cache
        def compiled(request: Any) -> Compiled:
            with launches_in(request.arch) as found:
                launch(request)
            return compile_(next(x for x in found.values() if x.kernel == request.kernel))

        yield compiled
