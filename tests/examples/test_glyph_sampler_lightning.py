"""The batches of two ranks under Lightning's handling of samplers."""

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from examples.glyph_clip.data import GlyphData
from examples.glyph_clip.glyphs import GlyphTable, encode_names
from examples.glyph_clip.sampler import TwinFreeSampler
from tests.processes import run_ranks
from tests.quiet import QUIET

NAMES, ROWS_OF_A_NAME, BATCH = 40, 4, 32


def table() -> GlyphTable:
    name_ids = np.repeat(np.arange(NAMES, dtype=np.int32), ROWS_OF_A_NAME)
    return GlyphTable(
        images=np.zeros((len(name_ids), 32, 32), dtype=np.uint8),
        codes=encode_names(["DIGIT ONE"] * len(name_ids)),
        name_ids=name_ids,
        font_ids=np.zeros_like(name_ids),
    )


class Rows:
    """A data set of the name ids of rows."""

    def __getitem__(self, rows: Tensor) -> dict[str, Tensor]:
        return {"name_id": torch.from_numpy(table().name_ids)[rows]}

    def __len__(self) -> int:
        return NAMES * ROWS_OF_A_NAME


class WithDataLoader(GlyphData):
    def train_dataloader(self) -> DataLoader:
        sampler: TwinFreeSampler = super().train_dataloader().sampler
        return DataLoader(Rows(), sampler=sampler, batch_size=None)


class Recorder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        self.seen.append(batch["name_id"].tolist())
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(rank: int, data_class: type[GlyphData]) -> list[list[int]]:
    data = data_class(batch_size=BATCH, progress=False)
    data.tables = {"train": table()}
    data.prepare_data = lambda: None
    module = Recorder()
    options = QUIET | {"devices": 2, "max_epochs": 3}
    trainer = lightning.Trainer(**options, strategy=DDPStrategy(process_group_backend="gloo"))
    trainer.fit(module, datamodule=data)
    return module.seen


@pytest.mark.distributed
@pytest.mark.parametrize("data_class", [GlyphData, WithDataLoader])
def test_trainer_on_two_ranks_keeps_twins_apart_and_serves_all(data_class):
    first, second = run_ranks(fit, 2, data_class)
    steps = NAMES * ROWS_OF_A_NAME // BATCH
    assert len(first) == len(second) == 3 * steps
    batches = [a + b for a, b in zip(first, second, strict=True)]
    assert all(len(set(batch)) == len(batch) >= BATCH for batch in batches)
    for epoch in range(3):
        names = sorted(sum(batches[epoch * steps : (epoch + 1) * steps], []))
        assert names == sorted(table().name_ids.tolist())
    assert batches[:steps] != batches[steps : 2 * steps] != batches[2 * steps :]
