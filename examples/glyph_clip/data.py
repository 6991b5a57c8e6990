"""The glyph pairs as a LightningDataModule.

Legend: ``b`` rows of a rank's batch, ``H`` and ``W`` pixels, ``L`` characters of a padded name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from examples.glyph_clip.glyphs import (
    TEST_FONTS,
    TRAIN_FONTS,
    GlyphTable,
    cache_glyphs,
    load_glyphs,
)
from examples.glyph_clip.sampler import RowSampler, TwinFreeSampler

Batch = dict[str, Tensor]


class BatchLoader:
    """Returns batches of a table in memory.

    The 33,000 glyphs are a uint8 tensor of 32 MiB, and a batch is one indexing operation, for which
    worker processes would cost more than they save.

    Shapes:
        Yields image ``(b, H, W)`` uint8, text ``(b, L)`` uint8 and name_id ``(b,)`` int32.
    """

    batch_sampler: None = None  # required by Lightning; the sampler itself returns batches

    def __init__(self, table: GlyphTable, sampler: RowSampler | TwinFreeSampler) -> None:
        self.sampler = sampler  # Lightning calls its `set_epoch`
        self._columns = {
            "image": torch.from_numpy(table.images),
            "text": torch.from_numpy(table.codes),
            "name_id": torch.from_numpy(table.name_ids),
        }

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        for rows in self.sampler:
            yield {name: column[rows] for name, column in self._columns.items()}


class GlyphData(LightningDataModule):
    """Pairs of glyphs and Unicode names: trains on sans and STIX fonts, tests on a serif font.

    Args:
        batch_size: Smallest number of pairs in a global batch, over all ranks.
        eval_batch_size: Pairs of a rank's batch in validation and test.
        validation_fonts: Training fonts that are held out for validation. If empty, all are trained
            on and validation is skipped.
        seed: Seed of the order of the batches.
        cache_dir: Folder of the rendered glyphs; `None` means `cache` beside this file.
        progress: Whether to show a progress bar while rendering.

    Raises:
        ValueError: If `validation_fonts` names a font that is not a training font.
    """

    def __init__(
        self,
        *,
        batch_size: int = 2048,
        eval_batch_size: int = 512,
        validation_fonts: Sequence[str] = (),
        seed: int = 0,
        cache_dir: str | None = None,
        progress: bool = True,
    ) -> None:
        super().__init__()
        unknown = sorted(set(validation_fonts) - set(TRAIN_FONTS))
        if unknown:
            raise ValueError(
                f"Passed `GlyphData(validation_fonts={list(validation_fonts)!r})`. {unknown!r} are "
                f"not training fonts. Choose among {TRAIN_FONTS!r}."
            )
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.validation_fonts = tuple(validation_fonts)
        self.seed = seed
        self.cache_dir = Path(cache_dir) if cache_dir else Path(__file__).parent / "cache"
        self.progress = progress
        self.tables: dict[str, GlyphTable] = {}

    def prepare_data(self) -> None:
        """Render the glyphs, once per node and only if they are not cached."""
        cache_glyphs(self.cache_dir, progress=self.progress)

    def setup(self, stage: str = "fit") -> None:
        # Lightning calls this for `fit` and again for `test`.
        if self.tables:
            return
        glyphs = load_glyphs(self.cache_dir, progress=False)
        train_fonts = [font for font in TRAIN_FONTS if font not in self.validation_fonts]
        self.tables = {
            "train": glyphs.of_fonts(train_fonts),
            "validation": glyphs.of_fonts(self.validation_fonts),
            "test": glyphs.of_fonts(TEST_FONTS),
        }

    def train_dataloader(self) -> BatchLoader:
        """Return global batches in which no name occurs twice."""
        table, options = self.tables["train"], {"batch_size": self.batch_size, "seed": self.seed}
        return BatchLoader(table, TwinFreeSampler(table.name_ids, **options, **self._ranks()))

    def val_dataloader(self) -> list[BatchLoader]:
        # Lightning skips validation if the list is empty.
        return [self._eval_loader("validation")] if self.validation_fonts else []

    def test_dataloader(self) -> BatchLoader:
        return self._eval_loader("test")

    def _eval_loader(self, split: str) -> BatchLoader:
        table, size = self.tables[split], self.eval_batch_size
        return BatchLoader(table, RowSampler(len(table), batch_size=size, **self._ranks()))

    def _ranks(self) -> dict[str, int]:
        # Without a Trainer, as in the report of the demo, there is one rank.
        if self.trainer is None:
            return {}
        return {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank}
