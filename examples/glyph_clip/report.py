"""Recall against chance, and memory against the dense way, as text.

Legend: ``N`` pairs, ``D`` feature width.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from examples.glyph_clip.data import BatchLoader
from examples.glyph_clip.glyphs import GlyphTable
from examples.glyph_clip.memory import MemoryEstimate
from examples.glyph_clip.model import GlyphCLIP
from examples.glyph_clip.sampler import RowSampler

__all__ = [
    "drawing_ceilings",
    "encode",
    "instability_line",
    "memory_lines",
    "novelty_line",
    "recall_lines",
    "recall_table",
]

DIRECTIONS = {"image_to_text": "glyph to name", "text_to_image": "name to glyph"}
TOP_K = (1, 5, 10)


@torch.no_grad()
def encode(model: GlyphCLIP, table: GlyphTable) -> tuple[Tensor, Tensor]:
    """Encode every row of a table into unit vectors, ``(N, D)`` each."""
    model.eval()
    features = [model(b) for b in BatchLoader(table, RowSampler(len(table), batch_size=512))]
    image_ND, text_ND = (torch.cat(side) for side in zip(*features, strict=True))
    return image_ND, text_ND


def drawing_ceilings(table: GlyphTable) -> dict[str, float]:
    """Best possible recall@k, given that some glyphs are drawn exactly alike.

    Latin A, Greek Alpha and Cyrillic A are one drawing in most fonts. Of ``g`` such images k can
    have their own name among the first k; of their names none finds its image for sure before
    rank g, as ties count against the model.
    """
    keys = [image.tobytes() for image in table.images]
    alike = Counter(keys)
    sizes = np.array([alike[key] for key in keys])
    ceilings = {}
    for k in TOP_K:
        ceilings[f"image_to_text_recall@{k}"] = float(np.minimum(1, k / sizes).mean())
        ceilings[f"text_to_image_recall@{k}"] = float((sizes <= k).mean())
    return ceilings


def novelty_line(train: GlyphTable, test: GlyphTable) -> str:
    """Say how much of the test set is known from training."""
    new_names = len(set(test.name_ids.tolist()) - set(train.name_ids.tolist()))
    drawings = {image.tobytes() for image in train.images}
    copies = sum(image.tobytes() in drawings for image in test.images)
    return (
        f"Trained on {len(train):,} glyphs of {len(set(train.name_ids.tolist())):,} names. "
        f"Tested on {len(test):,} of a family not trained on: {new_names} names are new, "
        f"{copies} drawings are pixel for pixel in the training set."
    )


def recall_lines(scores: Mapping[str, float], table: GlyphTable) -> list[str]:
    """Set recall beside chance and beside what the drawings allow."""
    ceilings = drawing_ceilings(table)
    lines = [f"{'':16}" + "".join(f"{f'recall@{k}':>11}" for k in TOP_K) + f"{'median rank':>13}"]
    for key, label in DIRECTIONS.items():
        values = "".join(f"{scores[f'{key}_recall@{k}']:>11.3f}" for k in TOP_K)
        lines.append(f"{label:16}{values}{scores[f'{key}_median_rank']:>13.0f}")
    chance = "".join(f"{k / len(table):>11.4f}" for k in TOP_K)
    lines.append(f"{'chance':16}{chance}{(len(table) + 1) / 2:>13.0f}")
    for key, label in DIRECTIONS.items():
        values = "".join(f"{ceilings[f'{key}_recall@{k}']:>11.3f}" for k in TOP_K)
        lines.append(f"{'  ceiling':16}{values}   {label}: some drawings are alike")
    return lines


def recall_table(scores: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Set the recall of several models side by side, a line for each and each direction."""
    width = max(map(len, scores)) + 2
    header = "".join(f"{f'recall@{k}':>11}" for k in TOP_K)
    lines = [f"{'':{width + 16}}{header}{'median rank':>13}"]
    for key, label in DIRECTIONS.items():
        for name, of_model in scores.items():
            values = "".join(f"{of_model[f'{key}_recall@{k}']:>11.3f}" for k in TOP_K)
            median = of_model[f"{key}_median_rank"]
            lines.append(f"{label:16}{name:{width}}{values}{median:>13.0f}")
    return lines


def _size(size_bytes: float) -> str:
    return (
        f"{size_bytes / 2**30:,.1f} GiB"
        if size_bytes >= 2**30
        else f"{size_bytes / 2**20:,.0f} MiB"
    )


def memory_lines(
    estimate: MemoryEstimate, batch_sizes: tuple[int, ...], peak_bytes: int
) -> list[str]:
    """Set the memory of a step beside that of the dense loss and of towers without the cache."""
    lines = [f"Peak memory of the training process, all included: {_size(peak_bytes)}"]
    lines.append("Of it for one step, beside weights and data (computed):")
    lines.append(f"{'':34}" + "".join(f"{f'batch {size:,}':>16}" for size in batch_sizes))
    for label, of_batch in (
        ("towers, gradient cache", estimate.cached_towers),
        ("towers, whole batch at once", estimate.uncached_towers),
        ("loss and features, tiled", estimate.tiled_loss),
        ("loss, dense b x b logits", estimate.dense_loss),
    ):
        lines.append(f"  {label:32}" + "".join(f"{_size(of_batch(b)):>16}" for b in batch_sizes))
    return lines


def instability_line(page: Path) -> str:
    """Say where the monitors' report of the training is, and how many alarms are in it."""
    counts = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))["counts"]
    alarms = counts["error"] + counts["warning"]
    return f"Report of the monitors, {alarms or 'no'} alarm{'s' * (alarms != 1)}: {page}"
