"""What a call says about its pairs beside the features: one object, and what can be wrong with it.

Shapes:
    b: images of this rank. n: its texts. k: positives or negatives of an image. D: feature width.
"""

import zlib
from typing import Literal, NamedTuple, TypedDict, get_args

import torch
from torch import Tensor

from lightning_mp.contrastive.backends import Directions
from lightning_mp.contrastive.pairing import Pairing, pair_up
from lightning_mp.numerics.floats import FLOAT_DTYPES

__all__ = ["RULES", "Duplicates", "PairArguments", "PairOptions", "check_pair_rules"]

Duplicates = Literal["mask", "multi_positive"]
RULES = ("directions", "duplicates", "label_smoothing")
"""The arguments of the constructor."""


class PairArguments(TypedDict, total=False):
    """The arguments of a call that are optional; `ContrastiveLoss.forward` explains them."""

    ids: Tensor | None
    weights: Tensor | None
    positives: Tensor | None
    negatives: Tensor | None


class PairOptions(NamedTuple):
    """The arguments of a call and of the constructor that say what belongs to what, and how much.

    Args:
        ids: (n,) integers; what equal ones mean is `duplicates`.
        weights: (b,).
        positives: (b,) or (b, k) integers.
        negatives: (b, k, D).
        directions: See `ContrastiveLoss`, as what follows.
        duplicates: What equal ids mean.
        label_smoothing: 0 to 1.
        pairing: What the positives come to, once they have been read.
    """

    ids: Tensor | None = None
    weights: Tensor | None = None
    positives: Tensor | None = None
    negatives: Tensor | None = None
    directions: Directions = "both"
    duplicates: Duplicates = "mask"
    label_smoothing: float = 0.0
    pairing: Pairing | None = None

    @property
    def has_mask(self) -> bool:
        """Whether the tiles leave pairs of equal ids out."""
        return self.ids is not None and self.duplicates == "mask"

    @property
    def masked_ids(self) -> Tensor | None:
        """The ids whose equal pairs the tiles leave out."""
        return self.ids.long() if self.ids is not None and self.duplicates == "mask" else None

    @property
    def matched(self) -> int | None:
        """How many images have a text of their own, the first ones; `None` for all."""
        return None if self.pairing is None else self.pairing.matched

    @property
    def is_plain(self) -> bool:
        """Whether the sweeps alone make the loss: one positive a row, all rows alike."""
        is_given = any(x is not None for x in (self.weights, self.positives, self.negatives))
        return not is_given and self.duplicates == "mask" and not self.label_smoothing

    def given(self) -> dict[str, bool]:
        """Return which arguments there are; all ranks have the same."""
        return {
            "ids": self.ids is not None,
            "weights": self.weights is not None,
            "positives": self.positives is not None,
            "negatives": self.negatives is not None,
        }

    @property
    def rules_checksum(self) -> int:
        """A number that is another one where ranks have other arguments of the constructor."""
        return zlib.crc32(repr([getattr(self, name) for name in RULES]).encode())

    def paired(self, image_bD: Tensor, text_nD: Tensor) -> tuple["PairOptions", Tensor, Tensor]:
        """Return options and features in an order in which rows have their columns, if they can."""
        if self.positives is None:
            return self, image_bD, text_nD
        pairing = pair_up(self.positives, len(text_nD), text_nD.device)
        weights, negatives, ids = self.weights, self.negatives, self.ids
        if pairing.image_order is not None:
            weights = None if weights is None else weights[pairing.image_order]
            negatives = None if negatives is None else negatives[pairing.image_order]
        if ids is not None and pairing.text_order is not None:
            ids = ids[pairing.text_order]
        options = self._replace(pairing=pairing, weights=weights, negatives=negatives, ids=ids)
        return options, *pairing.ordered(image_bD, text_nD)

    def pairing_problem(self, b: int) -> str | None:
        """Return why ids cannot be used with what `b` images are paired with."""
        if self.ids is None or self.pairing is None or self.pairing.is_one_to_one(b):
            return None
        return (
            "Passed `ids` with `positives` that are not one text for each image, and another for "
            "each, so it is not said which of equal ids are negatives. Name all texts of an image "
            "in `positives`, padded with -1, and leave `ids` out."
        )

    def problem(self, image: Tensor, text: Tensor) -> str | None:
        """Return what cannot be used with features that can, and the fix."""
        return (
            _ids_problem(self, text)
            or (None if self.weights is None else _weights_problem(self.weights, image))
            or (None if self.positives is None else _positives_problem(self, image, text))
            or (None if self.negatives is None else _negatives_problem(self, image))
        )  # fmt: skip


def check_pair_rules(duplicates: str, label_smoothing: float) -> None:
    """Refuse what a constructor cannot take.

    Raises:
        ValueError: An argument of `ContrastiveLoss` has a value that is not known.
    """
    if duplicates not in get_args(Duplicates):
        raise ValueError(
            f"Passed `ContrastiveLoss(duplicates={duplicates!r})`. `duplicates` must be 'mask' or "
            "'multi_positive'. Leave it out, and pairs of equal `ids` are no negatives."
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"Passed `ContrastiveLoss(label_smoothing={label_smoothing!r})`. It must be a number "
            "from 0 to 1. Pass a small one, such as 0.1, or leave it out."
        )


