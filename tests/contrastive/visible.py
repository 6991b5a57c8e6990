"""Losses without custom operators, which hide their ops from dispatch modes."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_mp.contrastive import _operator
from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._tiles.tile_backend import TileBackend


class _Visible(torch.autograd.Function):
    """The operator as an `autograd.Function`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _operator._run(*inputs)
        _operator._save_for_backward(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        return _operator._differentiate(ctx, *cotangents)


@contextlib.contextmanager
def visible() -> Iterator[None]:
    """Replace the operators of losses by `autograd.Function`s within the context."""
    with (
        mock.patch.object(_operator, "contrastive_loss", _Visible.apply),
        mock.patch.object(_operator, "_on_host", _Visible.apply),
        mock.patch.object(_operator, "finish", _operator.finish_gradients),
    ):
        yield


def loss_on(tiles: TileBackend, image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Return the loss of one process on a given tile backend."""
    with mock.patch.object(Request, "tiles", return_value=tiles):
        loss, _ = _operator.loss_of(Request(image, text, scale).checked())
    return loss
