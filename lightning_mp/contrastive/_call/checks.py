"""Checks of the arguments of a loss. Each error says what is wrong and how to fix it."""

import numbers
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from lightning_mp._arguments import refuse_values
from lightning_mp.contrastive._call.request import Request
from lightning_mp.numerics.floats import FLOAT_DTYPES

__all__ = ["STATISTICS_PROBLEM", "check_rules", "find_problem"]

STATISTICS_PROBLEM = (
    "Passed `statistics=True` to a loss with several positives of one image or text, with "
    "`negatives` of an image alone, or with `false_negatives`. Statistics need one positive per "
    "image and the same negatives for all images. Leave `statistics` out."
)


def find_problem(request: Request) -> str | None:
    """Return what was passed, what is accepted and the fix; `None` for valid arguments."""
    image, text, bias = request.image, request.text, request.bias
    # In this order, because each check relies on the ones before it.
    return (
        _features_problem("image_features", image)
        or _features_problem("text_features", text)
        or _shapes_problem(image, text, request.positives is not None)
        or _scalar_problem("logit_scale", request.scale)
        or (None if bias is None else _scalar_problem("logit_bias", bias))
        or _ids_problem(request)
        or (None if request.weights is None else _weights_problem(request.weights, image))
        or (None if request.positives is None else _positives_problem(request))
        or (None if request.negatives is None else _negatives_problem(request))
        or _guides_problem(request)
        or _combined_problem(request)
        or _statistics_problem(request)
    )


def _statistics_problem(request: Request) -> str | None:
    has_one_positive = request.negatives is None and request.duplicates == "mask"
    if not request.statistics or (has_one_positive and request.false_negatives == "keep"):
        return None
    return STATISTICS_PROBLEM


def _features_problem(name: str, features: object) -> str | None:
    if not isinstance(features, Tensor):
        fix = "the encoder's output tensor, such as its `pooler_output`"
        return _type_problem(name, features, "shape (batch, width)", fix)
    if hasattr(features, "full_tensor"):
        return (
            f"Passed `{name}` as a DTensor. Each rank passes its own rows. Pass `{name}.to_local()`"
            f" if ranks hold different rows, and `{name}.full_tensor()` otherwise."
        )
    shape = list(features.shape)
    if features.ndim != 2:
        return (
            f"Passed `{name}` of shape {shape}. It must be of shape (batch, width). Pool or "
            "flatten the encoder's output first."
        )
    if 0 in shape:
        return (
            f"Passed `{name}` of shape {shape}. An empty batch has no loss. Pass at least one "
            "pair; `DataLoader(drop_last=True)` drops a short last batch."
        )
    return _dtype_problem(name, features)


def _type_problem(name: str, value: object, content: str, fix: str) -> str:
    return (
        f"Passed `{name}` of type {type(value).__name__}. It must be a tensor of {content}. "
        f"Pass {fix}."
    )


def _dtype_problem(name: str, features: Tensor) -> str | None:
    if features.dtype in FLOAT_DTYPES:
        return None
    return (
        f"Passed `{name}` of dtype {features.dtype}. It must be one of "
        f"{', '.join(map(str, FLOAT_DTYPES))}. Pass the encoder's output, not its input."
    )


def _device_problem(name: str, value: Tensor, features: Tensor) -> str | None:
    if value.device == features.device:
        return None
    return (
        f"Passed `{name}` on {value.device} with features on {features.device}. Both must be "
        f"on one device. Move it with `{name}.to(features.device)`."
    )


def _shapes_problem(image: Tensor, text: Tensor, has_positives: bool) -> str | None:
    shapes = (
        f"Passed `image_features` of shape {list(image.shape)} and `text_features` of shape "
        f"{list(text.shape)}."
    )
    if image.shape[1] != text.shape[1]:
        return f"{shapes} Both must have one width. Project both to it."
    if image.shape[0] > text.shape[0] and not has_positives:
        return (
            f"{shapes} Text i belongs to image i, so there must be a text for each image; extra "
            "texts are negatives of all images. If images share a text, name the text of each "
            "image in `positives`; if an image has several texts, repeat the image for each of "
            "them, with the same value in `ids`."
        )
    return _device_problem("text_features", text, image)


