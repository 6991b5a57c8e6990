"""What the launchers refuse, and how a tile shape is chosen.

Shapes:
    n: rows. m: columns. k: width of the operands.
"""

import dataclasses
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles
from lightning_mp.contrastive._tiles.triton_tiles import tiles as tiles_module
from lightning_mp.contrastive._tiles.triton_tiles.autotune import fastest
from lightning_mp.contrastive._tiles.triton_tiles.configs import TileConfig, arch_of, find_configs
from lightning_mp.contrastive._tiles.triton_tiles.gradient_kernels import SoftmaxFactors
from lightning_mp.contrastive._tiles.triton_tiles.launch import BlockLimits
from lightning_mp.contrastive._tiles.triton_tiles.lse_kernels import add_lse
from lightning_mp.contrastive._tiles.triton_tiles.softmax_kernels import write_softmax
from tests.contrastive.triton_tiles.interpreter import (
    GRADIENT_ERROR,
    LSE_ERROR,
    make_shard,
)

pytestmark = pytest.mark.interpreted

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
N, M, K = 5, 7, 64


def _add_lse(**changed: Any) -> None:
    """Call the launcher with arguments it accepts, but for those given."""
    arguments: dict[str, Any] = {
        "rows_nk": torch.randn(N, K).bfloat16(),
        "columns_mk": torch.randn(M, K).bfloat16(),
        "log2_scale": torch.tensor([1.0, 0.0]),
        "reference": torch.zeros(1),
        "row_lse_n": torch.zeros(N, dtype=FP64),
        "column_lse_m": torch.zeros(M, dtype=FP64),
        "diagonal": None,
        "config": find_configs("lse", 80, BF16, K)[0],
    }
    add_lse(**{**arguments, **changed}, split_scale=False)


def _write_softmax(**changed: Any) -> None:
    lses = torch.zeros(N, dtype=FP64), torch.zeros(M, dtype=FP64)
    factors = SoftmaxFactors.of(*lses, torch.ones(()), 0)
    arguments: dict[str, Any] = {
        "rows_nk": torch.randn(N, K).bfloat16(),
        "columns_mk": torch.randn(M, K).bfloat16(),
        "log2_scale": torch.tensor([1.0, 0.0]),
        "factors": factors,
        "softmax_nm": torch.empty(N, M, dtype=BF16),
        "low_nm": None,
        "diagonal": None,
        "configs": tuple(
            find_configs(kernel, 80, BF16, K)[0] for kernel in ("softmax", "softmax_wide")
        ),
    }
    write_softmax(**{**arguments, **changed}, split_scale=False)


def _unaligned(rows: int, width: int) -> Tensor:
    return torch.randn(rows, 2 * K).bfloat16()[:, 1 : 1 + width]


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        (
            {"columns_mk": torch.zeros(M, 2 * K, dtype=BF16)},
            "Passed rows and columns of (shape, dtype, device) [([5, 64]",
        ),
        ({"columns_mk": torch.zeros(M, K, dtype=FP16)}, "They must have one width, dtype and"),
        (
            {
                "rows_nk": torch.zeros(N, K, dtype=FP32),
                "columns_mk": torch.zeros(M, K, dtype=FP32),
            },
            "Passed operands of float32 with a tile shape for bfloat16, float16.",
        ),
        ({"rows_nk": _unaligned(N, K)}, "shape [5, 64] and strides (128, 1). Rows must be"),
        ({"columns_mk": torch.zeros(K, M, dtype=BF16).T}, "shape [7, 64] and strides (1, 7)."),
        (
            {"rows_nk": torch.zeros(N, K + 4, dtype=BF16)[:, :K]},
            "shape [5, 64] and strides (68, 1).",
        ),
        (
            {"rows_nk": torch.zeros(N, K + 8, dtype=BF16)[:, :K]},
            "a multiple of 16 values apart",
        ),
        (
            {
                "rows_nk": torch.zeros(N, 40, dtype=BF16),
                "columns_mk": torch.zeros(M, 40, dtype=BF16),
            },
            "a multiple of 32 wide",
        ),
    ],
)
def test_operands_that_a_kernel_would_misread_are_refused(
    operands: dict[str, Tensor], message: str
) -> None:
    for launcher in (_add_lse, _write_softmax):
        with pytest.raises(ValueError, match=re.escape(message)):
            launcher(**operands)


def test_more_rows_than_kernels_can_count_are_refused() -> None:
    rows = torch.zeros(1, K, dtype=BF16).expand(2**30 + 1, K)
    with pytest.raises(ValueError, match=r"at most 2\^30 in number. Prepare it by `make_operand`"):
        _add_lse(rows_nk=rows)


