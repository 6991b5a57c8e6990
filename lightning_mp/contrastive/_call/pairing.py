"""Positives that a call names, and the order of images and texts in which row i has text i.

Shapes:
    b: images of this rank. n: its texts. k: most positives of an image. e: pairs that belong
    together.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["Pairing", "pair_up", "range_problem"]


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


def range_problem(positives: Tensor, n: int) -> str | None:
    """Return what is wrong with numbers of `n` texts; the host reads them."""
    least, most = (int(x) for x in positives.aminmax()) if positives.numel() else (-1, -1)
    if least >= -1 and most < n:
        return None
    return (
        f"Passed `positives` from {least} to {most} with {n} texts on this rank. They must be row "
        "numbers of this rank's texts, or -1 for none. Count from its first text."
    )


def pair_up(positives: Tensor, n: int, device: torch.device) -> Pairing:
    """Return the pairing that `positives` name; the host reads them.

    A pair of a row and a column is what the tiles know to leave out, so as many images as may be
    get a text of their own: the first of their positives that no image before them has taken.

    Args:
        positives: (b,) or (b, k) integers from 0 to n - 1, or -1 for none.
        n: Texts.
        device: Of the features.
    """
    named_bk = positives.cpu().numpy().reshape(len(positives), -1).astype(np.int64)
    b = len(named_bk)
    own, is_taken = np.full(b, -1), np.zeros(n, dtype=bool)
    for named in named_bk.T:
        rows = np.flatnonzero((own < 0) & (named >= 0))
        rows = rows[~is_taken[named[rows]]]
        texts, first = np.unique(named[rows], return_index=True)
        own[rows[first]], is_taken[texts] = texts, True
    image_order = np.concatenate([np.flatnonzero(own >= 0), np.flatnonzero(own < 0)])
    text_order = np.concatenate([own[own >= 0], np.flatnonzero(~is_taken)])
    images_e, places = np.nonzero(named_bk >= 0)
    pairs_e = np.unique(images_e * n + named_bk[images_e, places])  # a text named twice counts once
    places_b, places_n = np.argsort(image_order), np.argsort(text_order)

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    def order(places: np.ndarray) -> Tensor | None:
        return None if np.array_equal(places, np.arange(len(places))) else on_device(places)

    return Pairing(
        order(image_order),
        order(text_order),
        int((own >= 0).sum()),
        on_device(places_b[pairs_e // n]),
        on_device(places_n[pairs_e % n]),
    )
