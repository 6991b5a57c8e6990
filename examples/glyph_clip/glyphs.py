"""Glyph images of the fonts that matplotlib ships, paired with their Unicode names.

Legend: ``N`` glyphs, ``L`` characters of a padded name, ``H`` and ``W`` pixels.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
import PIL
from fontTools.ttLib import TTFont  # type: ignore[import-untyped]
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm  # type: ignore[import-untyped]

IMAGE_SIZE = 32
NAME_LENGTH = 80
# Unicode names contain only these characters; code 0 is padding.
ALPHABET = " -0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# An em of 24 in 32 pixels keeps ascenders, descenders and most wide symbols inside the frame at a
# common scale, so that size and height still distinguish "O" from "o" and "," from "'".
EM_PIXELS = 24
BASELINE = 24
MARGIN = 1

# Excluded: the STIXSiz files repeat some forty brackets in five sizes each.
TRAIN_FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-BoldOblique",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSansMono-BoldOblique",
    "DejaVuSansMono-Oblique",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralBolIta",
    "STIXGeneralItalic",
)
TEST_FONTS = ("DejaVuSerif",)


@dataclass(frozen=True, kw_only=True)
class GlyphTable:
    """Glyph images and their names, one pair per row."""

    images: npt.NDArray[np.uint8]  # (N, H, W), 0 is background
    codes: npt.NDArray[np.uint8]  # (N, L), from `encode_names`
    name_ids: npt.NDArray[np.int32]  # (N,), code points; equal ids are duplicates
    font_ids: npt.NDArray[np.int32]  # (N,), indices into `TRAIN_FONTS + TEST_FONTS`

    def __len__(self) -> int:
        return len(self.name_ids)

    def rows(self, keep: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> GlyphTable:
        """Select rows by a mask or by indices."""
        return GlyphTable(**{field.name: getattr(self, field.name)[keep] for field in fields(self)})

    def of_fonts(self, fonts: Sequence[str]) -> GlyphTable:
        """Select the rows of the named fonts, each (image, name) pair once.

        Symbols are often drawn once and used in every style of a family: such copies would weigh
        a name by how many font files carry it, and add nothing to learn.
        """
        known = TRAIN_FONTS + TEST_FONTS
        table = self.rows(np.isin(self.font_ids, [known.index(font) for font in fonts]))
        first: dict[tuple[int, bytes], int] = {}
        for row, (name_id, image) in enumerate(zip(table.name_ids, table.images, strict=True)):
            # By its pixels: two styles may have the same image of a character.
            first.setdefault((int(name_id), image.tobytes()), row)
        return table.rows(np.fromiter(first.values(), dtype=np.int64))


def encode_names(names: Sequence[str]) -> npt.NDArray[np.uint8]:
    """Encode names as (N, L) codes: 1 to 38 for characters of `ALPHABET`, 0 for padding."""
    codes_NL = np.zeros((len(names), NAME_LENGTH), dtype=np.uint8)
    for row, name in enumerate(names):
        codes = [ALPHABET.find(character) + 1 for character in name[:NAME_LENGTH]]
        if 0 in codes:
            raise ValueError(
                f"Passed the name {name!r}. Names may have the characters {ALPHABET!r}. Use upper "
                "case."
            )
        codes_NL[row, : len(codes)] = codes
    return codes_NL


def decode_name(codes_L: npt.NDArray[np.uint8]) -> str:
    """Decode one name."""
    return "".join(ALPHABET[code - 1] for code in codes_L if code)


def named_code_points(font: Path) -> list[int]:
    """List the letters, numbers, symbols and punctuation of a font that have a Unicode name.

    Private-use characters have none, nor have control characters; marks and separators draw
    nothing of their own.
    """
    # Lazy: only the character map of the file is read.
    with TTFont(font, lazy=True) as face:
        code_points = face.getBestCmap()
    return sorted(
        point
        for point in code_points
        if unicodedata.category(chr(point))[0] in "LNSP" and bool(unicodedata.name(chr(point), ""))
    )


def _render(font: ImageFont.FreeTypeFont, character: str) -> npt.NDArray[np.uint8]:
    """Draw one glyph, centred horizontally, on a common baseline."""
    image = Image.new("L", (IMAGE_SIZE, IMAGE_SIZE))
    left, top, right, bottom = font.getbbox(character, anchor="ls")
    room = IMAGE_SIZE - 2 * MARGIN
    shrink = min(1.0, room / max(right - left, bottom - top, 1))
    if shrink < 1.0:
        font = font.font_variant(size=font.size * shrink)
        left, top, right, bottom = font.getbbox(character, anchor="ls")
    x = (IMAGE_SIZE - (right - left)) / 2 - left
    # Tall glyphs are shifted from the common baseline just enough to fit in the frame.
    y = min(max(BASELINE, MARGIN - top), IMAGE_SIZE - MARGIN - bottom)
    ImageDraw.Draw(image).text((round(x), round(y)), character, fill=255, font=font, anchor="ls")
    return np.asarray(image)


def _render_all(progress: bool) -> GlyphTable:
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    paths = [folder / f"{name}.ttf" for name in TRAIN_FONTS + TEST_FONTS]
    work = [(font_id, path, named_code_points(path)) for font_id, path in enumerate(paths)]
    images, points, font_ids = [], [], []
    total = sum(len(code_points) for _, _, code_points in work)
    with tqdm(total=total, desc="Rendering", unit="glyph", disable=not progress) as bar:
        for font_id, path, code_points in work:
            # BASIC, because Pillow's other engine, Raqm, is not available everywhere.
            font = ImageFont.truetype(path, EM_PIXELS, layout_engine=ImageFont.Layout.BASIC)
            for point in code_points:
                image = _render(font, chr(point))
                if image.any():  # skip blank images such as the braille pattern without dots
                    images.append(image)
                    points.append(point)
                    font_ids.append(font_id)
            bar.update(len(code_points))
    return GlyphTable(
        images=np.stack(images),
        codes=encode_names([unicodedata.name(chr(point)) for point in points]),
        name_ids=np.asarray(points, dtype=np.int32),
        font_ids=np.asarray(font_ids, dtype=np.int32),
    )


def cache_glyphs(cache_dir: Path, *, progress: bool = True) -> Path:
    """Render every glyph, unless a compressed file has them; return the path of this file."""
    # The file name contains what pixels depend on: another version of matplotlib (fonts),
    # Pillow (rasteriser) or Unicode (names) renders again.
    versions = f"mpl{matplotlib.__version__}_pil{PIL.__version__}_ucd{unicodedata.unidata_version}"
    drawing = f"{IMAGE_SIZE}px_em{EM_PIXELS}_base{BASELINE}_len{NAME_LENGTH}"
    path = cache_dir / f"glyphs_{drawing}_{versions}.npz"
    if not path.exists():
        table = _render_all(progress)
        cache_dir.mkdir(parents=True, exist_ok=True)
        # Renamed when it is complete, so that an interrupted run leaves no partial file.
        partial = path.with_suffix(f".{os.getpid()}.partial.npz")
        np.savez_compressed(partial, **{f.name: getattr(table, f.name) for f in fields(table)})
        partial.replace(path)
    return path


def load_glyphs(cache_dir: Path, *, progress: bool = True) -> GlyphTable:
    """Return all glyphs as uint8, from the file of `cache_glyphs`."""
    with np.load(cache_glyphs(cache_dir, progress=progress)) as arrays:
        return GlyphTable(**{field.name: arrays[field.name] for field in fields(GlyphTable)})
