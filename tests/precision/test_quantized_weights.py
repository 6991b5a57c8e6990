"""Frozen weights of tensor subclasses, such as the quantized weights of torchao."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.pure_fp16 import PureFP16
from tests.precision.models import Regression, fit, loader

aten = torch.ops.aten


class Quantized(Tensor):
    """A matrix in int8, which can be multiplied and copied but not be converted."""

    stored: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor, scale: Tensor) -> "Quantized":
        tensor: Any = Tensor._make_wrapper_subclass(cls, stored.shape, dtype=scale.dtype)
        tensor.stored, tensor.scale = stored, scale
        return tensor

    def __init__(self, stored: Tensor, scale: Tensor) -> None: ...

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["stored", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "Quantized":
        return Quantized(**inner)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = args
            return F.linear(x, weight.stored.to(x.dtype) * weight.scale.to(x.dtype), bias)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (aten.detach.default, aten._to_copy.default):
            raise NotImplementedError(func)
        return cls(args[0].stored, args[0].scale)


class OnQuantized(Regression):
    def on_train_batch_end(self, *_: Any) -> None: ...


def network() -> nn.Module:
    base = nn.Linear(8, 8200)  # above the size up to which autocast casts every weight
    scale = base.weight.detach().abs().max() / 127
    stored = (base.weight.detach() / scale).round().to(torch.int8)
    base.weight = nn.Parameter(Quantized(stored, scale), requires_grad=False)
    return nn.Sequential(base, nn.GELU(), nn.Linear(8200, 1))


@pytest.mark.parametrize("plugin", [BalancedAMP, PureFP16])
def test_frozen_quantized_weights_stay_as_they_are(plugin: Callable[[], Any]) -> None:
    model, in_fp32 = (OnQuantized(network, lambda p: torch.optim.SGD(p, 1e-4)) for _ in range(2))
    fit(in_fp32, None, loader(4))
    fit(model, plugin(), loader(4))
    assert type(model.network[0].weight.data) is Quantized
    assert model.losses == pytest.approx(in_fp32.losses, rel=8 * 2**-11)  # eight roundings
