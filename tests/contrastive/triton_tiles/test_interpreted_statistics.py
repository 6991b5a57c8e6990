"""`LossStatistics` on Triton tiles, in Triton's interpreter, against all pairs in float64."""

import pytest
import torch
from torch.nn.functional import normalize

from lightning_mp.contrastive._tiles.tile_backend import Logits, Vectors
from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles
from tests.contrastive.test_candidates import data
from tests.contrastive.test_statistics import BIAS, LOSSES, check

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore:Passed .*negative scale")]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("dtype", "tile_dtype"),
    [(torch.bfloat16, "auto"), (torch.float32, "auto"), (torch.float32, "bf16")],
    ids=str,
)
def test_statistics_equal_float64(name: str, dtype: torch.dtype, tile_dtype: str) -> None:
    image, text, scale = data(130, 210, 72, 0, dtype)
    loss_fn = LOSSES[name](backend="triton", tile_dtype=tile_dtype)
    loss, found = loss_fn(image, text, scale, BIAS, statistics=True)
    relative, absolute = TritonTiles(tile_dtype=tile_dtype).rounding(72, dtype)
    check(found, name, image, text, 20.0, slack=20 * relative + absolute)
    assert torch.equal(loss, loss_fn(image, text, scale, BIAS))


@pytest.mark.parametrize("scale", [1.0, 3e3])
@pytest.mark.parametrize("workspace_bytes", [None, 1])
def test_maxima_of_plain_and_recomputed_tiles(scale: float, workspace_bytes: int | None) -> None:
    """At a scale of 3,000, nearly every tile has a row too far from the reference."""
    rows, columns = (normalize(torch.randn(count, 40), dim=1) for count in (150, 270))
    logits = scale * rows.double() @ columns.double().T
    logits.diagonal(3).fill_(-torch.inf)
    start = Vectors(
        torch.full((150,), -torch.inf).double(), torch.full((270,), 0.5 * scale).double()
    )
    maxima = Vectors(*(x.clone() for x in start))
    lses = Vectors(*(torch.full_like(x, -torch.inf) for x in start))
    tiles = TritonTiles(workspace_bytes)
    swept = Logits(rows, columns, torch.tensor(scale), 3, maxima=maxima)
    tiles.lse_sweep(swept, lses)
    relative, absolute = tiles.rounding(40, torch.float32)
    for found, begun, dim in zip(maxima, start, (1, 0), strict=True):
        expected = torch.maximum(begun, logits.amax(dim))
        assert (found - expected).abs().amax() <= relative * scale + absolute


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 100.0, -30.0])
def test_collapsed_model_has_accuracy_zero(name: str, dtype: torch.dtype, scale: float) -> None:
    feature = normalize(torch.randn(1, 70), dim=1).to(dtype).expand(90, -1)
    _, found = LOSSES[name](backend="triton")(feature, feature, scale, statistics=True)
    assert found[:2] == (0, 0)


@pytest.mark.parametrize("name", LOSSES)
def test_nan_is_not_a_hit(name: str) -> None:
    features = torch.eye(8)
    texts = features.clone()
    texts[5, 0] = torch.nan
    loss_fn = LOSSES[name](backend="triton")
    assert loss_fn(features, features, 10.0, statistics=True)[1][:2] == (1, 1)
    assert loss_fn(features, texts, 10.0, statistics=True)[1].image_to_text_top1 == 0
