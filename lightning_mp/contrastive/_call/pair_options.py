"""What a call says about its pairs beside the features, and the order in which row i has text i.

Shapes:
    b: images of this rank. n: its texts. k: most positives of an image. e: pairs that belong
    together. D: feature width.
"""

import dataclasses
import zlib
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from lightning_mp.contrastive._tiles.backends import Directions

__all__ = [
    "RULES",
    "Duplicates",
    "FalseNegatives",
    "PairArguments",
    "PairOptions",
    "Pairing",
]

Duplicates = Literal["mask", "multi_positive"]
FalseNegatives = Literal["keep", "absolute", "relative"]
RULES = ("directions", "duplicates", "label_smoothing", "false_negatives", "margin")
"""The arguments of the constructor."""


class PairArguments(TypedDict, total=False):
    """The arguments of a call that are optional; `ContrastiveLoss.forward` explains them."""

    ids: Tensor | None
    weights: Tensor | None
    positives: Tensor | None
    negatives: Tensor | None
    guide_image: Tensor | None
    guide_text: Tensor | None


class Pairing(NamedTuple):
    """An order of images and texts, and what belongs to what in it.

    Args:
        image_order: (b,), or `None` where images stay as they are.
        text_order: (n,), likewise.
        matched: How many images have a text of their own: the first ones, text i being image i's.
        images_e: The images of all pairs that belong together, in the new order.
        texts_e: Their texts.
    """

    image_order: Tensor | None
    text_order: Tensor | None
    matched: int
    images_e: Tensor
    texts_e: Tensor

    def is_one_to_one(self, b: int) -> bool:
        """Return whether each of `b` images has one text, which no other has."""
        return b == self.matched == len(self.images_e)

    def ordered(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return what stands for images and for texts in the new order."""
        return (
            image if self.image_order is None else image[self.image_order],
            text if self.text_order is None else text[self.text_order],
        )


# Not a named tuple: under `torch.compile`, torch 2.10 traces no property of one.
@dataclasses.dataclass(frozen=True)
class PairOptions:
    """The arguments of a call and of the constructor that say what belongs to what, and how much.

    The first six come with a call, the next five from the constructor of `ContrastiveLoss`.
    `pairing` is what was made of `positives` once they have been read, and `prefixes` what
    `MatryoshkaLoss` cuts the features to.
    """

    ids: Tensor | None = None
    weights: Tensor | None = None
    positives: Tensor | None = None
    negatives: Tensor | None = None
    guide_image: Tensor | None = None
    guide_text: Tensor | None = None
    directions: Directions = "both"
    duplicates: Duplicates = "mask"
    label_smoothing: float = 0.0
    false_negatives: FalseNegatives = "keep"
    margin: float = 0.0
    pairing: Pairing | None = None
    statistics: bool = False
    prefixes: tuple[Any, ...] = ()
    is_softmax: bool = True

    @property
    def masked_ids(self) -> Tensor | None:
        """The ids whose equal pairs the tiles leave out, int64."""
        return self._ids if self.duplicates == "mask" else None

    @property
    def grouped_ids(self) -> Tensor | None:
        """The ids whose equal pairs are positives, int64."""
        return None if self.duplicates == "mask" else self._ids

    @property
    def _ids(self) -> Tensor | None:
        # They travel, and ranks do not tell each other in which dtype theirs came.
        return None if self.ids is None else self.ids.long().contiguous()

    @property
    def guides(self) -> tuple[Tensor, Tensor] | None:
        """The features that judge similarities, if these are not the model's."""
        if self.guide_image is None or self.guide_text is None:
            return None
        return self.guide_image, self.guide_text

    @property
    def matched(self) -> int | None:
        """How many images have a text of their own, the first ones; `None` for all."""
        return None if self.pairing is None else self.pairing.matched

    @property
    def is_plain(self) -> bool:
        """Whether the sweeps alone make the loss: one positive a row, all rows alike."""
        is_given = any(x is not None for x in (self.weights, self.positives, self.negatives))
        return not is_given and self.duplicates == "mask" and not self.label_smoothing

    @property
    def is_swept(self) -> bool:
        """Whether that is so, and the sweeps leave out nothing but equal ids."""
        return self.is_plain and self.false_negatives == "keep"

    @property
    def _are_pairs(self) -> bool:
        """Whether no image has two positives, and no text, and all have the same negatives."""
        one = self.pairing is None or self.pairing.matched == len(self.pairing.images_e)
        is_whole = self.negatives is None and self.false_negatives == "keep"
        return one and is_whole and self.duplicates == "mask"

    def given(self) -> dict[str, bool]:
        """Return which arguments there are; all ranks have the same."""
        # In one order: ranks compare them as bits, by place.
        return {
            "ids": self.ids is not None,
            "weights": self.weights is not None,
            "positives": self.positives is not None,
            "negatives": self.negatives is not None,
            "guide_image": self.guide_image is not None,
            "guide_text": self.guide_text is not None,
        }

    @property
    def rules_checksum(self) -> int:
        """A number that is another one where ranks have another loss or other arguments of it."""
        # The class of the loss as well: ranks with different ones would wait for each other.
        rules = [*(getattr(self, name) for name in RULES), self.prefixes, self.is_softmax]
        if self.guide_text is not None:
            rules += [self.guide_text.shape[1], self.guide_text.dtype]
        # Not `hash`, which Python salts for strings: every process would have another.
        return zlib.crc32(repr(rules).encode())

    def paired(
        self, image_bD: Tensor, text_nD: Tensor
    ) -> tuple[str | None, "PairOptions", Tensor, Tensor]:
        """Return options and features in an order in which rows have their columns, if they can.

        The first value is what is wrong with the positives, which the host reads.
        """
        if self.positives is None:
            return self._pairing_problem(len(image_bD)), self, image_bD, text_nD
        # First: the pairing takes them for places in arrays.
        problem = _range_problem(self.positives, len(text_nD))
        if problem is not None:
            return problem, self, image_bD, text_nD
        pairing = _pair_up(self.positives, len(text_nD), text_nD.device)
        in_order: dict[str, Any] = {}
        for order, names in (
            (pairing.image_order, ("weights", "negatives", "guide_image")),
            (pairing.text_order, ("ids", "guide_text")),
        ):
            for name in names:
                value = getattr(self, name)
                if value is not None and order is not None:
                    in_order[name] = value[order]
        options = dataclasses.replace(self, pairing=pairing, **in_order)
        problem = options._pairing_problem(len(image_bD))
        return problem, options, *pairing.ordered(image_bD, text_nD)

    def _pairing_problem(self, b: int) -> str | None:
        """Return what cannot be used with what `b` images are paired with."""
        if self.statistics and not self._are_pairs:
            return (
                "Passed `statistics=True` to a loss with several positives of one image or text, "
                "with `negatives` of an image alone, or with `false_negatives`. Statistics are "
                "of one pair a row, among the texts that all images see. Leave it out."
            )
        if self.pairing is None or self.pairing.is_one_to_one(b):
            return None
        if self.false_negatives != "keep":
            return (
                "Passed `positives` that are not one text for each image, and another for each, to "
                f"`ContrastiveLoss(false_negatives={self.false_negatives!r})`, which judges by the "
                "one positive of a row or column. Leave one of the two out."
            )
        if self.ids is not None:
            return (
                "Passed `ids` with `positives` that are not one text for each image, and another "
                "for each, so it is not said which of equal ids are negatives. Name all texts of "
                "an image in `positives`, padded with -1, and leave `ids` out."
            )
        return None


def _range_problem(positives: Tensor, n: int) -> str | None:
    """Return what is wrong with numbers of `n` texts; the host reads them."""
    least, most = (int(x) for x in positives.aminmax()) if positives.numel() else (-1, -1)
    if least >= -1 and most < n:
        return None
    return (
        f"Passed `positives` from {least} to {most} with {n} texts on this rank. They must be row "
        "numbers of this rank's texts, or -1 for none. Count from its first text."
    )


def _pair_up(positives: Tensor, n: int, device: torch.device) -> Pairing:
    """Return the pairing that `positives` name; the host reads them.

    A pair of a row and a column is what the tiles know to leave out, so as many images as may be
    get a text of their own: the first of their positives that no image before them has taken.

    Args:
        positives: (b,) or (b, k) integers from 0 to n - 1, or -1 for none.
        n: Texts.
        device: Of the features.
    """
    # 64 bits, as pairs are numbered in what follows.
    named_bk = positives.cpu().numpy().reshape(len(positives), -1).astype(np.int64)
    b = len(named_bk)
    # On the host: which text is free depends on all images before, and a GPU has no such loop.
    own, is_taken = np.full(b, -1), np.zeros(n, dtype=bool)
    # Choice by choice: k steps of numpy, not one of Python for each image.
    for named in named_bk.T:
        rows = np.flatnonzero((own < 0) & (named >= 0))
        rows = rows[~is_taken[named[rows]]]
        # Where several name one text, the first of them has it.
        texts, first = np.unique(named[rows], return_index=True)
        own[rows[first]], is_taken[texts] = texts, True
    image_order = np.concatenate([np.flatnonzero(own >= 0), np.flatnonzero(own < 0)])
    text_order = np.concatenate([own[own >= 0], np.flatnonzero(~is_taken)])
    images_e, places = np.nonzero(named_bk >= 0)
    pairs_e = np.unique(images_e * n + named_bk[images_e, places])  # a text named twice counts once
    # The inverse of an order says where each has gone.
    places_b, places_n = np.argsort(image_order), np.argsort(text_order)

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    def order(places: np.ndarray) -> Tensor | None:
        # What is in order as it came takes no copy of the features.
        return None if np.array_equal(places, np.arange(len(places))) else on_device(places)

    return Pairing(
        order(image_order),
        order(text_order),
        int((own >= 0).sum()),
        on_device(places_b[pairs_e // n]),
        on_device(places_n[pairs_e % n]),
    )
