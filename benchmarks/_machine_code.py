"""Compiles kernels for GPUs that are not there, and reads what became of them.

The machine code is read with the tools that are in Triton's wheel.
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
# An address, a predicate or none, and the name: `/*0a40*/  @!P0 LDG.E R2, [R2.64] ;`.
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Args:
        registers: Of 32 bits a thread.
        threads: Of a program.
        local_bytes: Memory a thread has beside its registers.
        shared_bytes: Memory of a program.
        listing: The names of the machine code's instructions in order, with all modifiers.
        atomics: The atomic instructions of the PTX, named with all modifiers.
        complaints: What ptxas warns of.
        ttir: Triton's own intermediate code, before it is lowered.
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
        """How often the machine code has each instruction."""
        return Counter(self.listing)

    def count(self, name: str) -> int:
        """Return how many instructions have a name, whatever modifiers stand after it."""
        return sum(f"{each}.".startswith(f"{name}.") for each in self.listing)

    @property
    def is_spilled(self) -> bool:
        """Whether a thread keeps anything in memory for want of registers."""
        return self.local_bytes > 0 or self.count("STL") > 0 or self.count("LDL") > 0

    @property
    def spills(self) -> int:
        """Loads of what registers did not hold. What is stored and never loaded is no such thing.

        ptxas 12.9, of Triton 3.6, puts an address check before each use of the copy engine on 12.0,
        whose failing branch stores 8 bytes of arguments for a call.
        """
        return self.count("LDL")


class Compiler:
    """Compiles launches, and keeps what was read under all that can change it.

    Args:
        folder: Where, for other processes and times: by the sources of a kernel and of what it
            calls, its specialisation, the target, Triton, and this file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, Compiled] = {}

    def __call__(self, launch: Launch) -> Compiled:
        """Return what becomes of a launch."""
        if launch.key not in self._read:
            # Paths of sources are in a launch's key, not of this one.
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
    with _away_from_the_cache(), contextlib.redirect_stdout(io.StringIO()) as log:
        target = GPUTarget("cuda", launch.arch, WARP)
        kernel = triton.compile(launch.source, target, launch.options)
    cubin = kernel.asm["cubin"]
    resources = _said_by(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin)
    usage = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", resources)}
    listing = _said_by(knobs.nvidia.nvdisasm.path, "--print-code", cubin)
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
def _away_from_the_cache() -> Iterator[None]:
    """Let Triton compile whatever its cache has, so that ptxas says what it warns of."""
    with tempfile.TemporaryDirectory() as cache:
        said = {"TRITON_CACHE_DIR": cache, "TRITON_DUMP_PTXAS_LOG": "1"}
        with mock.patch.dict(os.environ, said):
            yield


def _said_by(tool: str, option: str, cubin: bytes) -> str:
    """Return what a tool has to say about a cubin; it complains of older chips on stderr."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
