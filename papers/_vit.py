"""A pre-norm Vision Transformer in the usual sizes, with the rungs of Meta's ladder as arguments.

The layout is the order of activations in memory and does not change the result: the same weights
give the same outputs in both. With the batch second, tokens of the same position are neighbors.

Shapes:
    N: images. L: tokens, with a class token where there is one. D: width. H: heads.
    d: width of a head, D / H.

References:
    - An Image is Worth 16x16 Words, https://arxiv.org/abs/2010.11929
    - Speeding up Vision Transformers, https://ai.meta.com, 5 May 2022
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LAYOUTS", "POOLS", "SIZES", "Layout", "Pool", "ViT", "ViTSize"]

Layout = Literal["nld", "lnd"]
Pool = Literal["cls", "mean"]
LAYOUTS: tuple[Layout, ...] = ("nld", "lnd")
POOLS: tuple[Pool, ...] = ("cls", "mean")


@dataclass(frozen=True)
class ViTSize:
    """The dimensions of a size; the MLP is four times as wide as the tokens."""

    patch: int
    width: int
    depth: int
    heads: int

    def patches(self, image: int) -> int:
        """Return the number of patches of a square image.

        Raises:
            ValueError: Patches do not tile the image.
        """
        if image < self.patch or image % self.patch:
            raise ValueError(
                f"Passed images of {image} pixels with patches of {self.patch}. Patches must tile "
                f"the image. Pass {max(image // self.patch, 1) * self.patch} pixels."
            )
        return (image // self.patch) ** 2


SIZES = {
    "characters": ViTSize(patch=4, width=32, depth=2, heads=2),  # see `_characters.py`
    "tiny": ViTSize(patch=8, width=64, depth=2, heads=2),  # for rehearsals
    "thin": ViTSize(patch=8, width=64, depth=24, heads=2),  # takes mostly host time
    "S16": ViTSize(patch=16, width=384, depth=12, heads=6),
    "B16": ViTSize(patch=16, width=768, depth=12, heads=12),
    "L16": ViTSize(patch=16, width=1024, depth=24, heads=16),
    "H16": ViTSize(patch=16, width=1280, depth=32, heads=16),
    "H14": ViTSize(patch=14, width=1280, depth=32, heads=16),
}


class ViT(nn.Module):
    """A Vision Transformer with a linear head.

    Args:
        size: The dimensions.
        image: Edge of the square images in pixels.
        classes: Number of outputs of the head.
        pool: `"cls"` reads a class token, `"mean"` averages the tokens.
        layout: `"nld"` keeps tokens as (N, L, D), `"lnd"` as (L, N, D): the batch second.
        channels: Channels of the images.

    Shapes:
        Images (N, channels, image, image) to logits (N, classes).

    Raises:
        ValueError: Patches do not tile the image.
    """

    def __init__(
        self,
        size: ViTSize,
        *,
        image: int,
        classes: int,
        pool: Pool = "cls",
        layout: Layout = "nld",
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.pool, self.batch_first = pool, layout == "nld"
        tokens = size.patches(image) + (pool == "cls")
        self.patches = nn.Conv2d(channels, size.width, size.patch, stride=size.patch)
        self.class_token = nn.Parameter(torch.zeros(size.width)) if pool == "cls" else None
        self.positions = nn.Parameter(torch.empty(tokens, size.width))
        self.blocks = nn.Sequential(
            *(_Block(size.width, size.heads, self.batch_first) for _ in range(size.depth))
        )
        # 1e-6 is the eps of the published ViTs; torch's default is 1e-5.
        self.norm = nn.LayerNorm(size.width, eps=1e-6)
        self.head = nn.Linear(size.width, classes)
        nn.init.normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images."""
        patches_NDL = self.patches(images).flatten(2)
        # Without this copy, additions would keep the strides of the convolution's output.
        order = (0, 2, 1) if self.batch_first else (2, 0, 1)
        x = patches_NDL.permute(order).contiguous()
        token_dim = 1 if self.batch_first else 0
        if self.class_token is not None:
            shape = (len(images), 1, -1) if self.batch_first else (1, len(images), -1)
            x = torch.cat([self.class_token.expand(shape), x], token_dim)
        x = self.blocks(x + self.positions.unsqueeze(1 - token_dim))
        # The norm comes after pooling, where it reads one token for each image instead of all.
        pooled = x.select(token_dim, 0) if self.pool == "cls" else x.mean(token_dim)
        logits: Tensor = self.head(self.norm(pooled))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, batch_first: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=1e-6)
        self.attention = _Attention(width, heads, batch_first)
        self.mlp_norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        added: Tensor = x + self.mlp(self.mlp_norm(x))
        return added


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, batch_first: bool) -> None:
        super().__init__()
        self.heads, self.batch_first = heads, batch_first
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        order = (2, 0, 3, 1, 4) if self.batch_first else (2, 1, 3, 0, 4)
        q_NHLd, k_NHLd, v_NHLd = qkv.permute(order).unbind(0)
        # A fused kernel, where the device has one, stores no L x L matrix.
        mixed_NHLd = F.scaled_dot_product_attention(q_NHLd, k_NHLd, v_NHLd)
        back = (0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)
        mixed: Tensor = self.out(mixed_NHLd.permute(back).flatten(2))
        return mixed
