"""Masking of similarities above a threshold, on Triton tiles."""

import itertools

import pytest
import torch
from torch import Tensor

from lightning_mp import ContrastiveLoss
from lightning_mp.contrastive._tiles.masks import Ids, Thresholds
from lightning_mp.contrastive._tiles.tile_backend import Derivatives, Logits, Vectors
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles
from tests.contrastive.triton_tiles.interpreter import (
    GRADIENT_ERROR,
    LSE_ERROR,
    Shard,
    gradient_error,
    make_shard,
)

pytestmark = pytest.mark.interpreted


def thresholds_between(similarities: Tensor) -> Tensor:
    """Return thresholds that mask 5 to 60 values of each row.

    Each threshold is in the middle of the widest gap, which is wider than any rounding error. The
    first three rows are masked completely, the last three not at all.
    """
    sorted_ = similarities.sort(1, descending=True).values[:, 5:61]
    gaps = sorted_[:, :-1] - sorted_[:, 1:]
    place = gaps.argmax(1, keepdim=True)
    thresholds = (sorted_ - torch.nn.functional.pad(gaps, (0, 1)) / 2).gather(1, place)[:, 0]
    thresholds[:3], thresholds[-3:] = -torch.inf, torch.inf
    return thresholds


Guides = tuple[torch.dtype, int] | None
"""Dtype and width of the guides; `None` compares the similarities of the features."""


class Thresholded:
    """A shard with thresholds, and the pairs that rows and columns keep; with ids if guided."""

    def __init__(self, dtype: torch.dtype, scale: float, guides: Guides) -> None:
        self.shard: Shard = make_shard(141, 157, 40, dtype, scale, 20)
        judges = [self.shard.rows, self.shard.columns]
        if guides is not None:
            # Not of unit length, which guides need not have.
            judges = [3 * torch.randn(len(x), guides[1]).to(guides[0]) for x in judges]
        similarities = judges[0].double() @ judges[1].double().T
        self.thresholds = Thresholds(
            thresholds_between(similarities),
            thresholds_between(similarities.T),
            (judges[0], judges[1]) if guides else None,
        )
        self.ids = None if guides is None else Ids(*(torch.arange(len(x)) % 40 for x in judges))
        differ = torch.ones(len(judges[0]), len(judges[1]), dtype=torch.bool)
        if self.ids is not None:
            differ = self.ids.rows_b[:, None] != self.ids.columns_m
        self.kept_by_row = differ & (similarities <= self.thresholds.rows_b[:, None])
        self.kept_by_column = differ & (similarities <= self.thresholds.columns_m)

    @property
    def swept(self) -> Logits:
        """The argument of the sweeps."""
        return self.shard.swept._replace(thresholds=self.thresholds, ids=self.ids)


# At a scale of 5,000, each tile has rows outside the range of one reference.
HALF, WIDE = (torch.bfloat16, 7), (torch.float32, 72)
GATE = [
    (torch.bfloat16, 100.0, None),
    (torch.float16, -100.0, None),
    (torch.float32, 5000.0, None),
    (torch.bfloat16, 5000.0, WIDE),
    (torch.float16, -100.0, WIDE),
    (torch.float32, 100.0, HALF),
]
CASES = pytest.mark.parametrize(
    ("dtype", "scale", "guides"),
    [
        pytest.param(*case, marks=() if case in GATE else pytest.mark.sweep)
        for case in itertools.product(GRADIENT_ERROR, (100.0, -100.0, 5000.0), (None, HALF, WIDE))
    ],
    ids=str,
)
ARCH = {HALF: 90, WIDE: 80}  # operands by the copy engine, or by pointers


@CASES
def test_log_sum_exps_exclude_masked_pairs(
    dtype: torch.dtype, scale: float, guides: Guides
) -> None:
    case = Thresholded(dtype, scale, guides)
    shard, lses = case.shard, Vectors(*(lse.clone() for lse in case.shard.start))
    tiles = TritonTiles(workspace_bytes=2**19, arch=ARCH.get(guides, 80))
    tiles.lse_sweep(case.swept, lses)
    for dim, kept in ((1, case.kept_by_row), (0, case.kept_by_column)):
        start = shard.start[1 - dim]
        right = torch.logaddexp(start, shard.negatives.where(kept, -torch.inf).logsumexp(dim))
        errors = (lses[1 - dim] - right).where(lses[1 - dim] != right, 0.0).abs()
        assert errors.amax() < LSE_ERROR * abs(scale) / 100


@CASES
def test_gradients_exclude_masked_pairs(dtype: torch.dtype, scale: float, guides: Guides) -> None:
    case = Thresholded(dtype, scale, guides)
    shard = case.shard
    kept = [
        shard.logits.where(kept & ~shard.positives, -torch.inf)
        for kept in (case.kept_by_row, case.kept_by_column)
    ]
    # Log-sum-exps of the kept pairs plus 0.5 for positives; masked logits may exceed them.
    row_lse, column_lse = (
        x.logsumexp(dim).nan_to_num(neginf=0.0) + 0.5 for x, dim in zip(kept, (1, 0), strict=True)
    )
    gradients = Derivatives(torch.zeros(shard.rows.shape), torch.zeros(shard.columns.shape))
    tiles = TritonTiles(workspace_bytes=2**19, arch=ARCH.get(guides, 80))
    tiles.grad_sweep(case.swept, Vectors(row_lse, column_lse), gradients)
    softmax = (kept[0] - row_lse[:, None]).exp() + (kept[1] - column_lse).exp()
    # Logits of `scale` are rounded three times to fp32, the relative error of their exponentials.
    bound = GRADIENT_ERROR[dtype] + abs(scale) * 3 * 2.0**-24
    assert gradient_error(gradients[0], softmax, shard.columns) < bound
    assert gradient_error(gradients[1], softmax.T, shard.rows) < bound


@pytest.mark.filterwarnings("ignore:Passed .*negative scale")
@pytest.mark.parametrize("scale", [5.0, -5.0])
def test_nan_is_not_a_false_negative(scale: float) -> None:
    image, text = torch.randn(8, 16), torch.randn(10, 16)
    text[9] = torch.nan
    loss_fn = ContrastiveLoss(false_negatives="absolute", backend="triton")
    assert loss_fn(image, text, scale).isnan()
