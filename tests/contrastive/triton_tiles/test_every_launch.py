"""The kernels that the launchers request, compiled without a GPU.

Tests of numbers do not show spilled registers, products that miss the tensor cores, or too much
shared memory. `make test` compiles the launches of the default losses, and for 8.0 and 9.0 those
that need the most registers; `make sweep` compiles the cross product of all options. `make floor`
and `make floor-sweep` do the same with the lowest Triton that pyproject.toml allows.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from benchmarks._launches import Launch, fake_gpu, launches_in
from benchmarks._machine_code import Compiled, Compiler
from lightning_mp import ContrastiveLoss
from lightning_mp.contrastive._tiles.triton_tiles import tiles
from lightning_mp.contrastive._tiles.triton_tiles.configs import all_configs, find_configs
from tests.contrastive.triton_tiles.compiling import kernels_of
from tests.contrastive.triton_tiles.every_launch import (
    ARCHS,
    BF16,
    ONE_BLOCK,
    call,
    default_launches,
    every_launch,
    fullest_launches,
)
from tests.contrastive.triton_tiles.kernel_checks import CHIPS, problems_of

pytestmark = pytest.mark.slow

ROWS = all_configs()


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config) -> Iterator[Compiler]:
    with kernels_of(pytestconfig) as compile_:
        yield compile_


def check(launches: list[Launch], compiled: Compiler) -> None:
    kernels = zip(launches, compiled.all(launches), strict=True)
    found = {str(launch): problems_of(launch, kernel) for launch, kernel in kernels}
    assert {name: problems for name, problems in found.items() if problems} == {}


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_of_default_losses_meet_their_limits(arch: int, compiled: Compiler) -> None:
    launches = default_launches(arch)
    assert {"prepare_kernel", "lse_kernel", "merge_kernel", "terms_kernel", "softmax_kernel"} <= {
        launch.kernel for launch in launches
    }
    check(launches, compiled)


@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_with_most_registers_meet_their_limits(arch: int, compiled: Compiler) -> None:
    launches = fullest_launches(arch)
    for argument in (
        "row_ids",
        "row_maxima",
        "row_thresholds",
        "row_guides",
        "stored",
        "weights_low",
    ):
        named = [x for x in launches if argument in x.source.fn.arg_names]
        assert any(x.has(argument) for x in named), argument
    check(launches, compiled)


@functools.cache
def _every_launch(arch: int) -> tuple[Launch, ...]:
    return tuple(every_launch(arch))


KERNELS = (
    "adamw", "factors", "finish", "join", "lse", "merge", "merge_stats", "prepare", "probe", "rms",
    "row_dots", "sigmoid", "softmax", "split", "stats", "terms",
)  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("arch", ARCHS, scope="module")
def test_every_kernel_meets_its_limits(arch: int, kernel: str, compiled: Compiler) -> None:
    launches = [x for x in _every_launch(arch) if x.kernel == f"{kernel}_kernel"]
    assert launches
    check(launches, compiled)


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_is_launched(arch: int) -> None:
    assert {launch.kernel for launch in _every_launch(arch)} == {f"{x}_kernel" for x in KERNELS}


def _of_reason(row: object, launches: list[Launch]) -> Iterator[Launch]:
    options = ("row_ids", "row_thresholds", "row_guides", "stored", "row_maxima")
    for launch in launches:
        is_bare = launch.multiplies and not any(
            launch.has(name) for name in options if name in launch.source.fn.arg_names
        )
        if is_bare and launch.is_row(row) and launch.kernel != "sigmoid_kernel":
            yield launch


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_stated_reasons_of_table_rows_hold(arch: int, compiled: Compiler) -> None:
    """The reasons state shared memory and programs on a multiprocessor."""
    checked = 0
    launches = default_launches(arch)
    for row in ROWS:
        if row.arch != arch or "bfloat16" not in row.dtypes:
            continue
        for launch in _of_reason(row, launches):
            if launch.kernel.startswith("lse") != (row.kernel == "lse"):
                continue
            kernel = compiled(launch)
            for kibibytes in re.findall(r"(\d+) KiB", row.reason):
                # Rounded down, because barriers take a few additional bytes.
                assert kernel.shared_bytes // 1024 == int(kibibytes), (launch, row.reason)
                checked += 1
            if "two programs" in row.reason:
                assert CHIPS[arch].programs(kernel) >= 2
                checked += 1
    assert checked or arch not in (80, 90)


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if "FLOP for each byte" in row.reason],
    ids=lambda row: f"{row.kernel}-{row.tile}",
)
def test_arithmetic_intensity_equals_the_stated_reason(row: tiles.TileConfig) -> None:
    (m, n, _), size = row.tile, getattr(torch, row.dtypes[0]).itemsize
    (flop,) = re.findall(r"(\d+) FLOP for each byte", row.reason)
    assert int(2 * m * n / (m + n) / size) == int(flop)


def test_merge_uses_ln_2_in_float64(compiled: Compiler) -> None:
    (merge,) = (x for x in default_launches(90) if x.kernel == "merge_kernel")
    kernel = compiled(merge)
    constants = re.findall(r"constant dense<(0\.69\d*)> : tensor<\w+xf(\d+)>", kernel.ttir)
    assert {(float(value), bits) for value, bits in constants} == {(math.log(2), "64")}
    assert kernel.count("DADD") > 0


def _with_row(arch: int, kernel: str, **changes: object) -> list[Launch]:
    """Return the launches after a change of the first row of a kernel."""

    def find(name: str, *key: object) -> tuple[tiles.TileConfig, ...]:
        first, *others = find_configs(name, *key)  # type: ignore[arg-type]
        changed = dataclasses.replace(first, **changes) if name == kernel else first
        return (changed, *others)

    with (
        mock.patch.object(tiles, "find_configs", find),
        launches_in(arch) as found,
        fake_gpu(arch),
    ):
        call(ContrastiveLoss(**ONE_BLOCK), 8192, 768, BF16)
    is_wide = kernel == "softmax_wide"
    return [
        x
        for x in found.values()
        if x.tile == changes["tile"] and x.constants.get("WIDE", False) == is_wide
    ]


def test_too_large_tile_is_detected_as_spilling(compiled: Compiler) -> None:
    # The reason of the row says that larger tiles spill.
    (launch,) = _with_row(90, "softmax_wide", tile=(128, 256, 64))
    assert any("registers did not hold" in words for words in problems_of(launch, compiled(launch)))


@pytest.mark.sweep
def test_serialized_products_are_detected(compiled: Compiler) -> None:
    (launch,) = _with_row(90, "lse", tile=(256, 256, 16), stages=2)
    complaints = compiled(launch).complaints
    assert any("wgmma.mma_async instructions are serialized" in each for each in complaints)


@pytest.mark.sweep
def test_shuffles_of_wide_tiles_equal_the_stated_number(compiled: Compiler) -> None:
    (reason,) = (row.reason for row in ROWS if "the shuffles" in row.reason)
    low, high = re.findall(r"([\d.]+) to ([\d.]+) times the shuffles", reason)[0]
    tall, wide = (_with_row(90, "lse", tile=tile)[0] for tile in ((256, 128, 64), (128, 256, 64)))
    more = compiled(wide).count("SHFL") / compiled(tall).count("SHFL")
    assert float(low) <= round(more, 1) <= float(high)


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "programs"),
    [(255, 32_784, 1), (128, 115_712, 2), (129, 115_712, 1), (128, 115_713, 1), (128, 232_449, 0)],
)
def test_resident_programs_are_counted(registers: int, shared_bytes: int, programs: int) -> None:
    kernel = Compiled(registers, 256, 0, shared_bytes, (), (), (), "")
    assert CHIPS[90].programs(kernel) == programs
