"""Reordering of images and texts by `positives`, so that text i is a positive of image i."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_mp.contrastive._call.checks import STATISTICS_PROBLEM
from lightning_mp.contrastive._call.request import Request
from lightning_mp.numerics.async_readback import send

__all__ = ["Pairing", "paired"]


class Pairing(NamedTuple):
    """The order of images and texts, `None` if they keep it, and the positive pairs in it."""

    image_order: Tensor | None
    text_order: Tensor | None
    matched: int  # images with a positive of their own: text i belongs to image i for i < matched
    images_e: Tensor
    texts_e: Tensor
    others: Tensor  # numbers of all other pairs


def paired(request: Request, positives: Tensor) -> tuple[str | None, Request, Pairing | None]:
    """Return an error, or `None`, the request in the order of the pairing, and the pairing.

    The host reads the positives.
    """
    positives = positives.cpu()
    # Checked first, because the pairing uses positives as indices.
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
    if request.statistics and len(pairing.others):
        return STATISTICS_PROBLEM
    if len(request.image) == pairing.matched and not len(pairing.others):  # one to one
        return None
    if request.false_negatives != "keep":
        return (
            "Passed `positives` that do not pair every image with exactly one text of its own, to "
            f"`{request.owner}(false_negatives={request.false_negatives!r})`, which compares with "
            "the one positive of each row and column. Leave one of the two out."
        )
    if request.ids is not None:
        return (
            "Passed `ids` with `positives` that do not pair every image with exactly one text of "
            "its own, so it is ambiguous which pairs of equal ids are negatives. Name all texts "
            "of an image in `positives`, padded with -1, and leave `ids` out."
        )
    return None


def _range_problem(positives: Tensor, n: int) -> str | None:
    least, most = (int(x) for x in positives.long().aminmax()) if positives.numel() else (-1, -1)
    if least >= -1 and most < n:
        return None
    return (
        f"Passed `positives` from {least} to {most} with {n} texts on this rank. They must be row "
        "numbers of this rank's texts, or -1 for none. Count from its first text."
    )


def _pair_up(positives: Tensor, n: int, device: torch.device) -> Pairing:
    """Return the pairing of some `positives`, (b,) or (b, k), -1 for none.

    Tiles mask the positives on one diagonal. Therefore as many images as possible get a text of
    their own: the first of their positives that no image before them has taken.
    """
    # 64 bits, because pairs are numbered up to b n.
    named_bk = positives.numpy().reshape(len(positives), -1).astype(np.int64)
    b = len(named_bk)
    # On the host, because which text is free depends on all earlier images.
    own, is_taken = np.full(b, -1), np.zeros(n, dtype=bool)
    # k steps of numpy, one per choice, instead of a Python step per image.
    for named in named_bk.T:
        rows = np.flatnonzero((own < 0) & (named >= 0))
        rows = rows[~is_taken[named[rows]]]
        # If several images name one text, the first image gets it.
        texts, first = np.unique(named[rows], return_index=True)
        own[rows[first]], is_taken[texts] = texts, True
    image_order = np.concatenate([np.flatnonzero(own >= 0), np.flatnonzero(own < 0)])
    text_order = np.concatenate([own[own >= 0], np.flatnonzero(~is_taken)])
    images_e, places = np.nonzero(named_bk >= 0)
    # A text that is named twice counts once.
    pairs_e = np.unique(images_e * n + named_bk[images_e, places])
    # The inverse of an order maps old places to new ones.
    places_b, places_n = np.argsort(image_order), np.argsort(text_order)
    matched = int((own >= 0).sum())
    images_e, texts_e = places_b[pairs_e // n], places_n[pairs_e % n]

    def on_device(values: np.ndarray) -> Tensor:
        return send(torch.from_numpy(values), device)

    def order(places: np.ndarray) -> Tensor | None:
        # Features that keep their order are not copied.
        return None if np.array_equal(places, np.arange(len(places))) else on_device(places)

    return Pairing(
        order(image_order), order(text_order), matched, on_device(images_e), on_device(texts_e),
        # On the host, because the device would have to tell the number of others.
        on_device(np.flatnonzero((images_e != texts_e) | (images_e >= matched))),
    )  # fmt: skip