def _ids_problem(options: PairOptions, text: Tensor) -> str | None:
    ids = options.ids
    if ids is None:
        if options.duplicates == "mask":
            return None
        return (
            f"Called `ContrastiveLoss(duplicates={options.duplicates!r})` without `ids`, which say "
            "what else is a positive. Pass `ids=...` in the call, or leave `duplicates` out."
        )
    if not isinstance(ids, Tensor):
        return (
            f"Passed `ids` of type {type(ids).__name__}. It must be a tensor of integers, one for "
            "each text. Pass `torch.tensor(ids)`."
        )
    is_integer = not ids.is_floating_point() and not ids.is_complex()
    if ids.shape != text.shape[:1] or not is_integer:
        return (
            f"Passed `ids` of dtype {ids.dtype} and shape {list(ids.shape)} with texts of shape "
            f"{list(text.shape)}. It must be integers of shape [texts]. Number what the "
            "rows show, the same for the same image on every rank; a hash of its name will do."
        )
    return _device_problem("ids", ids, text)


def _weights_problem(weights: Tensor, image: Tensor) -> str | None:
    if not isinstance(weights, Tensor):
        return (
            f"Passed `weights` of type {type(weights).__name__}. It must be a tensor of numbers "
            "that are not negative, one for each image. Pass `torch.tensor(weights)`."
        )
    if weights.shape != image.shape[:1] or weights.is_complex() or weights.dtype == torch.bool:
        return (
            f"Passed `weights` of dtype {weights.dtype} and shape {list(weights.shape)} with "
            f"images of shape {list(image.shape)}. It must be numbers of shape [images]. Pass one "
            "weight for each image; `mask.float()` makes them of a mask."
        )
    if weights.requires_grad:
        return (
            "Passed `weights` that require a gradient, which the loss has none for. Pass "
            "`weights.detach()`."
        )
    return _device_problem("weights", weights, image)


def _positives_problem(options: PairOptions, image: Tensor, text: Tensor) -> str | None:
    positives = options.positives
    if not isinstance(positives, Tensor):
        return (
            f"Passed `positives` of type {type(positives).__name__}. It must be a tensor of the "
            "texts' row numbers, one or several for each image. Pass `torch.tensor(positives)`."
        )
    if options.duplicates != "mask":
        return (
            f"Passed `positives` to `ContrastiveLoss(duplicates={options.duplicates!r})`, where "
            "`ids` say what they are. Pass one of both."
        )
    is_integer = not positives.is_floating_point() and not positives.is_complex()
    is_integer = is_integer and positives.dtype != torch.bool
    if positives.ndim not in (1, 2) or len(positives) != len(image) or not is_integer:
        return (
            f"Passed `positives` of dtype {positives.dtype} and shape {list(positives.shape)} with "
            f"images of shape {list(image.shape)}. It must be integers of shape [images] or "
            "[images, most texts of one]. Pad with -1 where an image has fewer."
        )
    least, most = (int(x) for x in positives.aminmax()) if positives.numel() else (-1, -1)
    if least < -1 or most >= len(text):
        return (
            f"Passed `positives` from {least} to {most} with {len(text)} texts on this rank. They "
            "must be row numbers of this rank's texts, or -1 for none. Count from its first text."
        )
    return None


def _negatives_problem(options: PairOptions, image: Tensor) -> str | None:
    negatives = options.negatives
    if options.directions == "text_to_image":
        return (
            "Passed `negatives` to `ContrastiveLoss(directions='text_to_image')`. They are "
            "texts that an image is not to find. Leave one of both out."
        )
    if not isinstance(negatives, Tensor):
        return (
            f"Passed `negatives` of type {type(negatives).__name__}. It must be a tensor of shape "
            "(batch, negatives of each image, width). Pass `torch.stack(negatives, 1)`."
        )
    shape = list(negatives.shape)
    if negatives.ndim != 3 or [shape[0], shape[2]] != list(image.shape):
        return (
            f"Passed `negatives` of shape {shape} with images of shape {list(image.shape)}. It "
            f"must be of shape [{len(image)}, negatives of each image, {image.shape[1]}]. "
            "Negatives of all images are texts beyond the images' own."
        )
    if negatives.dtype not in FLOAT_DTYPES:
        return (
            f"Passed `negatives` of dtype {negatives.dtype}. It must be one of "
            f"{', '.join(map(str, FLOAT_DTYPES))}. Pass the encoder's output, not its input."
        )
    return _device_problem("negatives", negatives, image)


def _device_problem(name: str, value: Tensor, features: Tensor) -> str | None:
    if value.device == features.device:
        return None
    return (
        f"Passed `{name}` on {value.device} with features on {features.device}. Both must be "
        f"on one device. Move them, such as `{name}.to(features.device)`."
    )
