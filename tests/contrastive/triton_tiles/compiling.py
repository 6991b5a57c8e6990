"""Compiles the kernels for GPUs that are not there, and reads what became of them.

The launchers themselves are run, on CPU tensors and with a driver that knows nothing but the name
of an architecture, up to the point where Triton would compile. So a kernel is specialised here
(alignment, divisibility, descriptors, options) as it is on a device. The machine code is read with
the tools that are in Triton's wheel.

What was read is kept in pytest's cache, under all that can change it: the sources of a kernel and
of what it calls, how it is specialised, the target, Triton, and this file. So a change compiles the
kernels that it can break, and two workers compile none twice.
"""

import contextlib
import functools
import hashlib
import io
import json
import os
import pickle
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.cache import triton_key

from lightning_mp.contrastive._tiles.tile_backend import Ids, Limits, Maxima
from lightning_mp.contrastive._tiles.triton_tiles.block import Block, Workspace
from lightning_mp.contrastive._tiles.triton_tiles.configs import TileConfig
from lightning_mp.contrastive._tiles.triton_tiles.lse_kernels import add_lse
from lightning_mp.contrastive._tiles.triton_tiles.operands import Precision, Products
from lightning_mp.contrastive._tiles.triton_tiles.sigmoid_kernels import add_sigmoid
from lightning_mp.contrastive._tiles.triton_tiles.softmax_kernels import (
    SoftmaxFactors,
    write_softmax,
)

__all__ = ["Chip", "Compiled", "Request", "compiler"]

_SIZE = 512  # rows, columns and width of the operands: a multiple of every tile
_RAGGED_SIZE = 500  # no multiple of 16, which is what Triton looks at
_WARP = 32
_ATOMIC_PTX = re.compile(r"\b(?:atom|red|cp\.reduce)\.[\w.:]+")
_COMPLAINT = re.compile(r"^.*(?:warning|Potential Performance Loss).*$", re.MULTILINE)
# An address, a predicate or none, and the name: `/*0a40*/  @!P0 LDG.E R2, [R2.64] ;`.
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


