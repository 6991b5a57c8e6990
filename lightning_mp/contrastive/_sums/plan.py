"""What all ranks agree on before a loss, and what every loss returns: itself and its gradients.

Shapes:
    B: global batch. b: this rank's batch. n: its texts, of which the first b belong to its images.
    m: columns that are visiting. D: feature width. W: ranks.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from lightning_mp.contrastive._exchange.exchange import Exchange, Visit
from lightning_mp.contrastive._tiles.backends import Directions
from lightning_mp.contrastive._tiles.tile_backend import Ids, Kept, Limits, Logits, TileBackend
from lightning_mp.numerics.floats import accumulation_dtype

__all__ = ["Found", "Plan"]


class Found(NamedTuple):
    """A loss, and its gradients of a cotangent of 1; `None` is what no rank needs.

    Gradients are those that a *mean* over ranks, as DDP and FSDP take it, turns into the gradients
    of one process with the whole batch: features get W times their own, because the other ranks'
    gradients for them are zero; scale and bias get their total on every rank.

    Args:
        loss: The same on all ranks.
        d_image_bD: In the accumulation dtype, like all of features: fp16 would flush what a loss
            scale is to save, and that comes with the cotangent only.
        d_text_nD: Of the texts.
        d_negatives_bkD: Of what each image alone sees.
        d_scale: In the state dtype, like the next.
        d_bias: `None` also for a softmax, which does not see a bias.
        statistics_5: The values of `LossStatistics`; `None` where no rank wants them.
    """

    loss: Tensor
    d_image_bD: Tensor | None = None
    d_text_nD: Tensor | None = None
    d_negatives_bkD: Tensor | None = None
    d_scale: Tensor | None = None
    d_bias: Tensor | None = None
    statistics_5: Tensor | None = None


@dataclass(frozen=True)
class Plan:
    """What all ranks have agreed on before a loss is computed.

    Args:
        exchange: How the ranks share their columns.
        tiles: The tile backend.
        image_needs_grad: Whether any rank needs gradients for its images.
        text_needs_grad: Whether any rank needs gradients for its texts.
        scale_needs_grad: Whether any rank needs the gradient for the scale.
        ids_b: What this rank's pairs show, int64: pairs of equal ids, on whatever ranks, are no
            negatives of each other. `None` on all ranks or on none.
        pairs: B; `None` where no text is without an image.
        directions: Which cross entropies count.
        matched: How many of this rank's images have a text of their own, the first ones: text i is
            that of image i. `None`: all.
        statistics: Whether any rank wants to know `LossStatistics`.
        limits: Of this rank's images and texts, what they take for false negatives; `None` for
            nothing.
        keeps_tiles: Whether tiles of the first sweep are kept for the second where they fit.
    """

    exchange: Exchange
    tiles: TileBackend
    image_needs_grad: bool
    text_needs_grad: bool
    scale_needs_grad: bool
    ids_b: Tensor | None = field(default=None, kw_only=True)
    pairs: int | None = field(default=None, kw_only=True)
    directions: Directions = field(default="both", kw_only=True)
    matched: int | None = field(default=None, kw_only=True)
    statistics: bool = field(default=False, kw_only=True)
    limits: Limits | None = field(default=None, kw_only=True)
    keeps_tiles: bool = field(default=True, kw_only=True)

    @property
    def global_pairs(self) -> int:
        """B: pairs on all ranks, which may have texts without an image beside."""
        return self.exchange.global_batch_size if self.pairs is None else self.pairs

    @property
    def wanted(self) -> tuple[bool, bool]:
        """Whether the cross entropies of images count, and those of texts."""
        return self.directions != "text_to_image", self.directions != "image_to_text"

    @property
    def terms(self) -> int:
        """Cross entropies that the loss is the mean of."""
        return sum(self.wanted) * self.global_pairs

    @property
    def trains(self) -> bool:
        """Whether a backward can follow."""
        return self.image_needs_grad or self.text_needs_grad or self.scale_needs_grad

    @property
    def sides(self) -> tuple[bool, bool]:
        """Whether the gradients of images and of texts are to be worked out.

        The scale's is a sum over either: with no features to train it still needs one of them.
        """
        use_image = self.image_needs_grad or (self.scale_needs_grad and not self.text_needs_grad)
        return use_image, self.text_needs_grad

    @property
    def travelling(self) -> list[Tensor]:
        """What travels with the texts, to tell which pairs are left out."""
        ids = [] if self.ids_b is None else [self.ids_b]
        return ids if self.limits is None else [*ids, *self.limits.travelling]

    def logits(
        self,
        visit: Visit,
        image_bD: Tensor,
        text_mD: Tensor,
        scale: Tensor,
        kept: Kept | None = None,
        *,
        is_first: bool = False,
    ) -> Logits:
        """Return this rank's rows against visiting columns, with what is left out.

        Args:
            visit: Of the texts, and of what travels with them.
            image_bD: The rows.
            text_mD: The columns.
            scale: One value.
            kept: Memory for tiles.
            is_first: Whether sums about the rows hold nothing yet; those about columns never do.
        """
        # They come in the order of `travelling`.
        others = visit.columns[1:]
        ids = None if self.ids_b is None else Ids(self.ids_b[: len(image_bD)], others.pop(0))
        limits = None if self.limits is None else self.limits.at(others)
        # Texts beyond the images' own have no row.
        own, matched = visit.positive_rows, len(image_bD) if self.matched is None else self.matched
        rows = slice(min(own.start, matched), min(own.stop, matched))
        # Sums about columns go home after each visit, so that each starts with new ones.
        fresh = (is_first, True)
        return Logits(image_bD, text_mD, scale, visit.diagonal, rows, ids, limits, kept, fresh)

    def memory_for_tiles(self, image_bD: Tensor, sweeps: int = 1) -> Tensor:
        """Return memory for what gradients of some sweeps need not work out again; may be empty."""
        size, (b, _) = 0, image_bD.shape
        # Limits leave out more than one reference of a tile can tell.
        if self.trains and self.keeps_tiles and self.limits is None:
            columns = sweeps * self.exchange.global_batch_size
            size = self.tiles.kept_values(b, columns, image_bD.dtype, image_bD.device)
        return image_bD.new_empty(size, dtype=accumulation_dtype(image_bD.dtype))
