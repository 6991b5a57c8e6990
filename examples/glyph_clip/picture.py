"""Draws retrieved glyphs and names.

Legend: ``N`` pairs, ``Q`` queries.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

import matplotlib

matplotlib.use("Agg")  # writes files only and needs no display

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from examples.glyph_clip.glyphs import GlyphTable, decode_name

TOP_GLYPHS = 5
TOP_NAMES = 3
QUERIES = 12
RIGHT, WRONG, INK, MUTED = "#1a7f37", "#c9ced6", "#1f2328", "#6e7781"


def _tile(axes: Axes, image: npt.NDArray[np.uint8], x: float, y: float, color: str) -> None:
    """Draw a framed glyph with its corner at (x, y), in units of a row's height."""
    size, width = 0.86, 2.6 if color == RIGHT else 1.0
    shown = {"cmap": "gray", "vmin": 0, "vmax": 255, "interpolation": "lanczos"}
    axes.imshow(255 - image, extent=(x, x + size, y + size, y), **shown)
    axes.add_patch(Rectangle((x, y), size, size, fill=False, edgecolor=color, linewidth=width))


def _panel(axes: Axes, title: str, columns: float) -> None:
    axes.set_xlim(0, columns)
    # The y axis points down.
    axes.set_ylim(QUERIES, -0.1)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title(title, loc="left", fontsize=13, color=INK, fontweight="bold", pad=10)


def _best(scores_N: Tensor, answer: int, top: int) -> tuple[list[int], str]:
    """Return the first retrieved rows, and the rank of the positive if it is not among them."""
    found: list[int] = scores_N.topk(top).indices.tolist()
    rank = 1 + int((scores_N > scores_N[answer]).sum())
    return found, "" if answer in found else f"correct: rank {rank}"


def _names_to_glyphs(axes: Axes, table: GlyphTable, queries: list[int], scores_NN: Tensor) -> None:
    for row, query in enumerate(queries):
        name = "\n".join(wrap(decode_name(table.codes[query]), 34))
        axes.text(4.9, row + 0.43, name, ha="right", va="center", fontsize=8.5, color=INK)
        found, missed = _best(scores_NN[:, query], query, TOP_GLYPHS)
        for place, answer in enumerate(found):
            color = RIGHT if answer == query else WRONG
            _tile(axes, table.images[answer], 5.15 + place, row, color)
        axes.text(10.25, row + 0.43, missed, va="center", fontsize=8, color=MUTED)


def _glyphs_to_names(axes: Axes, table: GlyphTable, queries: list[int], scores_NN: Tensor) -> None:
    for row, query in enumerate(queries):
        _tile(axes, table.images[query], 0.05, row, INK)
        found, missed = _best(scores_NN[query], query, TOP_NAMES)
        for place, answer in enumerate(found):
            name = decode_name(table.codes[answer])
            name = name if len(name) <= 46 else name[:45] + "\N{HORIZONTAL ELLIPSIS}"
            is_right = answer == query
            style = {"color": RIGHT, "fontweight": "bold"} if is_right else {"color": MUTED}
            axes.text(1.15, row + 0.14 + 0.29 * place, name, va="center", fontsize=8.5, **style)
        axes.text(7.4, row + 0.43, missed, va="center", fontsize=8, color=MUTED)


def draw_retrieval(path: Path, table: GlyphTable, image_ND: Tensor, text_ND: Tensor) -> None:
    """Save a picture: names with their top five glyphs, glyphs with their top names.

    The queries are a random sample, so failures appear as often as they occur.
    """
    queries = np.random.default_rng(0).choice(len(table), 2 * QUERIES, replace=False).tolist()
    scores_NN = torch.as_tensor(image_ND @ text_ND.T)
    panels = {"width_ratios": [11.6, 8.8], "wspace": 0.03}
    figure, (left, right) = plt.subplots(1, 2, figsize=(16, 9.6), gridspec_kw=panels)
    _panel(left, f"Name, and the first {TOP_GLYPHS} glyphs found", 11.6)
    _panel(right, f"Glyph, and the first {TOP_NAMES} names found", 8.8)
    _names_to_glyphs(left, table, queries[:QUERIES], scores_NN)
    _glyphs_to_names(right, table, queries[QUERIES:], scores_NN)
    said = f"DejaVu Serif, a family never seen in training; {len(table):,} candidates; "
    said += "queries drawn at random; green is right"
    figure.text(0.13, 0.075, said, ha="left", fontsize=10, color=MUTED)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, facecolor="white", bbox_inches="tight")
    # pyplot keeps figures until they are closed.
    plt.close(figure)