@dataclass(frozen=True)
class Request:
    """One kernel to compile.

    Args:
        kernel: The name of the function.
        config: The row of the table that it is launched with.
        precision: What is multiplied, and how the softmax is kept.
        ragged: The number of columns is no multiple of 16.
        arch: What to compile for; `None` is what the row was chosen for.
        maxima: The largest logits are wanted, too.
        ids: Pairs of equal ids are left out.
        limits: What is too similar is left out.
        guides: The dtype of guides whose products say what that is.
        kept: Products are kept by the first sweep, and read by the second.
    """

    kernel: str
    config: TileConfig
    precision: Precision
    ragged: bool = False
    arch: int | None = None
    maxima: bool = False
    ids: bool = False
    limits: bool = False
    guides: torch.dtype | None = None
    kept: bool = False

    def __str__(self) -> str:
        """Return a test id, such as `sm90-softmax-128x256x64-w8-s4-bfloat16-low-ragged`."""
        precision = self.precision
        dtypes = dict.fromkeys([precision.operand, precision.softmax])
        is_softmax = self.kernel in ("softmax_kernel", "sigmoid_kernel")
        parts = [
            f"sm{self.arch or self.config.arch}",
            self.config.kernel
            if self.kernel == "softmax_kernel"
            else self.kernel.removesuffix("_kernel"),
            "x".join(str(size) for size in self.config.tile),
            f"w{self.config.warps}",
            f"s{self.config.stages}",
            *(str(dtype).removeprefix("torch.") for dtype in list(dtypes)[: 1 + is_softmax]),
            *["low"] * (precision.keeps_low and is_softmax),
            *["split"] * precision.is_split,
            *["ragged"] * self.ragged,
            *["maxima"] * self.maxima,
            *["ids"] * self.ids,
            *["limits"] * self.limits,
            *[f"{self.guides}".replace("torch.", "by-")] * (self.guides is not None),
            *["kept"] * self.kept,
        ]
        return "-".join(parts)


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Args:
        registers: Of 32 bits a thread.
        threads: Of a program.
        local_bytes: Memory a thread has for what its registers do not hold.
        shared_bytes: Memory of a program.
        fuses: Whether its launcher asked for fused multiply-adds.
        instructions: How often the machine code has each one, named with all modifiers.
        atomics: The atomic instructions of the PTX, named with all modifiers.
        complaints: What ptxas warns of.
        ttir: Triton's own intermediate code, before it is lowered.
    """

    registers: int
    threads: int
    local_bytes: int
    shared_bytes: int
    fuses: bool
    instructions: Counter[str]
    atomics: tuple[str, ...]
    complaints: tuple[str, ...]
    ttir: str

    def count(self, name: str) -> int:
        """Return how many instructions have a name, whatever modifiers stand after it."""
        return sum(
            count
            for instruction, count in self.instructions.items()
            if f"{instruction}.".startswith(f"{name}.")
        )

    @property
    def is_spilled(self) -> bool:
        """Whether a thread keeps anything in memory for want of registers."""
        return self.local_bytes > 0 or self.count("STL") > 0 or self.count("LDL") > 0


@dataclass(frozen=True)
class Chip:
    """What a multiprocessor has: CUDA C++ programming guide, technical specifications.

    Args:
        shared_bytes: Memory for all of its programs.
        program_bytes: What one of them may have.
        registers: Of 32 bits.
    """

    shared_bytes: int
    program_bytes: int
    registers: int = 65_536

    def programs(self, compiled: Compiled) -> int:
        """Return how many programs run on a multiprocessor at a time, 0 if none can."""
        if compiled.shared_bytes > self.program_bytes:
            return 0
        # Threads get registers by eights; every program has 1 KiB more, for the system.
        registers = -(-compiled.registers // 8) * 8 * compiled.threads
        programs = self.shared_bytes // (compiled.shared_bytes + 1024)
        return min(programs, self.registers // registers)


@contextlib.contextmanager
def compiler(
    config: pytest.Config, launch: Callable[[Any], None] | None = None
) -> Iterator[Callable[[Any], Compiled]]:
    """Set Triton up to compile for devices that are not there: the body of a module's fixture.

    A kernel whose launcher does not ask for fused multiply-adds gets none, which is what Triton
    does from 3.10 on; 3.9 warns of it.

    Args:
        config: Of this run of pytest, whose cache keeps what was read.
        launch: Launches the kernels of a request, those of a sweep by default.

    Yields:
        What compiles a request, once, and remembers the result. A request names the `kernel`, and
        the chip in `arch` or `config.arch`.
    """
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        has_cache = config.pluginmanager.hasplugin("cacheprovider")
        kept = config.cache.mkdir("compiled_kernels") if has_cache else Path(cache)
        patch.setenv("TRITON_CACHE_DIR", cache)
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
        patch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
        yield functools.cache(functools.partial(_recall, kept=kept, launch=launch or _launch))


def _recall(request: Any, kept: Path, launch: Callable[[Any], None]) -> Compiled:
    """Read what was kept of a kernel, or compile it and keep what is read."""
    function, found = _specialisation(request, launch)
    source = ASTSource(function, found["signature"], found["constants"], found["configs"][0])
    target = _target(_arch_of(request))
    names = ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion")
    options = {name: found[name] for name in names}
    # The hook names four options, and hands on the others as text.
    options["maxnreg"] = json.loads(found["specialization_data"])["options"]["maxnreg"]
    key = (triton_key(), source.hash(), target, options, Path(__file__).read_text())
    path = kept / f"{hashlib.sha256(repr(key).encode()).hexdigest()}"
    if not path.exists():
        unique = path.with_suffix(f".{os.getpid()}")  # another worker may write the same
        unique.write_bytes(pickle.dumps(_compile(source, target, options)))
        unique.replace(path)
    compiled: Compiled = pickle.loads(path.read_bytes())
    return compiled


def _compile(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Compiled:
    with contextlib.redirect_stdout(io.StringIO()) as log:
        kernel = triton.compile(source, target, options)
    cubin = kernel.asm["cubin"]
    resources = _read(cubin, knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    usage = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", resources)}
    listing = _read(cubin, knobs.nvidia.nvdisasm.path, "--print-code")
    return Compiled(
        registers=usage["REG"],
        threads=kernel.metadata.num_warps * _WARP,
        local_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=kernel.metadata.shared,
        fuses=options["enable_fp_fusion"],
        instructions=Counter(_INSTRUCTION.findall(listing)),
        atomics=tuple(_ATOMIC_PTX.findall(kernel.asm["ptx"])),
        complaints=tuple(_COMPLAINT.findall(log.getvalue())),
        ttir=kernel.asm["ttir"],
    )


def _arch_of(request: Any) -> int:
    return getattr(request, "arch", None) or request.config.arch


def _target(arch: int) -> GPUTarget:
    return GPUTarget("cuda", arch, _WARP)


class _AbsentDevice:
    """Stands in for Triton's driver as far as specialising a kernel needs one."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return _target(self.arch)

    def get_current_device(self) -> int:
        return self.arch  # Triton keeps targets by the number of the device

    def get_current_stream(self, device: int) -> int:
        return 0


