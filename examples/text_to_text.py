"""Text retrieval with one shared tower: Unicode names of characters and their HTML and TeX names.

`lightning-mp fit --config examples/text_to_text.yaml`, from the repository's root. The data are
there already: Python's `unicodedata` and `html.entities`, matplotlib's table of TeX commands.
"""

import html.entities
import unicodedata
import zlib
from collections.abc import Iterator, Sequence

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from matplotlib._mathtext_data import tex2uni
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_mp import ContrastiveLoss, ContrastiveRecall


def aliases() -> dict[str, list[str]]:
    """Return the aliases of every named character: 'LEFTWARDS ARROW' is 'larr', 'leftarrow', ..."""
    found = {(code, name.rstrip(";")) for name, code in html.entities.html5.items()}
    found |= {(chr(code), name) for name, code in tex2uni.items()}
    table: dict[str, list[str]] = {}
    # Sorted, because the order of a set of strings differs between processes and ranks must agree.
    for code, name in sorted(found):
        title = unicodedata.name(code, None) if len(code) == 1 else None
        if title is not None:
            table.setdefault(title, []).append(name)
    return table


def encode(texts: Sequence[str], length: int) -> Tensor:
    """Return ASCII codes of shape (texts, length), padded with zeros."""
    rows = [list(text.encode()[:length].ljust(length, b"\0")) for text in texts]
    return torch.tensor(rows, dtype=torch.uint8)


class Pairs(IterableDataset[tuple[Tensor, Tensor]]):
    """Names in a new order each epoch, each with one alias, so that no text occurs twice."""

    def __init__(self, table: dict[str, list[str]], batch_size: int) -> None:
        self.names, self.batch_size = list(table), batch_size
        self.titles = encode(self.names, 48)
        self.codes = [encode(table[name], 24) for name in self.names]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches."""
        for rows in torch.randperm(len(self.names)).split(self.batch_size):
            # A short batch would have fewer negatives; the remaining pairs occur in other epochs.
            if len(rows) < self.batch_size:
                return
            chosen = [self.codes[i][int(torch.randint(len(self.codes[i]), ()))] for i in rows]
            yield self.titles[rows], torch.stack(chosen)


class Names(pl.LightningDataModule):
    """Nine tenths of the characters for training, the rest for validation.

    Args:
        batch_size: Pairs of a training batch.
    """

    def __init__(self, batch_size: int = 512) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.seen: dict[str, list[str]] = {}
        self.unseen: dict[str, list[str]] = {}
        for name, codes in aliases().items():
            # Not `hash`, whose salt differs between processes.
            split = self.seen if zlib.crc32(name.encode()) % 10 else self.unseen
            split[name] = codes

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Pairs(self.seen, self.batch_size), batch_size=None)

    def val_dataloader(self) -> DataLoader:
        """Return every name with each of its aliases, and the ids of name and alias."""
        rows = [(i, name, code) for i, name in enumerate(self.unseen) for code in self.unseen[name]]
        numbers, titles, codes = zip(*rows, strict=True)
        tensors = encode(titles, 48), encode(codes, 24), torch.tensor(numbers)
        return DataLoader(TensorDataset(*tensors, torch.arange(len(rows))), batch_size=256)


class TextToText(pl.LightningModule):
    """One tower for both texts, called twice per step; the strategy creates micro-batches.

    Args:
        width: Channels of the tower.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width, padding_idx=0)
        self.near, self.far = (nn.Conv1d(width, width, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(width, width)
        # CLIP's initial value, log(1 / 0.07).
        self.log_scale = nn.Parameter(torch.tensor(2.66))
        self.loss = ContrastiveLoss()
        self.recall = ContrastiveRecall(value="text_to_image_recall@1")

    def tower(self, codes: Tensor) -> Tensor:
        """Return normalized features of texts, ignoring case."""
        lower = codes.long() + 32 * ((codes >= 65) & (codes <= 90))
        letters = self.embedding(lower).transpose(1, 2)
        hidden = F.gelu(self.near(letters))
        hidden = hidden + F.gelu(self.far(hidden))
        # Excludes padding from the maximum.
        hidden = hidden.masked_fill((codes == 0)[:, None], -torch.inf).amax(2)
        return F.normalize(self.head(hidden), dim=1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        titles, codes = (self.tower(texts) for texts in batch)
        return self.loss(titles, codes, self.log_scale.exp())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        titles, codes, numbers, places = batch
        names, others = self.tower(titles), self.tower(codes)
        # A name occurs once per alias; with its key it counts once.
        self.recall.update(names, others, numbers, numbers, numbers, places)
        self.log("recall@1", self.recall, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)
