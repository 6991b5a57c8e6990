"""The two encoders of the demo: a small convolutional network and a bag of words.

Legend: ``b`` rows, ``H`` and ``W`` pixels, ``L`` characters of a padded name, ``S`` words of a
name, ``D`` feature width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Background becomes -0.5 and ink 2: about zero mean and unit variance near a glyph.
PIXEL_MEAN, PIXEL_GAIN = 0.2, 2.5
MAX_WORDS = 16
MAX_WORD_LENGTH = 24


def jitter(image_b1HW: Tensor, strength: float) -> Tensor:
    """Vary glyphs as fonts do: size, width, slant, position and stroke weight.

    Every font family draws characters a little differently, but training has only twelve styles
    of three families; without the variation a tower overfits to those drawings. With strength 1,
    the standard deviations of width and height are 8%, that of the slant is 10%.
    """
    b = len(image_b1HW)
    normal_6b = torch.randn(6, b, device=image_b1HW.device) * strength
    spread_61 = normal_6b.new_tensor([[0.08], [0.08], [0.10], [0.04], [0.05], [0.04]])
    width, height, slant, turn, right, down = normal_6b * spread_61
    map_b3 = torch.stack([1 + width, slant - turn, right], -1)
    below_b3 = torch.stack([turn, 1 + height, down], -1)
    map_b23 = torch.stack([map_b3, below_b3], 1)
    grid = F.affine_grid(map_b23, list(image_b1HW.shape), align_corners=False)
    image_b1HW = F.grid_sample(image_b1HW, grid, align_corners=False)
    # The maximum of neighbors makes strokes bolder, the minimum lighter.
    bold = _neighbor_max(image_b1HW) - image_b1HW
    light = _neighbor_max(-image_b1HW) + image_b1HW
    amount = (torch.rand(b, 1, 1, 1, device=image_b1HW.device) - 0.5) * min(strength, 1.0)
    return image_b1HW + amount.clamp(min=0) * bold + amount.clamp(max=0) * light


def _neighbor_max(image_b1HW: Tensor) -> Tensor:
    """Return the maximum over 3 x 3 pixels, on a CPU ten times as fast as `max_pool2d`."""
    padded = F.pad(image_b1HW, (1, 1, 1, 1))
    rows = torch.maximum(padded[..., :-2, :], padded[..., 2:, :]).maximum(padded[..., 1:-1, :])
    return torch.maximum(rows[..., :-2], rows[..., 2:]).maximum(rows[..., 1:-1])


class GlyphTower(nn.Module):
    """Encodes uint8 glyph images.

    The last stages have `width` channels, the first two a quarter and a half of that.

    Shapes:
        image ``(b, H, W)`` uint8 with H = W = 32; returns ``(b, D)``.
    """

    def __init__(
        self, *, width: int = 128, feature_width: int = 256, jitter_strength: float = 1.5
    ) -> None:
        super().__init__()
        self.jitter_strength = jitter_strength
        convolutions = [
            nn.Conv2d(1, width // 4, 3, stride=2, padding=1),
            nn.Conv2d(width // 4, width // 2, 3, stride=2, padding=1),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1),
            nn.Conv2d(width, width, 3, padding=1),
        ]
        for convolution in convolutions:
            # There is no normalization (BatchNorm would see micro-batches), so the initial weights
            # must preserve the variance; torch's default initialization reduces it in each layer.
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
            # On a CPU, channels-last is faster in forward and backward.
            convolution.weight.data = convolution.weight.data.to(memory_format=torch.channels_last)
        stages = [stage for conv in convolutions for stage in (conv, nn.ReLU(inplace=True))]
        # Flattened rather than averaged: accents above and below have the same average.
        head = [nn.Linear(width * 16, 4 * width), nn.ReLU(), nn.Linear(4 * width, feature_width)]
        self.net = nn.Sequential(*stages, nn.Flatten(), *head)

    def forward(self, image_bHW: Tensor) -> Tensor:
        image_b1HW = image_bHW[:, None] / 255  # in the default dtype, which precision plugins set
        if self.training and self.jitter_strength > 0:
            image_b1HW = jitter(image_b1HW, self.jitter_strength)
        features: Tensor = self.net((image_b1HW - PIXEL_MEAN) * PIXEL_GAIN)
        return features


def hash_words(text_bL: Tensor, table: Tensor) -> Tensor:
    """Hash each word to an integer, the same on every machine and in every process.

    Each character at each position of a word has a random integer, and the hash of a word is their
    sum, so that a word has the same hash anywhere in a name, and its anagrams have others.

    Shapes:
        text ``(b, L)``, table ``(characters, MAX_WORD_LENGTH)``; returns ``(b, S)`` int64, 0 where
        there is no word.
    """
    code_bL = text_bL.long()  # 0 is padding
    gap_bL = (code_bL == 1) | (code_bL == 2)  # a space, a hyphen
    place_bL = torch.arange(code_bL.shape[1], device=code_bL.device).expand_as(code_bL)
    start_bL = torch.where(gap_bL, place_bL + 1, 0).cummax(dim=1).values
    inside_bL = (place_bL - start_bL).clamp(0, MAX_WORD_LENGTH - 1)
    word_bL = gap_bL.long().cumsum(dim=1).clamp(max=MAX_WORDS - 1)
    value_bL = torch.where((code_bL > 0) & ~gap_bL, table[code_bL, inside_bL], 0)
    return value_bL.new_zeros(len(code_bL), MAX_WORDS).scatter_add_(1, word_bL, value_bL)


class NameTower(nn.Module):
    """Encodes names from their character codes.

    Words and pairs of adjacent words are looked up in two hashed embedding tables. The sum of their
    embeddings represents the words of a name and most of their order ("SMALL LETTER A WITH ACUTE"
    differs from "SMALL LETTER ACUTE WITH A"); a two-layer network then mixes them.

    Shapes:
        text ``(b, L)`` uint8; returns ``(b, D)``.
    """

    characters: Tensor

    def __init__(self, *, feature_width: int = 256) -> None:
        super().__init__()
        # A separate generator, so that hashing does not depend on the seed of the run.
        random = torch.Generator().manual_seed(0)
        integers = torch.randint(1, 2**31, (39, MAX_WORD_LENGTH), generator=random)
        # A buffer, so that a loaded checkpoint hashes words as in training.
        self.register_buffer("characters", integers)
        # The data have about 2,100 different words, so few share a row.
        self.words = nn.EmbeddingBag(8192, feature_width, mode="sum", padding_idx=0)
        self.pairs = nn.EmbeddingBag(16384, feature_width, mode="sum", padding_idx=0)
        with torch.no_grad():
            self.pairs.weight.mul_(0.5)  # single words, which names share, dominate at the start
        self.project = nn.Linear(feature_width, feature_width)
        self.mix = nn.Sequential(
            nn.LayerNorm(feature_width),
            nn.Linear(feature_width, 2 * feature_width),
            nn.GELU(),
            nn.Linear(2 * feature_width, feature_width),
        )

    def forward(self, text_bL: Tensor) -> Tensor:
        word_bS = hash_words(text_bL, self.characters)
        before_bS = F.pad(word_bS[:, :-1], (1, 0))
        # An odd factor, so that the order of a pair matters.
        pair_bS = torch.where(word_bS > 0, word_bS + 31 * before_bS, 0)
        sum_bD = self.words(_bucket(word_bS, self.words)) + self.pairs(_bucket(pair_bS, self.pairs))
        features: Tensor = self.project(sum_bD) + self.mix(sum_bD)
        return features


def _bucket(number_bS: Tensor, table: nn.EmbeddingBag) -> Tensor:
    """Map hashes to rows of a table; row 0 is for positions without a word."""
    return torch.where(number_bS > 0, 1 + number_bS % (table.num_embeddings - 1), 0)
