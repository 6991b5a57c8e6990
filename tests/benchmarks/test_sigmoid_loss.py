"""The benchmark of the sigmoid loss at toy size: that it runs, agrees and writes what it says."""

import pytest
import torch

from benchmarks._inputs import Case
from benchmarks.sigmoid_loss import find_contenders, formula_by_blocks, main
from tests.benchmarks.rehearsing import QUICK, read
from tests.reference.contrastive import dense_sigmoid_loss, relative_error


def test_contenders_agree_and_are_written_down(tmp_path, capsys):
    path = tmp_path / "figures.csv"
    assert main([*QUICK, "--repeats", "1", "--csv", str(path)]) == 0
    rows = read(path)
    names = [row["contender"] for row in rows]
    assert names == ["ours, torch tiles", "open_clip's formula", "the same in 4 blocks"]
    assert all(float(row["max_relative_difference"]) < 1e-4 for row in rows)
    assert all(int(row["peak_extra_bytes"]) > 0 for row in rows)
    assert "siglip-kernel: has kernels for CUDA only" in capsys.readouterr().out


@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_formula_by_blocks_is_open_clips(blocks):
    image, text = (torch.randn(23, 6, dtype=torch.float64) for _ in range(2))
    scale, bias = torch.tensor(2.0).double(), torch.tensor(-3.0).double()
    right = dense_sigmoid_loss(image, text, scale, bias)
    # It sums blocks in fp32.
    assert relative_error(formula_by_blocks(image, text, scale, bias, blocks), right) < 1e-6


def test_bias_of_every_contender_learns():
    case = Case(batch=48, width=24, dtype="fp32", scale=10.0, device="cpu")
    for contender in find_contenders(case, 4)[0]:
        (bias,) = (
            cell.cell_contents
            for cell in contender.loss.__closure__
            if isinstance(cell.cell_contents, torch.Tensor)
        )
        bias.grad = None
        contender.inputs(case).run(contender.loss)
        assert bias.grad != 0
