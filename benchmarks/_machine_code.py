"""Compiles kernels without a GPU and reads their resource usage and machine code.

The tools that read the machine code, cuobjdump and nvdisasm, are part of Triton's wheel.
"""

import bisect
import contextlib
import hashlib
import io
import itertools
import os
import pickle
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
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
_INSTRUCTION = re.compile(r"/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_AT_ONCE = 50  # kernels that one call disassembles; its listing takes 0.1 to 1 MB for each


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
        return self.all([launch])[0]

    def all(self, launches: Sequence[Launch]) -> list[Compiled]:
        """Return the compiled kernels of launches, which are disassembled together."""
        paths = {launch: self._path(launch) for launch in launches if launch.key not in self._read}
        missing = [launch for launch, path in paths.items() if not path.exists()]
        for start in range(0, len(missing), _AT_ONCE):
            some = missing[start : start + _AT_ONCE]
            for launch, compiled in zip(some, _compile(some), strict=True):
                # Another process may write the same.
                unique = paths[launch].with_suffix(f".{os.getpid()}")
                unique.write_bytes(pickle.dumps(compiled))
                unique.replace(paths[launch])
        self._read |= {x.key: pickle.loads(path.read_bytes()) for x, path in paths.items()}
        return [self._read[launch.key] for launch in launches]

    def _path(self, launch: Launch) -> Path:
        # Unlike the launch's key, this key does not depend on the paths of the sources.
        key = (triton_key(), launch.source.hash(), launch.arch, launch.options)
        text = repr(key) + Path(__file__).read_text()
        return self._folder / hashlib.sha256(text.encode()).hexdigest()


def _compile(launches: Sequence[Launch]) -> list[Compiled]:
    """Compile launches of one architecture."""
    kernels, logs = [], []
    for launch in launches:
        with _without_cache(), contextlib.redirect_stdout(io.StringIO()) as log:
            target = GPUTarget("cuda", launch.arch, WARP)
            kernels.append(triton.compile(launch.source, target, launch.options))
        logs.append(log.getvalue())
    listings = _listings([kernel.asm["cubin"] for kernel in kernels], launches[0].arch)
    found = []
    for kernel, log, listing in zip(kernels, logs, listings, strict=True):
        command = knobs.nvidia.cuobjdump.path, "--dump-resource-usage"
        resources = _output_of(kernel.asm["cubin"], *command)
        usage = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", resources)}
        found.append(
            Compiled(
                registers=usage["REG"],
                threads=kernel.metadata.num_warps * WARP,
                local_bytes=usage["STACK"] + usage["LOCAL"],
                shared_bytes=kernel.metadata.shared,
                listing=listing,
                atomics=tuple(_ATOMIC_PTX.findall(kernel.asm["ptx"])),
                complaints=tuple(_COMPLAINT.findall(log)),
                ttir=kernel.asm["ttir"],
            )
        )
    return found


def _listings(cubins: Sequence[bytes], arch: int) -> list[tuple[str, ...]]:
    """Return the names of the machine instructions of each cubin.

    The start of nvdisasm takes 0.2 s, ten times as long as a kernel, and it reads only one cubin,
    but raw machine code of any length.
    """
    codes = [_machine_code(cubin) for cubin in cubins]
    # The analysis of data flow annotates indirect jumps and takes up to half the time.
    command = knobs.nvidia.nvdisasm.path, "--binary", f"SM{arch}", "--no-dataflow"
    found = [
        (int(x, 16), name)
        for x, name in _INSTRUCTION.findall(_output_of(b"".join(codes), *command))
    ]
    ends = list(itertools.accumulate(map(len, codes)))
    starts = [bisect.bisect_left(found, (end,)) for end in (0, *ends)]
    return [tuple(name for _, name in found[a:b]) for a, b in itertools.pairwise(starts)]


def _machine_code(cubin: bytes) -> bytes:
    """Return the instructions of a cubin, an ELF file: its sections `.text.<function>`."""
    (table,), (count, names) = (
        struct.unpack_from("<Q", cubin, 40),
        struct.unpack_from("<HH", cubin, 60),
    )
    sections = [struct.unpack_from("<I20xQQ", cubin, table + 64 * i) for i in range(count)]
    found = []
    for name, start, size in sections:
        if cubin.startswith(b".text.", sections[names][1] + name):
            found.append(cubin[start : start + size])
    return b"".join(found)


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Make Triton compile instead of reading its cache, so that ptxas prints its warnings."""
    with tempfile.TemporaryDirectory() as cache:
        variables = {"TRITON_CACHE_DIR": cache, "TRITON_DUMP_PTXAS_LOG": "1"}
        with mock.patch.dict(os.environ, variables):
            yield


def _output_of(cubin: bytes, *command: str) -> str:
    """Return the standard output of a command for a file."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([*command, file.name], capture_output=True, text=True, check=True)
        return done.stdout
