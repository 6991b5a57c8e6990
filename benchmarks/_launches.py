"""What the launchers of the package ask Triton for, for a GPU that is not there.

The package runs up to each launch: with tensors that have no memory, an architecture that is
pretended, and a driver of Triton that knows nothing but the architecture's name. So a kernel is
specialised here (dtypes, alignment, numbers that are 1 or multiples of 16, descriptors, options) as
it is on a device.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from lightning_mp.contrastive._call import request
from lightning_mp.contrastive._tiles import backends
from lightning_mp.contrastive._tiles.triton_tiles import tiles
from lightning_mp.contrastive._tiles.triton_tiles.configs import TileConfig, table_arch

__all__ = ["Launch", "absent_device", "fake_gpu", "launches_in"]

WARP = 32
_MULTIPROCESSORS = 132  # of an H100; blocks of rows depend on them
_BASE_ADDRESS = 4096  # CUDA's allocator aligns to more than any kernel asks for
# Triton remembers kernels by the number of the device: each of these is a new one.
_NUMBERS = itertools.count(-1, -1)


@dataclass(frozen=True)
class Launch:
    """A kernel as a launcher asks for it; two that Triton would compile once are equal.

    Args:
        kernel: The name of the function.
        arch: Compute capability times ten.
        key: Of the sources, the specialisation and the options.
        source: What Triton compiles.
        options: How.
    """

    kernel: str
    arch: int
    key: str
    source: ASTSource = field(compare=False, repr=False)
    options: dict[str, Any] = field(compare=False, repr=False)

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Arguments that are known at compile time, `None` included, by name."""
        names = self.source.fn.arg_names
        return {names[path[0]]: value for path, value in self.source.constants.items()}

    def has(self, argument: str) -> bool:
        """Return whether an argument is there and not `None`."""
        return self.constants.get(argument, argument) is not None

    @property
    def tile(self) -> tuple[int, int, int] | None:
        """Rows, columns and slice of the width of a tile; `None` of kernels without products."""
        sizes = [self.constants.get(name) for name in ("TILE_M", "TILE_N", "TILE_K")]
        return None if None in sizes else tuple(sizes)

    @property
    def multiplies(self) -> bool:
        """Whether tiles of features are multiplied."""
        return self.tile is not None and self.has("rows")

    @property
    def dtype(self) -> str:
        """The dtype of the first argument, in Triton's words, such as `bf16`."""
        first = next(iter(self.source.signature.values()))
        return first.removeprefix("tensordesc<").removeprefix("*").partition("[")[0]

    def is_row(self, row: TileConfig) -> bool:
        """Return whether it is launched with the shape of a row of the table."""
        return (self.tile, self.options["num_warps"], self.options["num_stages"]) == (
            row.tile, row.warps, row.stages
        )  # fmt: skip

    def __str__(self) -> str:
        """Return what tells it from others, such as `sm90 lse 256x128x64 w8 s4 bf16 ids stored`."""
        optional = {
            "row_ids": "ids", "row_thresholds": "thresholds", "row_guides": "guides",
            "stored": "stored", "row_maxima": "maxima", "weights_low": "low",
        }  # fmt: skip
        names = self.source.fn.arg_names
        words = [f"sm{self.arch} {self.kernel.removesuffix('_kernel')}"]
        if self.tile is not None:
            words.append("x".join(map(str, self.tile)))
        words += [f"w{self.options['num_warps']} s{self.options['num_stages']}", self.dtype]
        words += [word for name, word in optional.items() if name in names and self.has(name)]
        flags = ("SPLIT_SCALE", "WIDE", "ROW_WANTED", "COLUMN_WANTED")
        words += [name.lower() for name in flags if self.constants.get(name) in (True, 1)]
        return f"{' '.join(words)} [{self.key[:6]}]"


def absent_device(arch: int) -> Any:
    """Return Triton's driver, as far as finding a kernel needs one."""
    number = next(_NUMBERS)
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, WARP),
        get_current_device=lambda: number,
        get_current_stream=lambda device: 0,
    )


@contextmanager
def launches_in(arch: int) -> Iterator[dict[str, Launch]]:
    """Note what is launched, once each, by key; nothing is compiled and nothing runs.

    A kernel whose launcher does not ask for fused multiply-adds gets none, which is what Triton
    does from 3.10 on.
    """
    found: dict[str, Launch] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        source = ASTSource(
            fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0]
        )
        names = ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion")
        options = {name: compile[name] for name in names}
        # The hook names four options, and hands on the others as text.
        said = json.loads(compile["specialization_data"])["options"]
        options["maxnreg"] = said["maxnreg"]
        key = hashlib.sha256(f"{source.hash()}{options}{arch}".encode()).hexdigest()
        found.setdefault(key, Launch(fn.jit_function.__name__, arch, key, source, options))
        return True  # neither compile nor launch

    with (
        # Triton's own way back makes its default driver, which a machine without a GPU has not.
        mock.patch.object(driver, "_active", absent_device(arch)),
        mock.patch.object(knobs.runtime, "jit_cache_hook", note),
        mock.patch.dict(os.environ, {"TRITON_DEFAULT_FP_FUSION": "0"}),
    ):
        yield found


@contextmanager
def fake_gpu(arch: int, choice: int = 0) -> Iterator[None]:
    """Let losses of tensors without memory take the Triton tiles as on a GPU of an architecture.

    Args:
        arch: Compute capability times ten.
        choice: Which row wins where `autotune` times several, which are all launched.
    """

    def fastest(
        configs: Sequence[TileConfig], run: Callable[[TileConfig], object], *_: object
    ) -> TileConfig:
        for config in configs:
            run(config)
        return configs[min(choice, len(configs) - 1)]

    with ExitStack() as stack:
        for target, name, value in (
            # Fakes have no address, and launchers and Triton look at its alignment.
            (FakeTensor, "data_ptr", lambda x: _BASE_ADDRESS + x.storage_offset() * x.itemsize),
            (request, "triton_problem", lambda *_: None),
            (tiles, "arch_of", lambda _: table_arch(divmod(arch, 10))),
            (tiles, "_multiprocessors", lambda _: _MULTIPROCESSORS),
            (tiles, "fastest", fastest),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        # One object for equal choices would remember what was chosen.
        backends.triton_tiles.cache_clear()
        stack.callback(backends.triton_tiles.cache_clear)
        stack.enter_context(FakeTensorMode())
        yield
