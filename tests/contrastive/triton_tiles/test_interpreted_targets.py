"""Options beside the sweeps on Triton tiles, in Triton's interpreter."""

import pytest
import torch

from lightning_mp import ContrastiveLoss
from tests.contrastive.pair_cases import CASES, LIMITED, Case, check, found
from tests.contrastive.triton_tiles.interpreter import repaired_interpreter

pytestmark = pytest.mark.interpreted
_interpreter = pytest.fixture(autouse=True)(repaired_interpreter)

# What torch's tiles alone leave out.
MASKED = (
    *("weighted_mask", "smoothed_mask", "swapped_texts"),
    *(*LIMITED, "negatives_of_absolute"),
)


@pytest.mark.parametrize("name", [name for name in CASES if name not in MASKED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_loss_equals_dense_targets(name: str, dtype: torch.dtype) -> None:
    case = Case(name, [(75, 91)], 0)
    loss_fn = ContrastiveLoss(backend="triton", tile_dtype="fp32", **case.setup)
    check(found(case, loss_fn, dtype, 20.0), case.expected(dtype, 20.0, "both"), dtype)