def _specialisation(request: Any, launch: Callable[[Any], None]) -> tuple[Any, dict[str, Any]]:
    """Return the kernel and what its launcher would have Triton compile."""
    found = []

    def note(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        found.append((fn, compile))
        return True  # neither compile nor launch

    with pytest.MonkeyPatch.context() as patch:
        # Triton's own way back makes its default driver, which a machine without a GPU has not.
        patch.setattr(driver, "_active", _AbsentDevice(_arch_of(request)))
        patch.setattr(knobs.runtime, "jit_cache_hook", note)
        launch(request)
    return next((fn.jit_function, made) for fn, made in found if fn.name == request.kernel)


def _launch(request: Request) -> None:
    """Launch all kernels of a sweep."""
    precision, m = request.precision, _RAGGED_SIZE if request.ragged else _SIZE
    rows = torch.zeros(
        _SIZE, _SIZE, dtype=torch.float32 if precision.is_split else precision.operand
    )
    unit = torch.ones(()) if precision.is_split else None
    products = Products(precision, unit, unit)
    ids, lses = (
        [torch.zeros(length, dtype=dtype) for length in (_SIZE, m)]
        for dtype in (torch.int32, torch.float64)
    )
    guides = None
    if request.guides:
        of_rows = torch.empty(_SIZE, _SIZE, dtype=request.guides)
        guides = of_rows, torch.empty_like(of_rows[:m])
    limits = Limits(torch.zeros(_SIZE), torch.zeros(m), guides)
    block = Block(
        slice(0, _SIZE), slice(0, m), products.rows(rows), products.columns(rows[:m]), 0,
        Ids(*ids) if request.ids else None, limits if request.limits else None,
        torch.empty(_SIZE, _SIZE)[:, :m] if request.kept else None,
    )  # fmt: skip
    maxima = Maxima(*(x.clone() for x in lses)) if request.maxima else None
    log2_scale, other = torch.empty(2), torch.empty(1)
    if request.kernel in ("lse_kernel", "merge_kernel"):
        add_lse(block, log2_scale, other, *lses, request.config, maxima)
        return
    # Rows are aligned even where their ends are not.
    weights = Workspace(block.shape, precision, rows.device).weights(block)
    if request.kernel == "sigmoid_kernel":
        add_sigmoid(block, log2_scale, other, lses[0][:2], weights, request.config, maxima)
    else:
        factors = SoftmaxFactors.of(*lses, torch.ones(()), 0)
        write_softmax(block, log2_scale, factors, weights, (request.config, request.config))


def _read(cubin: bytes, tool: str, *options: str) -> str:
    """Return what a tool has to say about a cubin; it complains of older chips on stderr."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
