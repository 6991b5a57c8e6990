"""Image-text shards of webdataset: tar files of `NAME.jpg` (or png) and `NAME.txt`.

Needs `pip install webdataset pillow`. Captions are read as bytes, so no vocabulary is needed; pass
others through a tokenizer of yours in `tokens_of`.
"""

from __future__ import annotations

import io
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

# The 256 bytes come first; END is the largest token, because CLIP reads features at the maximum.
START, END = 256, 257


def tokens_of(caption: str, length: int) -> Tensor:
    """Return the tokens of a caption: START, truncated bytes, END, zeros as padding."""
    codes = [START, *caption.encode()[: length - 2], END]
    return torch.tensor(codes + [0] * (length - len(codes)))


def image_of(data: bytes, edge: int) -> Tensor:
    """Return the resized center crop of an image file, uint8 of shape (3, edge, edge)."""
    from PIL import Image, ImageOps

    # Files may be greyscale, have a palette, or be transparent.
    picture = ImageOps.fit(Image.open(io.BytesIO(data)).convert("RGB"), (edge, edge))
    # uint8: the device converts them to floating point.
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


class ImageTextShards(pl.LightningDataModule):
    """Pairs from shards, distributed over ranks and workers.

    Args:
        urls: Shards, such as `shards/{00000..00099}.tar`.
        pairs: Pairs of an epoch, over all ranks.
        batch_size: Pairs of a rank batch.
        image_size: Edge of the images in pixels.
        context_length: Tokens of a text.
        workers: Worker processes of a rank.
        shuffle: Size of the shuffle buffer in pairs.
    """

    def __init__(
        self,
        urls: str,
        pairs: int,
        *,
        batch_size: int = 1024,
        image_size: int = 224,
        context_length: int = 77,
        workers: int = 4,
        shuffle: int = 10_000,
    ) -> None:
        super().__init__()
        self.urls, self.pairs, self.batch_size, self.workers = urls, pairs, batch_size, workers
        self.image_size, self.context_length, self.shuffle = image_size, context_length, shuffle

    def train_dataloader(self) -> DataLoader[Any]:
        """Return batches of uint8 images and tokens, the same number on every rank."""
        import webdataset as wds

        ranks = self.trainer.world_size if self.trainer is not None else 1
        of_rank = self.pairs // ranks // self.batch_size
        # Rounded up: Lightning ends the epoch after `with_length` batches on all ranks.
        of_worker = -(-of_rank // max(1, self.workers))
        # Repeated endlessly, so that every rank has the same number whatever its shards contain.
        splits = {"resampled": True, "shardshuffle": False, "nodesplitter": wds.split_by_node}
        pairs = wds.WebDataset(self.urls, **splits).shuffle(self.shuffle).map(self._pair)
        batches = pairs.batched(self.batch_size, partial=False)
        batches = batches.with_epoch(of_worker).with_length(of_rank)
        return DataLoader(batches, batch_size=None, num_workers=self.workers)

    def _pair(self, sample: dict[str, Any]) -> tuple[Tensor, Tensor]:
        image = next(sample[kind] for kind in ("jpg", "jpeg", "png", "webp") if kind in sample)
        text = sample["txt"].decode()
        return image_of(image, self.image_size), tokens_of(text, self.context_length)
