"""Compiles kernels without a GPU and reads their resource usage and machine code.

The tools that read the machine code, cuobjdump and nvdisasm, are part of Triton's wheel.
"""

import contextlib
import hashlib
import io
import os
import pickle
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key

from benchmarks._launches import WARP, Launch

__all__ = ["Compiled", "Compiler"]

_ATOMIC_PTX = re.compile(r"\b(?:atom|red|cp\.reduce)\.[\w.:]+")
_COMPLAINT = re.compile(r"^.*(?:warning|Potential Performance Loss).*$", re.MULTILINE)
# An address, an optional predicate, and the name: `/*0a40*/  @!P0 LDG.E R2, [R2.64] ;`.
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Args:
        registers: 32-bit registers of a thread.
        threads: Threads of a program.
        local_bytes: Local memory of a thread, which holds what does not fit in registers.
        shared_bytes: Shared memory of a program.
        listing: Names of the machine instructions in order, with all modifiers.
        atomics: Names of the atomic PTX instructions, with all modifiers.
        complaints: Warnings of ptxas.
        ttir: Triton's intermediate representation before it is lowered.
    """

    registers: int
    threads: int
    local_bytes: int
    shared_bytes: int
    listing: tuple[str, ...]
    atomics: tuple[str, ...]
    complaints: tuple[str, ...]
    ttir: str

    @property
    def instructions(self) -> Counter[str]:
        """Number of times that each instruction stands in the machine code."""
        return Counter(self.listing)

    def count(self, name: str) -> int:
        """Return the number of instructions with a name, with any modifiers."""
        return sum(f"{each}.".startswith(f"{name}.") for each in self.listing)

    @property
    def is_spilled(self) -> bool:
        """Whether a thread uses local memory."""
        return self.local_bytes > 0 or self.count("STL") > 0 or self.count("LDL") > 0

    @property
    def spills(self) -> int:
        """Number of loads from local memory; a store that is never loaded is not a spill.

        On 12.0, ptxas 12.9 (Triton 3.6) puts an address check before each use of the copy engine,
        whose failing branch stores 8 bytes of arguments for a call.
        """
        return self.count("LDL")


class Compiler:
    """Compiles launches, with a cache on disk.

    Args:
        folder: The cache, which other processes may share. Its keys are the sources of a kernel and
            of the functions that it calls, the specialization, the target, Triton, and this file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, Compiled] = {}

    def __call__(self, launch: Launch) -> Compiled:
        """Return the compiled kernel of a launch."""
        if launch.key not in self._read:
            # Unlike the launch's key, this key does not depend on the paths of the sources.
            key = (triton_key(), launch.source.hash(), launch.arch, launch.options)
            text = repr(key) + Path(__file__).read_text()
            path = self._folder / hashlib.sha256(text.encode()).hexdigest()
            if not path.exists():
                unique = path.with_suffix(f".{os.getpid()}")  # another process may write the same
                unique.write_bytes(pickle.dumps(_compile(launch)))
                unique.replace(path)
            self._read[launch.key] = pickle.loads(path.read_bytes())
        return self._read[launch.key]


def _compile(launch: Launch) -> Compiled:
    with _without_cache(), contextlib.redirect_stdout(io.StringIO()) as log:
        target = GPUTarget("cuda", launch.arch, WARP)
        kernel = triton.compile(launch.source, target, launch.options)
    cubin = kernel.asm["cubin"]
    resources = _output_of(cubin, knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    usage = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", resources)}
    # The analysis of data flow annotates indirect jumps and takes up to half the time.
    listing = _output_of(cubin, knobs.nvidia.nvdisasm.path, "--print-code", "--no-dataflow")
    return Compiled(
        registers=usage["REG"],
        threads=kernel.metadata.num_warps * WARP,
        local_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=kernel.metadata.shared,
        listing=tuple(_INSTRUCTION.findall(listing)),
        atomics=tuple(_ATOMIC_PTX.findall(kernel.asm["ptx"])),
        complaints=tuple(_COMPLAINT.findall(log.getvalue())),
        ttir=kernel.asm["ttir"],
    )


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Make Triton compile instead of reading its cache, so that ptxas prints its warnings."""
    with tempfile.TemporaryDirectory() as cache:
        variables = {"TRITON_CACHE_DIR": cache, "TRITON_DUMP_PTXAS_LOG": "1"}
        with mock.patch.dict(os.environ, variables):
            yield


def _output_of(cubin: bytes, *command: str) -> str:
    """Return the standard output of a command for a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([*command, file.name], capture_output=True, text=True, check=True)
        return done.stdout
