"""Formulas equal numbers computed by hand and bound the allocations of a step."""

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import ContrastiveLoss
from lightning_mp.contrastive._tiles.torch_tiles import DEFAULT_WORKSPACE_BYTES
from lightning_mp.plan import formulas
from lightning_mp.plan.estimate import Memory
from lightning_mp.plan.formulas import DENSE, GIB, INF_CL, LOCAL, OURS, loss_bytes
from papers.allocation import peak_allocated
from papers.inf_cl.printed import loss_gib
from tests.processes import exit_code_of


def test_bytes_of_losses_equal_their_counts_of_fp32_values() -> None:
    # b = 1024, D = 256: a matrix has 2^20 values, the features of one tower have 2^18.
    dense, local = (loss_bytes(name, 1024, 4, 256) for name in (DENSE, LOCAL))
    assert dense == pytest.approx(4 * (4.096 * 2**20 + 3.04 * 2**18))
    assert local == pytest.approx(4 * (4.095 * 2**18 + (2 + 2.8 / 4) * 2**18))
    assert loss_bytes(INF_CL, 1024, 4, 256) == pytest.approx(4 * 15.4 * 2**16)
    assert loss_bytes(INF_CL, 2**20, 8, 256) == pytest.approx(4 * 17.41 * 2**25)
    # Four matrices of 256 x 256 on each of four ranks, and the copies for tiles.
    ring = loss_gib("cross-GPU", 1024, 4, 256) * GIB
    assert ring == pytest.approx(4 * (4 * 2**16 + 15.4 * 2**16))


def test_bytes_of_our_loss_are_eight_copies_vectors_and_a_workspace() -> None:
    expected = 8 * 4 * 2**21 + 16 * 8 * 4096 + 2**20
    assert loss_bytes(OURS, 16_384, 4, 512, 2**20) == expected


def test_peak_takes_the_larger_of_loss_and_backbone() -> None:
    for loss, peak in ((8.0, 23.0), (32.0, 39.0)):
        need = Memory(static=4.0, data=1.0, features=2.0, loss=loss, backbone=16.0, host=0.0)
        assert need.peak == peak


@pytest.mark.parametrize("limit", [0, 7, 8, 9, 1000, 12345])
def test_largest_batch_is_the_last_that_fits(limit: int) -> None:
    found = formulas.largest_batch(lambda batch: batch**2, float(limit**2), 8)
    assert found == limit // 8 * 8


def test_hours_of_an_epoch_follow_from_counts() -> None:
    assert formulas.epoch_hours(3_600_000, 1000, 2.0) == 2.0


@pytest.mark.slow
def test_our_loss_on_one_rank_allocates_at_most_the_formula() -> None:
    def step() -> None:
        loss: Tensor = ContrastiveLoss(workspace_bytes=workspace)(image, text, scale)
        loss.backward()

    batch, width, workspace = 1024, 256, 2**20
    image, text = (F.normalize(torch.randn(batch, width)).requires_grad_() for _ in range(2))
    scale = torch.tensor(14.0, requires_grad=True)
    predicted = loss_bytes(OURS, batch, 1, width, workspace)
    # At least the gradients of both towers; otherwise nothing was measured.
    assert 2 * 4 * batch * width <= peak_allocated(step) <= predicted


def test_our_loss_of_many_pairs_takes_far_less_than_a_dense_loss() -> None:
    ours = loss_bytes(OURS, 2**20, 8, 768, DEFAULT_WORKSPACE_BYTES["cuda"])
    assert ours < 4 * GIB < 1000 * GIB < loss_bytes(DENSE, 2**20, 8, 768)


def _peak_of_a_matrix(errors: Path) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    assert peak_allocated(lambda: torch.zeros(256, 256)) == 4 * 2**16


def test_measuring_memory_prints_nothing(tmp_path: Path) -> None:
    assert exit_code_of(_peak_of_a_matrix, tmp_path / "errors") == 0
    assert (tmp_path / "errors").read_text() == ""