def _scalar_problem(name: str, value: object) -> str | None:
    if isinstance(value, Tensor):
        if hasattr(value, "full_tensor"):
            return f"Passed `{name}` as a DTensor. It must be a value. Pass `{name}.full_tensor()`."
        if value.numel() == 1 and value.is_floating_point():
            return None
        what = f"dtype {value.dtype} and shape {list(value.shape)}"
    elif isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind == "f":
        return None
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        return None  # includes numpy's scalars
    else:
        what = f"type {type(value).__name__}"
    return (
        f"Passed `{name}` of {what}. It must be one floating-point value. Pass a 0-d tensor, such "
        f"as `self.{name}{'.exp()' if name == 'logit_scale' else ''}`, or a float."
    )


def check_rules(loss: Any) -> None:
    """Refuse constructor arguments of a loss that contradict each other."""

    def refuse(reason: str, *names: str) -> NoReturn:
        refuse_values(loss, reason, **{name: getattr(loss, name) for name in names})

    masks, is_joint = loss.false_negatives != "keep", loss.partition == "joint"
    if loss.margin and not masks:
        refuse(
            "`margin` applies to `false_negatives` only. Pass `false_negatives='absolute'` or "
            "`'relative'`, or leave `margin` out.",
            "false_negatives", "margin",
        )  # fmt: skip
    has_targets = bool(loss.label_smoothing) or loss.duplicates != "mask"
    if masks and has_targets:
        refuse(
            "A masked pair cannot be part of a target. Leave out `false_negatives`, or "
            "`duplicates` and `label_smoothing`.",
            "false_negatives", "margin", "duplicates", "label_smoothing",
        )  # fmt: skip
    if loss.within != "none" and not is_joint:
        refuse(
            "Only a softmax over all directions has a positive for pairs of one tower. Pass "
            "`partition='joint'`, or leave `within` out.",
            "partition", "within",
        )  # fmt: skip
    if loss.hardness and loss.directions == "text_to_image":
        refuse(
            "`hardness` weights the negatives of images. Leave one of the two out.",
            "hardness", "directions",
        )  # fmt: skip
    if (is_joint or loss.hardness) and (has_targets or masks):
        refuse(
            "With `partition='joint'` or `hardness`, a pair has one positive as its whole target, "
            "and all negatives count. Leave the other arguments out.",
            "partition", "hardness", "duplicates", "label_smoothing", "false_negatives",
        )  # fmt: skip


def _combined_problem(request: Request) -> str | None:
    names = ("weights", "positives", "negatives", "statistics")
    values = {name: getattr(request, name) for name in names}
    given = [name for name, value in values.items() if value is not None and value is not False]
    if not request.is_combined or not given:
        return None
    return (
        f"Passed `{given[0]}` to `{request.owner}` with `partition='joint'` or `hardness`, where "
        "all pairs have the same weight and one positive. Leave it out; additional texts are "
        "negatives."
    )


def _is_integer(tensor: Tensor) -> bool:
    # A mask of bool is not a list of row numbers.
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _ids_problem(request: Request) -> str | None:
    ids, text = request.ids, request.text
    if ids is None:
        if request.duplicates == "mask":
            return None
        return (
            f"Called `ContrastiveLoss(duplicates={request.duplicates!r})` without `ids`, which "
            "define the positives. Pass `ids=...` in the call, or leave `duplicates` out."
        )
    if not isinstance(ids, Tensor):
        return _type_problem("ids", ids, "integers, one for each text", "`torch.tensor(ids)`")
    if ids.shape != text.shape[:1] or ids.is_floating_point() or ids.is_complex():
        return (
            f"Passed `ids` of dtype {ids.dtype} and shape {list(ids.shape)} with texts of shape "
            f"{list(text.shape)}. It must be integers of shape [texts]. Pass one number per text "
            "that is equal for the same image on every rank, such as a hash of its name."
        )
    return _device_problem("ids", ids, text)


