"""The benchmark of the table's rows runs at toy size in Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from benchmarks.tile_rows import main
from lightning_mp.contrastive._tiles.triton_tiles import tiles
from lightning_mp.contrastive._tiles.triton_tiles.configs import find_configs
from tests.benchmarks.rehearsing import QUICK, read

pytestmark = [pytest.mark.interpreted, pytest.mark.slow]


def test_every_row_is_timed_and_no_choice_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tiles, "_HOST_BOUND", 0)  # small losses do not launch the softmax kernel
    path = tmp_path / "figures.csv"
    assert main([*QUICK, "--csv", str(path)]) == 0
    rows = read(path)
    for kernel in ("lse", "softmax"):
        expected = find_configs(kernel, 80, torch.bfloat16, 16)
        own = [row for row in rows if row["kernel"] == kernel]
        assert [row["tile"] for row in own] == ["x".join(map(str, x.tile)) for x in expected]
        assert min(float(row["time_ratio"]) for row in own) == 1
        for row in own:
            products = 2 * 128 * 128 * 16
            rate = products / (float(row["ms"]) * 1e-3) / 1e12
            assert float(row["tflops"]) == pytest.approx(rate)
    assert not (tmp_path / "cache").exists()
