"""`ContrastiveRecall` logged by a LightningModule."""

import lightning
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp.metrics import ContrastiveRecall


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.tower = torch.nn.Linear(4, 4)
        self.recall = ContrastiveRecall(top_k=[1, 2])

    def validation_step(self, batch: list[Tensor]) -> None:
        self.recall.update(self.tower(batch[0]), self.tower(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.recall.compute())
        self.recall.reset()


@pytest.mark.filterwarnings("ignore")
def test_recall_in_trainer_logs_every_value() -> None:
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    data = TensorDataset(torch.randn(11, 4, generator=torch.Generator().manual_seed(0)))
    module = Module()
    logged = trainer.validate(module, DataLoader(data, batch_size=4), verbose=False)[0]
    names = ("recall@1", "recall@2", "median_rank", "mean_rank", "queries")
    assert set(logged) == {f"{d}_{n}" for d in ("image_to_text", "text_to_image") for n in names}
    assert logged["image_to_text_recall@1"] == 1
    assert logged["text_to_image_queries"] == 11
    assert not module.recall.image_features
