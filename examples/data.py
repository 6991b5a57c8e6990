"""Real data without a download: letters in matplotlib's fonts, and the text of this repository.

Legend: `N` images or windows, `L` letters, `T` characters of a window.
"""

from pathlib import Path

import matplotlib
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "STIXGeneral",
    "STIXGeneralBol",
)


def letters(fonts: tuple[str, ...] = FONTS, shifts: int = 3) -> tuple[Tensor, Tensor]:
    """Draw every letter in every font, at `shifts` positions on each axis.

    Returns:
        Images of shape (N, 1, 16, 16) in [0, 1], and labels of shape (N,).
    """
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    images, labels = [], []
    for name in fonts:
        font = ImageFont.truetype(str(folder / f"{name}.ttf"), 13)
        for label, letter in enumerate(LETTERS):
            for place in range(shifts * shifts):
                image = Image.new("L", (16, 16))
                at = (2 + place % shifts, place // shifts)
                ImageDraw.Draw(image).text(at, letter, font=font, fill=255)
                # A bytearray, because torch warns about tensors over read-only bytes.
                images.append(torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8))
                labels.append(label)
    return torch.stack(images).reshape(-1, 1, 16, 16) / 255, torch.tensor(labels)


def text_windows(count: int, length: int = 33) -> Tensor:
    """Cut windows from this repository's README and license: ASCII codes of shape (N, T)."""
    root = Path(__file__).parents[1]
    text = "".join((root / name).read_text("utf-8") for name in ("README.md", "LICENSE"))
    # ASCII only: the embeddings have 128 rows.
    codes = torch.tensor(list(text.encode("ascii", "ignore")))
    # A separate generator, so that the seed of a run does not change the data.
    random = torch.Generator().manual_seed(0)
    starts = torch.randint(len(codes) - length, (count,), generator=random)
    return codes[starts[:, None] + torch.arange(length)]
