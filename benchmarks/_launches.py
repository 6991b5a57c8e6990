"""Records the kernels that the package's launchers request from Triton, without a GPU.

The package runs up to each launch, with fake tensors, a pretended compute capability, and a stub of
Triton's driver that only knows that capability. Kernels are therefore specialized (dtypes,
alignment, integers that are 1 or multiples of 16, descriptors, options) as they are on a device.
"""

import dataclasses
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

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from lightning_mp.contrastive._call import request
from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._operator import _run
from lightning_mp.contrastive._tiles import backends
from lightning_mp.contrastive._tiles.triton_tiles import tiles
from lightning_mp.contrastive._tiles.triton_tiles.configs import TileConfig, table_arch

__all__ = ["Launch", "absent_device", "call_loss", "fake_gpu", "launches_in"]

WARP = 32
_MULTIPROCESSORS = 132  # an H100; the shape of softmax blocks depends on the number
_BASE_ADDRESS = 4096  # CUDA's allocator aligns to more than any kernel needs
# Triton caches kernels by device number; each stub of the driver gets a new number.
_NUMBERS = itertools.count(-1, -1)


@dataclass(frozen=True)
class Launch:
    """A kernel that a launcher requests; launches that share a compiled kernel are equal.

    Args:
        kernel: Name of the kernel function.
        arch: Compute capability times ten.
        key: Hash of the sources, the specialization and the options.
        source: The input of `triton.compile`.
        options: The options of `triton.compile`.
    """

    kernel: str
    arch: int
    key: str
    source: ASTSource = field(compare=False, repr=False)
    options: dict[str, Any] = field(compare=False, repr=False)

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Compile-time arguments by name, `None` included."""
        names = self.source.fn.arg_names
        return {names[path[0]]: value for path, value in self.source.constants.items()}

    def has(self, argument: str) -> bool:
        """Return whether the kernel has an argument and its value is not `None`."""
        return self.constants.get(argument, argument) is not None

    @property
    def tile(self) -> tuple[int, int, int] | None:
        """Rows, columns and width slice of a tile; `None` for kernels without products."""
        sizes = [self.constants.get(name) for name in ("TILE_M", "TILE_N", "TILE_K")]
        return None if None in sizes else tuple(sizes)

    @property
    def multiplies(self) -> bool:
        """Whether the kernel multiplies tiles of features."""
        return self.tile is not None and self.has("rows")

    @property
    def dtype(self) -> str:
        """Triton's name for the dtype of the first argument, such as `bf16`."""
        first = next(iter(self.source.signature.values()))
        return first.removeprefix("tensordesc<").removeprefix("*").partition("[")[0]

    def is_row(self, row: TileConfig) -> bool:
        """Return whether tile, warps and stages are those of a row of the table."""
        return (self.tile, self.options["num_warps"], self.options["num_stages"]) == (
            row.tile, row.warps, row.stages
        )  # fmt: skip

    def __str__(self) -> str:
        """Return a readable name, such as `sm90 lse 256x128x64 w8 s4 bf16 ids stored`."""
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
    """Return a stub of Triton's driver with the methods that looking up a kernel calls."""
    number = next(_NUMBERS)
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, WARP),
        get_current_device=lambda: number,
        get_current_stream=lambda device: 0,
    )


@contextmanager
def launches_in(arch: int) -> Iterator[dict[str, Launch]]:
    """Record each distinct launch under its key; nothing is compiled and nothing runs.

    Kernels whose launcher does not set `enable_fp_fusion` get no fused multiply-adds, which is
    Triton's default from 3.10 on.
    """
    found: dict[str, Launch] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        source = ASTSource(
            fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0]
        )
        names = ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion")
        options = {name: compile[name] for name in names}
        # The hook passes four options by name, and all others as JSON.
        others = json.loads(compile["specialization_data"])["options"]
        options["maxnreg"] = others["maxnreg"]
        key = hashlib.sha256(f"{source.hash()}{options}{arch}".encode()).hexdigest()
        found.setdefault(key, Launch(fn.jit_function.__name__, arch, key, source, options))
        return True  # neither compile nor launch

    with (
        # `driver.reset_active` would create the default driver, which fails without a GPU.
        mock.patch.object(driver, "_active", absent_device(arch)),
        mock.patch.object(knobs.runtime, "jit_cache_hook", note),
        mock.patch.dict(os.environ, {"TRITON_DEFAULT_FP_FUSION": "0"}),
    ):
        yield found


@contextmanager
def fake_gpu(arch: int, choice: int = 0) -> Iterator[None]:
    """Make losses of fake tensors launch the Triton tiles as on a GPU of an architecture.

    Args:
        arch: Compute capability times ten.
        choice: Index of the row that wins where `autotune` times several; all of them are launched.
    """

    def fastest(
        configs: Sequence[TileConfig], run: Callable[[TileConfig], object], *_: object
    ) -> TileConfig:
        for config in configs:
            run(config)
        return configs[min(choice, len(configs) - 1)]

    with ExitStack() as stack:
        for target, name, value in (
            # Fake tensors have no address, but launchers and Triton check its alignment.
            (FakeTensor, "data_ptr", lambda x: _BASE_ADDRESS + x.storage_offset() * x.itemsize),
            (request, "tiles_problem", lambda *_: None),
            (tiles, "arch_of", lambda _: table_arch(divmod(arch, 10))),
            (tiles, "_multiprocessors", lambda _: _MULTIPROCESSORS),
            (tiles, "fastest", fastest),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        # The cached backend would keep the choices of an earlier call.
        backends.triton_tiles.cache_clear()
        stack.callback(backends.triton_tiles.cache_clear)
        stack.enter_context(FakeTensorMode())
        yield


def call_loss(
    loss: Any,
    image: Tensor,
    text: Tensor,
    scale: Tensor | float,
    *,
    stores_tiles: bool = True,
    **options: Any,
) -> None:
    """Compute a loss and its gradients as the operator does, without autograd.

    Args:
        loss: A `ContrastiveLoss` or `SigmoidContrastiveLoss`.
        image: Features of the images.
        text: Features of the texts.
        scale: The logit scale.
        stores_tiles: Whether the first sweep may keep logits for the second.
        options: Further arguments of `Request.of`.
    """
    bias = None if loss._is_softmax else torch.empty((), requires_grad=True)
    request = Request.of(loss, image, text, scale, bias, **options).checked()
    _run(*dataclasses.replace(request, stores_tiles=stores_tiles).flat())
