"""Errors of the launchers, and the choice of a tile shape."""

import dataclasses
import re

import pytest
import torch
from torch import Tensor

from lightning_mp.contrastive._tiles.tile_backend import Vectors
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles
from lightning_mp.contrastive._tiles.triton_tiles import tiles as tiles_module
from lightning_mp.contrastive._tiles.triton_tiles.configs import (
    TileConfig,
    arch_of,
    fastest,
    find_configs,
)
from tests.contrastive.triton_tiles.interpreter import (
    GRADIENT_ERROR,
    LSE_ERROR,
    make_shard,
)

pytestmark = pytest.mark.interpreted

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("side", "lse", "message"),
    [
        (0, torch.zeros(5), "log-sum-exps of rows of torch.float32, shape [5]"),
        (0, torch.zeros(5, 1, dtype=FP64), "shape [5, 1]"),
        (1, torch.zeros(14, dtype=FP64)[::2], "log-sum-exps of columns of torch.float64"),
        (1, torch.zeros(1, dtype=FP64).expand(7), "strides (0,). It must be contig"),
    ],
)
def test_log_sum_exps_with_another_layout_raise(side: int, lse: Tensor, message: str) -> None:
    lses = [torch.zeros(5, dtype=FP64), torch.zeros(7, dtype=FP64)]
    lses[side] = lse
    with pytest.raises(ValueError, match=re.escape(message)):
        TritonTiles().lse_sweep(make_shard(5, 7, 64, BF16).swept, Vectors(*lses))


@pytest.mark.parametrize("dtype", [FP64, torch.int8])
def test_table_error_for_unknown_dtype_lists_known_dtypes(dtype: torch.dtype) -> None:
    names = ("bfloat16", "float16", "float32")
    known = [(arch, name) for arch in (80, 90, 100, 120) for name in names]
    message = (
        f"Passed dtype {str(dtype)[6:]} on architecture 90 for the kernel 'lse'. The table has "
        f"rows for {known}. Use one of these, or `backend='torch'`."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        find_configs("lse", 90, dtype, 512)


def test_table_raises_for_unknown_architectures() -> None:
    with pytest.raises(ValueError, match="Passed dtype float16 on architecture 70"):
        make_shard(4, 4, 8, FP16).lse_sweep(TritonTiles(arch=70))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize("kernel", ["lse", "softmax"])
def test_every_tile_shape_of_the_table_equals_float64(
    kernel: str, arch: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile_dtype = "tf32" if dtype == FP32 else "auto"
    tiles, shard = TritonTiles(tile_dtype=tile_dtype, arch=arch), make_shard(150, 270, 72, dtype)
    first = 1 if arch in (80, 90) else 0  # other tests use the first rows
    for config in find_configs(kernel, arch, dtype, 512)[first:]:
        monkeypatch.setattr(
            tiles_module,
            "find_configs",
            lambda name, *key, tried=config: (
                (tried,) if name == tried.kernel else find_configs(name, *key)
            ),
        )
        if kernel == "lse":
            assert shard.lse_error(shard.lse_sweep(tiles)) < LSE_ERROR, config
        else:
            assert shard.grad_error(shard.grad_sweep(tiles)) < GRADIENT_ERROR[dtype], config


def test_autotuning_chooses_a_table_row_once_and_changes_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The workspace fits blocks of 65 x 64.
    shard, tiles = make_shard(65, 70, 72, BF16), TritonTiles(1, autotune=True)
    for _ in range(2):
        assert shard.lse_error(shard.lse_sweep(tiles)) < LSE_ERROR
        assert shard.grad_error(shard.grad_sweep(tiles)) < GRADIENT_ERROR[BF16]
        # The second iteration must not time anything.
        monkeypatch.setattr(tiles_module, "fastest", None)
    kernels = {key[0]: config for key, config in tiles._tuned.items()}
    assert set(kernels) == {"lse", "softmax"}
    for kernel, config in kernels.items():
        assert config in find_configs(kernel, arch_of(torch.device("cpu")), BF16, 72)


def test_fastest_skips_failing_configs() -> None:
    configs = find_configs("lse", 90, BF16, 512)
    runs: list[TileConfig] = []

    def run(config: TileConfig) -> None:
        runs.append(config)
        if config != configs[1]:
            raise RuntimeError("out of shared memory")

    assert fastest(configs, run, torch.device("cpu")) == configs[1]
    # One run compiles and three are timed; a failing row is not run again.
    assert runs == [configs[0], *[configs[1]] * 4, *configs[2:]]


def test_fastest_ignores_the_first_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configs = find_configs("lse", 90, BF16, 512)[:3]
    now = 0.0
    compiled: set[TileConfig] = set()
    seconds = dict(zip(configs, (3.0, 1.0, 2.0), strict=True))

    def run(config: TileConfig) -> None:
        nonlocal now
        now += seconds[config] if config in compiled else 10.0 / seconds[config]
        compiled.add(config)

    monkeypatch.setattr(
        "lightning_mp.contrastive._tiles.triton_tiles.configs.time.perf_counter", lambda: now
    )
    assert fastest(configs, run, torch.device("cpu")) == configs[1]


def test_fastest_error_explains_why_no_config_runs() -> None:
    configs = tuple(
        dataclasses.replace(config, tile=(64 * index, 64, 32))
        for index, config in enumerate(find_configs("lse", 90, BF16, 512), start=1)
    )

    def run(config: TileConfig) -> None:
        raise RuntimeError(f"failure {config.tile[0] // 64}")

    message = "No tile shape for the kernel 'lse' runs on cpu"
    with pytest.raises(RuntimeError, match=message) as raised:
        fastest(configs, run, torch.device("cpu"))
    for index in range(1, len(configs) + 1):
        assert f"({64 * index}, 64, 32): failure {index}" in str(raised.value)
    assert "backend='torch'" in str(raised.value)
