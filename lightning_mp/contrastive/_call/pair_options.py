"""What a call says about its pairs beside the features: one object, and what can be wrong with it.

Shapes:
    b: images of this rank. n: its texts. k: positives or negatives of an image. D: feature width.
"""

import dataclasses
import zlib
from typing import Any, Literal, TypedDict

from torch import Tensor

from lightning_mp.contrastive._call.pairing import Pairing, pair_up, range_problem
from lightning_mp.contrastive._tiles.backends import Directions

__all__ = [
    "RULES",
    "Duplicates",
    "FalseNegatives",
    "PairArguments",
    "PairOptions",
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
        rules = [*(getattr(self, name) for name in RULES), self.prefixes, self.is_softmax]
        if self.guide_text is not None:
            rules += [self.guide_text.shape[1], self.guide_text.dtype]
        return zlib.crc32(repr(rules).encode())

    def paired(
        self, image_bD: Tensor, text_nD: Tensor
    ) -> tuple[str | None, "PairOptions", Tensor, Tensor]:
        """Return options and features in an order in which rows have their columns, if they can.

        The first value is what is wrong with the positives, which the host reads.
        """
        if self.positives is None:
            return self.pairing_problem(len(image_bD)), self, image_bD, text_nD
        problem = range_problem(self.positives, len(text_nD))
        if problem is not None:
            return problem, self, image_bD, text_nD
        pairing = pair_up(self.positives, len(text_nD), text_nD.device)
        options, image_bD, text_nD = self.in_order(pairing, image_bD, text_nD)
        return options.pairing_problem(len(image_bD)), options, image_bD, text_nD

    def in_order(
        self, pairing: Pairing, image_bD: Tensor, text_nD: Tensor
    ) -> tuple["PairOptions", Tensor, Tensor]:
        """Return options and features in the order of a pairing."""
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
        return options, *pairing.ordered(image_bD, text_nD)

    def pairing_problem(self, b: int) -> str | None:
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
