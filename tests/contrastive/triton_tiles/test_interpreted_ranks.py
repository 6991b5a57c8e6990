"""The loss of two ranks on Triton tiles, with and without stored products.

Shapes:
    b: a rank's images. n: its texts.
"""

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mp import ContrastiveLoss
from lightning_mp.contrastive._tiles.tile_backend import StoredTiles
from tests.contrastive.test_candidates import data, ranking_loss
from tests.contrastive.triton_tiles.interpreter import GRADIENT_ERROR, repaired_interpreter
from tests.processes import run_ranks
from tests.reference.contrastive import relative_error

pytestmark = [pytest.mark.interpreted(repaired=False), pytest.mark.distributed]

SIZES = [(13, 13), (7, 20)]
WIDTH, FP32 = 24, torch.float32
ROOM = {"all": None, "nothing": 2**20}  # by the bytes of the workspace
CASES = list(itertools.product(("slices", "ring"), ROOM))


def _step(rank: int, exchange: Any, keeps: str) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Return loss and gradients of a rank, and for each visit its rows and its stored rows."""
    visits = []
    take_rows = StoredTiles.take_rows

    def noted(self: StoredTiles, rows: int, width: int) -> Tensor:
        taken = take_rows(self, rows, width)
        visits.append((rows, len(taken)))
        return taken

    leaves = data(*SIZES[rank], WIDTH, rank, FP32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredTiles, "take_rows", noted)
        options: Any = {"exchange": exchange, "workspace_bytes": ROOM[keeps]}
        loss = ContrastiveLoss(backend="triton", **options)(*leaves)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)], visits


def _steps(rank: int) -> list[Any]:
    with contextlib.contextmanager(repaired_interpreter)():
        return [_step(rank, *case) for case in CASES]


def test_loss_on_two_ranks_with_and_without_stored_products_equals_float64() -> None:
    by_rank = run_ranks(_steps, 2)
    ranks = [data(*size, WIDTH, rank, torch.float64)[:2] for rank, size in enumerate(SIZES)]
    image, text = (torch.cat(one) for one in zip(*ranks, strict=True))
    scale = torch.tensor(20.0, dtype=torch.float64, requires_grad=True)
    own = torch.cat([torch.arange(13), 13 + torch.arange(7)])
    right = ranking_loss(image, text, scale, "both", own)
    d_scale, *gradients = torch.autograd.grad(right, [scale, *itertools.chain(*ranks)])
    for (rank, results), place in itertools.product(enumerate(by_rank), range(len(CASES))):
        exchange, keeps = CASES[place]
        (loss, d_image, d_text, own_d_scale), visits = results[place]
        # Each of the two sweeps visits all texts at once, or the texts of one rank at a time.
        b = SIZES[rank][0]
        assert visits == [(b, b if keeps == "all" else 0)] * (2 if exchange == "slices" else 4)
        # The mean over ranks, as in DDP, equals the gradients of one process.
        expected = [right.detach(), *(2 * x for x in gradients[2 * rank :][:2]), d_scale]
        for value, other in zip((loss, d_image, d_text, own_d_scale), expected, strict=True):
            assert relative_error(value, other) < GRADIENT_ERROR[FP32], (exchange, keeps, rank)
