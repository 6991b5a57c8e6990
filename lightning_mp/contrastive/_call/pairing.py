"""The order in which image i has text i, made of the `positives` of a call.

Shapes:
    b: images of this rank. n: its texts. k: most positives of an image. e: pairs that belong
    together. D: feature width.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_mp.contrastive._call.checks import STATISTICS_PROBLEM
from lightning_mp.contrastive._call.request import Request

__all__ = ["Pairing", "paired"]


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

    def restore(self, gradients: list[Tensor | None]) -> None:
        """Bring the gradients of a request's inputs back into the order in which these came."""
        orders = (self.image_order, self.text_order, None, None, self.image_order)
        for place, (order, grad) in enumerate(zip(orders, gradients, strict=True)):
            if order is not None and grad is not None:
                gradients[place] = torch.empty_like(grad).index_copy_(0, order, grad)


def paired(request: Request, positives: Tensor) -> tuple[str | None, Request, Pairing | None]:
    """Return a request in an order in which rows have their columns, if it can be brought there.

    The first value is what is wrong with the positives, which the host reads.
    """
    # First: the pairing takes them for places in arrays.
    problem = _range_problem(positives, len(request.text))
    if problem is not None:
        return problem, request, None
    pairing = _pair_up(positives, len(request.text), request.text.device)
    in_order: dict[str, Any] = {}
    for order, names in (
        (pairing.image_order, ("image", "weights", "negatives", "guide_image")),
        (pairing.text_order, ("text", "ids", "guide_text")),
    ):
        for name in names:
            value = getattr(request, name)
            if value is not None and order is not None:
                in_order[name] = value[order]
    return _pairing_problem(request, pairing), dataclasses.replace(request, **in_order), pairing


def _pairing_problem(request: Request, pairing: Pairing) -> str | None:
    """Return what cannot be used with what images are paired with."""
    if request.statistics and pairing.matched != len(pairing.images_e):
        return STATISTICS_PROBLEM
    if pairing.is_one_to_one(len(request.image)):
        return None
    if request.false_negatives != "keep":
        return (
            "Passed `positives` that are not one text for each image, and another for each, to "
            f"`{request.owner}(false_negatives={request.false_negatives!r})`, which judges by the "
            "one positive of a row or column. Leave one of the two out."
        )
    if request.ids is not None:
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
