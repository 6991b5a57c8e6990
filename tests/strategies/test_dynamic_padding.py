"""Loader batches padded to different lengths train like one padded batch without the cache."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_mp import ContrastiveLoss, InfCLStrategy
from tests.processes import run_ranks
from tests.quiet import QUIET, parameters_of
from tests.strategies.models import make_trainer

ROWS, WIDTH = 48, 8
ROLES = {"input_ids": "rows padded with 0", "attention_mask": "mask"}


class Captions(Dataset):
    """Images, and tokens of 1 to 9 that describe them."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(1, 10, (), generator=generator))
        tokens = torch.randint(1, 40, (length,), generator=generator)
        return torch.randn(WIDTH, dtype=torch.float64, generator=generator), tokens


def collate(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Pad to the longest row, like Hugging Face's collators."""
    ids = pad_sequence([tokens for _, tokens in rows], batch_first=True)
    image = torch.stack([image for image, _ in rows])
    return {"image": image, "input_ids": ids, "attention_mask": (ids != 0).long()}


class TextTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.lengths: list[int] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        x = self.layer(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        mask = attention_mask[..., None].to(x.dtype)
        return (x * mask).sum(1) / mask.sum(1)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.visual, self.text = nn.Linear(WIDTH, WIDTH), TextTower()
        self.loss = ContrastiveLoss()
        self.losses: list[float] = []
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        image = self.visual(batch["image"])
        text = self.text(batch["input_ids"], batch["attention_mask"])
        scale = torch.tensor(5.0, dtype=torch.float64)
        loss = self.loss(F.normalize(image, dim=1), F.normalize(text, dim=1), scale)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _train(rank: int, ranks: int) -> tuple[list[float], Tensor, list[int]]:
    strategy = InfCLStrategy(micro_batch_size=3, loader_batches_per_step=12 // ranks, roles=ROLES)
    trainer = make_trainer(strategy, devices=ranks, max_epochs=2, use_distributed_sampler=False)
    sampler = DistributedSampler(Captions(), ranks, rank, shuffle=False)
    model = Model()
    trainer.fit(model, DataLoader(Captions(), batch_size=2, sampler=sampler, collate_fn=collate))
    return model.losses, parameters_of(model), model.text.lengths


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_padded_loader_batches_train_like_one_process_with_the_whole_batch(ranks: int) -> None:
    results = run_ranks(_train, ranks, ranks)
    whole = Model()
    trainer = pl.Trainer(**QUIET, max_epochs=2)
    trainer.fit(whole, DataLoader(Captions(), batch_size=24, collate_fn=collate))
    for losses, parameters, lengths in results:
        assert losses == pytest.approx(whole.losses, rel=1e-12)
        assert torch.allclose(parameters, parameters_of(whole), rtol=0, atol=1e-12)
        assert torch.equal(parameters, results[0][1])
        assert len(set(lengths)) > 2, "micro-batches have lengths of their own"
