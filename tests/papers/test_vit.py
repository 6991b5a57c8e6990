"""The Vision Transformer of the ladder gives equal results in all layouts, at the usual sizes."""

import pytest
import torch

from papers._vit import LAYOUTS, POOLS, SIZES, ViT


@pytest.mark.parametrize("pool", POOLS)
def test_layouts_compute_the_same_function(pool):
    torch.manual_seed(0)
    batch_first, batch_second = (
        ViT(SIZES["tiny"], image=32, classes=10, pool=pool, layout=layout) for layout in LAYOUTS
    )
    for parameter in batch_first.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # zeros would hide a mistake
    batch_second.load_state_dict(batch_first.state_dict())
    images = torch.randn(3, 3, 32, 32)
    expected, found = batch_first(images), batch_second(images)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # Images do not affect each other in any layout.
    torch.testing.assert_close(batch_second(images[1:2]), expected[1:2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "millions"), [("S16", 22), ("B16", 86), ("L16", 304), ("H14", 632)]
)
def test_sizes_have_the_usual_number_of_parameters(size, millions):
    with torch.device("meta"):
        model = ViT(SIZES[size], image=224, classes=1000)
    assert abs(sum(p.numel() for p in model.parameters()) / 1e6 - millions) < 1


def test_image_that_patches_do_not_tile_is_refused():
    with pytest.raises(ValueError, match="Patches must tile the image. Pass 32 pixels."):
        ViT(SIZES["S16"], image=33, classes=10)