@pytest.mark.parametrize(
    ("name", "lse", "message"),
    [
        ("row_lse_n", torch.zeros(N), "`row_lse_n` of torch.float32, shape [5]"),
        ("row_lse_n", torch.zeros(N, 1, dtype=FP64), "shape [5, 1]"),
        ("row_lse_n", torch.zeros(M, dtype=FP64), "of float64 and of shape [5]."),
        ("column_lse_m", torch.zeros(2 * M, dtype=FP64)[::2], "`column_lse_m` of torch.float64"),
        ("column_lse_m", torch.zeros(1, dtype=FP64).expand(M), "strides (0,). It must be contig"),
    ],
)
def test_log_sum_exps_of_another_layout_are_refused(name: str, lse: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _add_lse(**{name: lse})


@pytest.mark.parametrize(
    ("guides", "message"),
    [
        ([torch.zeros(x, 2 * K, dtype=BF16)[:, :K] for x in (N, M)], "must be contiguous. Prep"),
        ([torch.zeros(x, 40, dtype=BF16) for x in (N, M)], "a multiple of 32 wide"),
        ([torch.zeros(x, K) for x in (N, M)], "Passed operands of float32 with a tile shape for"),
    ],
)
def test_guides_that_a_kernel_would_misread_are_refused(guides: list[Tensor], message: str) -> None:
    limits = BlockLimits(torch.zeros(N), torch.zeros(M), *guides)
    with pytest.raises(ValueError, match=re.escape(message)):
        _add_lse(limits=limits)


@pytest.mark.parametrize(
    "kept_nm",
    [torch.zeros(M, 16)[:, :N], torch.zeros(N, M), torch.zeros(N, 16)[:, 1:8]],
    ids=["shape", "stride", "start"],
)
def test_memory_for_products_that_a_kernel_would_misread_is_refused(kept_nm: Tensor) -> None:
    message = re.escape(f"Passed `kept_nm` of shape {list(kept_nm.shape)} and strides")
    for call in (_add_lse, partial(_write_softmax, rows_nk=None, columns_mk=None)):
        with pytest.raises(ValueError, match=message):
            call(kept_nm=kept_nm)


@pytest.mark.parametrize("name", ["softmax_nm", "low_nm"])
def test_softmax_of_another_shape_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"It must be \[5, 7\], rows by columns"):
        _write_softmax(**{name: torch.empty(M, N, dtype=BF16)})


@pytest.mark.parametrize("dtype", [FP64, torch.int8])
def test_table_refuses_unknown_dtypes_and_names_the_known(dtype: torch.dtype) -> None:
    names = ("bfloat16", "float16", "float32")
    known = [(arch, name) for arch in (80, 90, 100, 120) for name in names]
    message = (
        f"Passed dtype {str(dtype)[6:]} on architecture 90 for the kernel 'lse'. The table has "
        f"rows for {known}. Use one of these, or `backend='torch'`."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        find_configs("lse", 90, dtype, 512)


def test_table_refuses_unknown_architectures() -> None:
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
    first = 1 if arch in (80, 90) else 0  # which other tests use
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


def test_autotuning_picks_a_row_of_the_table_once_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The memory is for blocks of 65 x 64.
    shard, tiles = make_shard(65, 70, 72, BF16), TritonTiles(1, autotune=True)
    for _ in range(2):
        assert shard.lse_error(shard.lse_sweep(tiles)) < LSE_ERROR
        assert shard.grad_error(shard.grad_sweep(tiles)) < GRADIENT_ERROR[BF16]
        # The second time round there is nothing left to time.
        monkeypatch.setattr(tiles_module, "fastest", None)
    kernels = {key[0]: config for key, config in tiles._tuned.items()}
    assert set(kernels) == {"lse", "softmax"}
    for kernel, config in kernels.items():
        assert config in find_configs(kernel, arch_of(torch.device("cpu")), BF16, 72)


def test_fastest_passes_over_what_fails() -> None:
    configs = find_configs("lse", 90, BF16, 512)
    runs: list[TileConfig] = []

    def run(config: TileConfig) -> None:
        runs.append(config)
        if config != configs[1]:
            raise RuntimeError("out of shared memory")

    assert fastest(configs, run, torch.device("cpu")) == configs[1]
    # One run that compiles and three that are timed; failures are not tried again.
    assert runs == [configs[0], *[configs[1]] * 4, *configs[2:]]


def test_fastest_goes_by_the_clock_and_not_by_the_first_run(
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
        "lightning_mp.contrastive._tiles.triton_tiles.autotune.time.perf_counter", lambda: now
    )
    assert fastest(configs, run, torch.device("cpu")) == configs[1]


def test_fastest_says_why_none_runs() -> None:
    configs = tuple(
        dataclasses.replace(config, tile=(64 * index, 64, 32))
        for index, config in enumerate(find_configs("lse", 90, BF16, 512), start=1)
    )

    def run(config: TileConfig) -> None:
        raise RuntimeError(f"failure {config.tile[0] // 64}")

    with pytest.raises(RuntimeError, match=r"No tile shape for 'lse' runs on cpu") as raised:
        fastest(configs, run, torch.device("cpu"))
    for index in range(1, len(configs) + 1):
        assert f"({64 * index}, 64, 32): failure {index}" in str(raised.value)
    assert "backend='torch'" in str(raised.value)