def _weights_problem(weights: Tensor, image: Tensor) -> str | None:
    if not isinstance(weights, Tensor):
        content = "numbers that are not negative, one for each image"
        return _type_problem("weights", weights, content, "`torch.tensor(weights)`")
    if weights.shape != image.shape[:1] or weights.is_complex() or weights.dtype == torch.bool:
        return (
            f"Passed `weights` of dtype {weights.dtype} and shape {list(weights.shape)} with "
            f"images of shape {list(image.shape)}. It must be numbers of shape [images]. Pass one "
            "weight for each image; convert a mask with `mask.float()`."
        )
    if weights.requires_grad:
        return (
            "Passed `weights` that require a gradient, but receive none. Pass `weights.detach()`."
        )
    return _device_problem("weights", weights, image)


def _positives_problem(request: Request) -> str | None:
    positives, image = request.positives, request.image
    if not isinstance(positives, Tensor):
        content = "the texts' row numbers, one or several for each image"
        return _type_problem("positives", positives, content, "`torch.tensor(positives)`")
    if request.duplicates != "mask":
        return (
            f"Passed `positives` to `ContrastiveLoss(duplicates={request.duplicates!r})`, where "
            "`ids` define the positives. Pass one of the two."
        )
    if positives.ndim not in (1, 2) or len(positives) != len(image) or not _is_integer(positives):
        return (
            f"Passed `positives` of dtype {positives.dtype} and shape {list(positives.shape)} with "
            f"images of shape {list(image.shape)}. It must be integers of shape [images] or "
            "[images, most texts of one image]. Pad with -1 where an image has fewer."
        )
    return None


def _negatives_problem(request: Request) -> str | None:
    negatives, image = request.negatives, request.image
    if request.directions == "text_to_image":
        return (
            "Passed `negatives` to `ContrastiveLoss(directions='text_to_image')`. They are "
            "negative texts of an image, which this direction does not use. Leave one of the two "
            "out."
        )
    if not isinstance(negatives, Tensor):
        content = "shape (batch, negatives of each image, width)"
        return _type_problem("negatives", negatives, content, "`torch.stack(negatives, 1)`")
    shape = list(negatives.shape)
    if negatives.ndim != 3 or [shape[0], shape[2]] != list(image.shape):
        return (
            f"Passed `negatives` of shape {shape} with images of shape {list(image.shape)}. It "
            f"must be of shape [{len(image)}, negatives of each image, {image.shape[1]}]. Append "
            "negatives of all images to `text_features` instead."
        )
    return _dtype_problem("negatives", negatives) or _device_problem("negatives", negatives, image)


def _guides_problem(request: Request) -> str | None:
    image, text = request.image, request.text
    guides = {"guide_image": request.guide_image, "guide_text": request.guide_text}
    given = [name for name, guide in guides.items() if guide is not None]
    if not given:
        return None
    if len(given) == 1 or request.false_negatives == "keep" or request.negatives is not None:
        return (
            f"Passed `{'` and `'.join(given)}` to `ContrastiveLoss(false_negatives="
            f"{request.false_negatives!r})`. The guide's image and text features identify false "
            "negatives, but `negatives` of an image have no guide features. Pass both guides, "
            "with 'absolute' or 'relative', and append the negatives to the texts."
        )
    for (name, guide), features in zip(guides.items(), (image, text), strict=True):
        if not isinstance(guide, Tensor) or guide.ndim != 2 or len(guide) != len(features):
            what = f"type {type(guide).__name__}"
            if isinstance(guide, Tensor):
                what = f"shape {list(guide.shape)}"
            return (
                f"Passed `{name}` of {what} with features of shape {list(features.shape)}. It must "
                "be a tensor with one row per row of the features. Pass the guide's output."
            )
        problem = _dtype_problem(name, guide) or _device_problem(name, guide, features)
        if problem is not None:
            return problem
    left, right = request.guide_image, request.guide_text
    if left is not None and right is not None and left.shape[1] != right.shape[1]:
        return (
            f"Passed `guide_image` of shape {list(left.shape)} and `guide_text` of shape "
            f"{list(right.shape)}. Both must have one width. Use one guide for both."
        )
    return None
