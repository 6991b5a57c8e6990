"""A small image task: digits and capitals in matplotlib's fonts, shifted and rotated.

Shapes:
    N: images. s: edge in pixels.
"""

import functools
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["CHARACTERS", "draw"]

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_FONTS = (
    *(f"DejaVu{kind}{style}" for kind in ("Sans", "SansMono", "Serif") for style in ("", "-Bold")),
    *("DejaVuSans-Oblique", "DejaVuSansMono-Oblique", "DejaVuSerif-Italic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "cmr10", "cmss10", "cmtt10", "cmb10"),
)
_DRAWN = 64  # edge in pixels of a drawing, before it is shifted and scaled down


def draw(count: int, edge: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return images and labels; the drawings do not depend on the edge.

    Returns:
        Images (N, 1, s, s) of about zero mean and unit variance, and labels (N,) below 36.
    """
    random = torch.Generator().manual_seed(seed)
    drawn = _drawn()
    label_N = torch.randint(len(CHARACTERS), (count,), generator=random)
    font_N = torch.randint(len(_FONTS), (count,), generator=random)
    amount_N4 = torch.rand(count, 4, generator=random) * 2 - 1
    angle_N = amount_N4[:, 0] * math.radians(10)
    cos_N, sin_N = angle_N.cos() * (1.1 + 0.15 * amount_N4[:, 1]), angle_N.sin()
    map_N23 = torch.stack([cos_N, -sin_N, amount_N4[:, 2] * 0.1], 1).unsqueeze(1)
    below_N23 = torch.stack([sin_N, cos_N, amount_N4[:, 3] * 0.1], 1).unsqueeze(1)
    grid = F.affine_grid(
        torch.cat([map_N23, below_N23], 1), [count, 1, edge, edge], align_corners=False
    )
    images = F.grid_sample(drawn[font_N, label_N].unsqueeze(1), grid, align_corners=False)
    return (images - 0.15) / 0.3, label_N


@functools.cache
def _drawn() -> Tensor:
    """Return every character in every font, of shape (fonts, characters, 64, 64), in [0, 1]."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    pictures = []
    for name in _FONTS:
        # Smaller than the frame, so that shifted and rotated characters stay inside.
        font = ImageFont.truetype(str(folder / f"{name}.ttf"), int(0.7 * _DRAWN))
        for character in CHARACTERS:
            picture = Image.new("L", (_DRAWN, _DRAWN))
            middle = (_DRAWN / 2, _DRAWN / 2)
            ImageDraw.Draw(picture).text(middle, character, 255, font, anchor="mm")
            # A bytearray, because torch warns of tensors over read-only memory.
            pictures.append(torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8))
    shape = len(_FONTS), len(CHARACTERS), _DRAWN, _DRAWN
    return torch.stack(pictures).view(shape).float() / 255
