"""What a contrastive loss makes of its arguments; what can be wrong, in a sentence that helps."""

import numbers

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_mp.numerics.floats import FLOAT_DTYPES, accumulation_dtype

__all__ = ["as_tensor", "check_derivatives", "find_problem", "in_one_dtype"]


def find_problem(
    image_features: object,
    text_features: object,
    logit_scale: object,
    logit_bias: object,
    ids: object = None,
) -> str | None:
    """Return what was passed, what is accepted and the fix; `None` if all is well."""
    return (
        _features_problem("image_features", image_features)
        or _features_problem("text_features", text_features)
        or _pair_problem(image_features, text_features)
        or _scalar_problem("logit_scale", logit_scale)
        or (None if logit_bias is None else _scalar_problem("logit_bias", logit_bias))
        or (None if ids is None else _ids_problem(text_features, ids))
    )


def as_tensor(value: Tensor | float, like: Tensor) -> Tensor:
    """Return a tensor on the device of `like`; a parameter elsewhere still gets its gradient."""
    if isinstance(value, Tensor):
        return value.to(like.device)
    if isinstance(value, np.ndarray):
        value = value.item()
    return torch.tensor(float(value), dtype=accumulation_dtype(like.dtype), device=like.device)


def in_one_dtype(image_bD: Tensor, text_bD: Tensor) -> tuple[Tensor, Tensor]:
    """Return features in the wider of their dtypes; each gets its gradient in its own."""
    are_floats = all(isinstance(x, Tensor) and x.dtype in FLOAT_DTYPES for x in (image_bD, text_bD))
    if not are_floats or image_bD.dtype == text_bD.dtype:
        return image_bD, text_bD
    dtype = torch.promote_types(image_bD.dtype, text_bD.dtype)
    return image_bD.to(dtype), text_bD.to(dtype)


def check_derivatives(*inputs: object) -> None:
    """Refuse derivatives that would come out as zero without a word."""
    is_dual = any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in inputs
    )
    if is_dual or torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "Called `ContrastiveLoss` in forward-mode AD or inside a transform of `torch.func`. It "
            "has a plain backward only. Take its gradient with `backward()` or "
            "`torch.autograd.grad`."
        )


def _features_problem(name: str, features: object) -> str | None:
    if not isinstance(features, Tensor):
        return (
            f"Passed `{name}` of type {type(features).__name__}. It must be a tensor of shape "
            "(batch, width). Pass what the encoder returns, such as its `pooler_output`."
        )
    shape = list(features.shape)
    if features.ndim != 2:
        return (
            f"Passed `{name}` of shape {shape}. It must be of shape (batch, width). Pool or "
            "flatten the encoder's output first."
        )
    if features.dtype not in FLOAT_DTYPES:
        return (
            f"Passed `{name}` of dtype {features.dtype}. It must be one of "
            f"{', '.join(map(str, FLOAT_DTYPES))}. Pass the encoder's output, not its input."
        )
    if 0 in shape:
        return (
            f"Passed `{name}` of shape {shape}. An empty batch has no loss. Pass at least one "
            "pair; `DataLoader(drop_last=True)` keeps a short last batch away."
        )
    return None


def _pair_problem(image_features: object, text_features: object) -> str | None:
    if not isinstance(image_features, Tensor) or not isinstance(text_features, Tensor):
        return None
    shapes = (
        f"Passed `image_features` of shape {list(image_features.shape)} and `text_features` of "
        f"shape {list(text_features.shape)}."
    )
    if image_features.shape[1] != text_features.shape[1]:
        return f"{shapes} Both must have one width. Project both to it."
    if image_features.shape[0] > text_features.shape[0]:
        return (
            f"{shapes} Row i of one belongs to row i of the other, so there must be a text for "
            "each image; what texts there are beside are negatives of all images. An image with "
            "several texts stands in one row for each, with the same value in `ids`, or its own "
            "texts would be its negatives."
        )
    if image_features.device != text_features.device:
        return (
            f"Passed `image_features` on {image_features.device} and `text_features` on "
            f"{text_features.device}. Both must be on one device. Move one of them, such as "
            "`text_features.to(image_features.device)`."
        )
    return None


def _ids_problem(features: object, ids: object) -> str | None:
    if not isinstance(ids, Tensor) or not isinstance(features, Tensor):
        return (
            f"Passed `ids` of type {type(ids).__name__}. It must be a tensor of integers, one for "
            "each text. Pass `torch.tensor(ids)`."
        )
    is_integer = not ids.is_floating_point() and not ids.is_complex()
    if ids.shape != features.shape[:1] or not is_integer:
        return (
            f"Passed `ids` of dtype {ids.dtype} and shape {list(ids.shape)} with texts of shape "
            f"{list(features.shape)}. It must be integers of shape [texts]. Number what the "
            "rows show, the same for the same image on every rank; a hash of its name will do."
        )
    if ids.device != features.device:
        return (
            f"Passed `ids` on {ids.device} with features on {features.device}. Both must be "
            "on one device. Move them, such as `ids.to(features.device)`."
        )
    return None


def _scalar_problem(name: str, value: object) -> str | None:
    if isinstance(value, Tensor):
        if value.numel() == 1 and value.is_floating_point():
            return None
        what = f"dtype {value.dtype} and shape {list(value.shape)}"
    elif isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind == "f":
        return None
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        return None  # also numpy's numbers
    else:
        what = f"type {type(value).__name__}"
    return (
        f"Passed `{name}` of {what}. It must be one floating-point value. Pass a 0-d tensor, such "
        f"as `self.{name}{'.exp()' if name == 'logit_scale' else ''}`, or a float."
    )
