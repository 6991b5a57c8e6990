"""What can be wrong with the arguments of a contrastive loss, each in a sentence that helps."""

import numbers

import numpy as np
from torch import Tensor

from lightning_mp.contrastive._call.pair_options import PairOptions
from lightning_mp.contrastive._call.pair_problems import find_pair_problem
from lightning_mp.numerics.floats import FLOAT_DTYPES

__all__ = ["find_problem"]


def find_problem(
    image_features: object,
    text_features: object,
    logit_scale: object,
    logit_bias: object,
    pairs: PairOptions,
) -> str | None:
    """Return what was passed, what is accepted and the fix; `None` if all is well."""
    return (
        _features_problem("image_features", image_features)
        or _features_problem("text_features", text_features)
        or _pair_problem(image_features, text_features, pairs.positives is not None)
        or _scalar_problem("logit_scale", logit_scale)
        or (None if logit_bias is None else _scalar_problem("logit_bias", logit_bias))
        or find_pair_problem(pairs, image_features, text_features)  # type: ignore[arg-type]
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


def _pair_problem(image_features: object, text_features: object, is_paired: bool) -> str | None:
    if not isinstance(image_features, Tensor) or not isinstance(text_features, Tensor):
        return None
    shapes = (
        f"Passed `image_features` of shape {list(image_features.shape)} and `text_features` of "
        f"shape {list(text_features.shape)}."
    )
    if image_features.shape[1] != text_features.shape[1]:
        return f"{shapes} Both must have one width. Project both to it."
    if image_features.shape[0] > text_features.shape[0] and not is_paired:
        return (
            f"{shapes} Row i of one belongs to row i of the other, so there must be a text for "
            "each image; further texts are negatives of all images. Say in `positives` which texts "
            "belong to an image instead, or repeat an image in one row for each of its texts, with "
            "the same value in `ids`."
        )
    if image_features.device != text_features.device:
        return (
            f"Passed `image_features` on {image_features.device} and `text_features` on "
            f"{text_features.device}. Both must be on one device. Move one of them, such as "
            "`text_features.to(image_features.device)`."
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
