"""The output of the demo: recall compared with chance, memory compared with a dense loss.

Legend: ``N`` pairs, ``D`` feature width, ``b`` global batch.
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
from examples.glyph_clip.model import GlyphCLIP
from examples.glyph_clip.sampler import RowSampler
from lightning_mp.contrastive._tiles.torch_tiles import DEFAULT_WORKSPACE_BYTES
from lightning_mp.gradient_cache._served.towers import find_tower
from lightning_mp.plan.subject import PRECISIONS
from lightning_mp.plan.tower_bytes import measure_towers

DIRECTIONS = {"image_to_text": "glyph to name", "text_to_image": "name to glyph"}
TOP_K = (1, 5, 10)
MICRO_BATCH = 256  # the value of the config


@torch.no_grad()
def encode(model: GlyphCLIP, table: GlyphTable) -> tuple[Tensor, Tensor]:
    """Encode every row of a table as normalized features, ``(N, D)`` each."""
    # Without the jitter of training.
    model.eval()
    features = [model(b) for b in BatchLoader(table, RowSampler(len(table), batch_size=512))]
    image_ND, text_ND = (torch.cat(side) for side in zip(*features, strict=True))
    return image_ND, text_ND


def drawing_ceilings(table: GlyphTable) -> dict[str, float]:
    """Return the highest possible recall@k, given that some glyphs have identical images.

    Latin A, Greek Alpha and Cyrillic A have the same image in most fonts. Of ``g`` such images, k
    can have their own name among the first k; none of their names retrieves its image with
    certainty before rank g, because ties count against the model.
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
    """Describe how much of the test set also occurs in the training set."""
    new_names = len(set(test.name_ids.tolist()) - set(train.name_ids.tolist()))
    drawings = {image.tobytes() for image in train.images}
    copies = sum(image.tobytes() in drawings for image in test.images)
    return (
        f"Trained on {len(train):,} glyphs of {len(set(train.name_ids.tolist())):,} names. "
        f"Tested on {len(test):,} of another font family: {new_names} names are new, "
        f"{copies} images are identical to a training image."
    )


def recall_lines(scores: Mapping[str, float], table: GlyphTable) -> list[str]:
    """Return a table of recall, chance, and the highest possible recall."""
    ceilings = drawing_ceilings(table)
    lines = [f"{'':16}{_HEADER}"]
    for key, label in DIRECTIONS.items():
        lines.append(f"{label:16}{_recalls(scores, key)}{scores[f'{key}_median_rank']:>13.0f}")
    chance = "".join(f"{k / len(table):>11.4f}" for k in TOP_K)
    lines.append(f"{'chance':16}{chance}{(len(table) + 1) / 2:>13.0f}")
    for key, label in DIRECTIONS.items():
        values = _recalls(ceilings, key)
        lines.append(f"{'  ceiling':16}{values}   {label}: some images are identical")
    return lines


def recall_table(scores: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a table of the recall of several models, one line per direction and model."""
    width = max(map(len, scores)) + 2
    lines = [f"{'':{width + 16}}{_HEADER}"]
    for key, label in DIRECTIONS.items():
        for name, of_model in scores.items():
            median = of_model[f"{key}_median_rank"]
            lines.append(f"{label:16}{name:{width}}{_recalls(of_model, key)}{median:>13.0f}")
    return lines


_HEADER = "".join(f"{f'recall@{k}':>11}" for k in TOP_K) + f"{'median rank':>13}"


def _recalls(scores: Mapping[str, float], direction: str) -> str:
    return "".join(f"{scores[f'{direction}_recall@{k}']:>11.3f}" for k in TOP_K)


def memory_lines(
    model: GlyphCLIP, table: GlyphTable, batch_sizes: tuple[int, ...], peak_bytes: int
) -> list[str]:
    """Compare the memory of a step with a dense loss and with towers without the cache."""
    images, texts = torch.from_numpy(table.images), torch.from_numpy(table.codes)
    towers = measure_towers(
        model.train(),
        [find_tower(model, name) for name in ("visual", "text")],
        lambda pairs: model({"image": images[:pairs], "text": texts[:pairs]}),
        PRECISIONS["32-true"],
    )
    saved = [tower.saved_per_pair for tower in towers.values()]  # kept for the backward of a pair
    peaks = [tower.peak_per_row for tower in towers.values()]  # of a forward and backward
    rising = max(peak - kept for peak, kept in zip(peaks, saved, strict=True))
    fp32, workspace = 4, DEFAULT_WORKSPACE_BYTES["cpu"]
    bytes_of = {
        # One tower at a time replays one micro-batch.
        "towers, gradient cache": lambda b: max(peaks) * min(b, MICRO_BATCH),
        "towers, whole batch at once": lambda b: (sum(saved) + rising) * b,
        # The features of both towers and their gradients, and the same again inside the tiled loss.
        "loss and features, tiled": lambda b: 8 * fp32 * b * towers["visual"].width + workspace,
        # At the start of its backward, CLIP holds logits and log-softmax for both directions.
        "loss, dense b x b logits": lambda b: 4 * fp32 * b**2,
    }
    lines = [f"Peak memory of the training process in total: {_size(peak_bytes)}"]
    lines.append("Of which one step, without weights and data (computed):")
    lines.append(f"{'':34}" + "".join(f"{f'batch {size:,}':>16}" for size in batch_sizes))
    for label, of in bytes_of.items():
        lines.append(f"  {label:32}" + "".join(f"{_size(of(b)):>16}" for b in batch_sizes))
    return lines


def _size(bytes_: float) -> str:
    return f"{bytes_ / 2**30:,.1f} GiB" if bytes_ >= 2**30 else f"{bytes_ / 2**20:,.0f} MiB"


def instability_line(page: Path) -> str:
    """Return the path of the instability report and its number of alarms."""
    counts = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))["counts"]
    alarms = counts["error"] + counts["warning"]
    return f"Instability report, {alarms or 'no'} alarm{'s' * (alarms != 1)}: {page}"
