"""What can be wrong with the arguments of a contrastive loss, each in a sentence that helps.

Shapes:
    b: images of this rank. n: its texts. k: positives or negatives of an image. D: feature width.
"""

import numbers

import numpy as np
import torch
from torch import Tensor

from lightning_mp._arguments import refuse_values
from lightning_mp.contrastive._call.request import Request
from lightning_mp.numerics.floats import FLOAT_DTYPES

__all__ = ["STATISTICS_PROBLEM", "check_combined_rules", "check_pair_rules", "find_problem"]

STATISTICS_PROBLEM = (
    "Passed `statistics=True` to a loss with several positives of one image or text, with "
    "`negatives` of an image alone, or with `false_negatives`. Statistics are of one pair a row, "
    "among the texts that all images see. Leave it out."
)


def find_problem(request: Request) -> str | None:
    """Return what was passed, what is accepted and the fix; `None` if all is well."""
    image, text, scale, bias = request.image, request.text, request.scale, request.bias
    # In this order: each takes for granted what those before it have looked at.
    return (
        _features_problem("image_features", image)
        or _features_problem("text_features", text)
        or _sides_problem(image, text, request.positives is not None)
        or _scalar_problem("logit_scale", scale)
        or (None if bias is None else _scalar_problem("logit_bias", bias))
        or _ids_problem(request)
        or (None if request.weights is None else _weights_problem(request.weights, image))
        or (None if request.positives is None else _positives_problem(request))
        or (None if request.negatives is None else _negatives_problem(request))
        or _guides_problem(request)
        or _combined_problem(request)
        or (STATISTICS_PROBLEM if request.statistics and not _has_pairs(request) else None)
    )


def _has_pairs(request: Request) -> bool:
    """Return whether rows have one positive each and all have the same negatives."""
    is_whole = request.negatives is None and request.false_negatives == "keep"
    return is_whole and request.duplicates == "mask"


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


def _sides_problem(image_features: Tensor, text_features: Tensor, is_paired: bool) -> str | None:
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


def check_pair_rules(
    owner: object, duplicates: str, label_smoothing: float, false_negatives: str, margin: float
) -> None:
    """Refuse arguments of a constructor that do not go together.

    Raises:
        ValueError: With what to leave out.
    """
    left_out = {"false_negatives": false_negatives, "margin": margin}
    if false_negatives == "keep" and margin:
        reason = (
            "A margin is for negatives that are left out. Pass `false_negatives='absolute'` or "
            "`'relative'`, or leave `margin` out."
        )
        refuse_values(owner, reason, **left_out)
    targets = {"duplicates": duplicates, "label_smoothing": label_smoothing}
    if false_negatives != "keep" and (label_smoothing or duplicates != "mask"):
        reason = "What is left out cannot be a target. Leave `false_negatives` or the others out."
        refuse_values(owner, reason, **left_out, **targets)


def check_combined_rules(
    owner: object,
    partition: str,
    within: str,
    hardness: float,
    duplicates: str,
    label_smoothing: float,
    false_negatives: str,
    directions: str,
) -> None:
    """Refuse arguments of a constructor that do not go with a softmax of several directions.

    Raises:
        ValueError: With what to leave out.
    """
    if within != "none" and partition != "joint":
        reason = (
            "Only a softmax over all directions has a positive for pairs of one side. Pass "
            "`partition='joint'`, or leave `within` out."
        )
        refuse_values(owner, reason, partition=partition, within=within)
    if hardness and directions == "text_to_image":
        reason = "Hardness weighs the negatives of images. Leave one of the two out."
        refuse_values(owner, reason, hardness=hardness, directions=directions)
    if partition != "joint" and not hardness:
        return
    if duplicates != "mask" or label_smoothing or false_negatives != "keep":
        reason = (
            "With `partition='joint'` or `hardness` a pair has one positive, which is all of its "
            "target, and all negatives count. Leave the others out."
        )
        refuse_values(
            owner, reason, partition=partition, hardness=hardness, duplicates=duplicates,
            label_smoothing=label_smoothing, false_negatives=false_negatives,
        )  # fmt: skip


def _combined_problem(request: Request) -> str | None:
    names = [name for name in ("weights", "positives", "negatives") if _given(request, name)]
    names += ["statistics"] if request.statistics else []
    if not request.is_combined or not names:
        return None
    return (
        f"Passed `{names[0]}` to `{request.owner}` with `partition='joint'` or `hardness`, where "
        "all pairs weigh the same and have one positive. Leave it out; texts beyond the images' "
        "own are negatives."
    )


def _given(request: Request, name: str) -> bool:
    return getattr(request, name) is not None


def _ids_problem(request: Request) -> str | None:
    ids, text = request.ids, request.text
    if ids is None:
        if request.duplicates == "mask":
            return None
        return (
            f"Called `ContrastiveLoss(duplicates={request.duplicates!r})` without `ids`, which say "
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


def _positives_problem(request: Request) -> str | None:
    positives, image = request.positives, request.image
    if not isinstance(positives, Tensor):
        return (
            f"Passed `positives` of type {type(positives).__name__}. It must be a tensor of the "
            "texts' row numbers, one or several for each image. Pass `torch.tensor(positives)`."
        )
    if request.duplicates != "mask":
        return (
            f"Passed `positives` to `ContrastiveLoss(duplicates={request.duplicates!r})`, where "
            "`ids` say what they are. Pass one of the two."
        )
    is_integer = not positives.is_floating_point() and not positives.is_complex()
    # A mask is no list of rows, though it is no float either.
    is_integer = is_integer and positives.dtype != torch.bool
    if positives.ndim not in (1, 2) or len(positives) != len(image) or not is_integer:
        return (
            f"Passed `positives` of dtype {positives.dtype} and shape {list(positives.shape)} with "
            f"images of shape {list(image.shape)}. It must be integers of shape [images] or "
            "[images, most texts of one]. Pad with -1 where an image has fewer."
        )
    return None


def _negatives_problem(request: Request) -> str | None:
    negatives, image = request.negatives, request.image
    if request.directions == "text_to_image":
        return (
            "Passed `negatives` to `ContrastiveLoss(directions='text_to_image')`. They are "
            "texts that an image is not to find. Leave one of the two out."
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


def _guides_problem(request: Request) -> str | None:
    image, text = request.image, request.text
    guides = {"guide_image": request.guide_image, "guide_text": request.guide_text}
    given = [name for name, guide in guides.items() if guide is not None]
    if not given:
        return None
    if len(given) == 1 or request.false_negatives == "keep" or request.negatives is not None:
        said = f"Passed `{'` and `'.join(given)}` to `ContrastiveLoss(false_negatives="
        return (
            f"{said}{request.false_negatives!r})`. Guides are features of images and of texts that "
            "judge which negatives are false; `negatives` of an image have none. Pass both, with "
            "'absolute' or 'relative', and such negatives among the texts."
        )
    for (name, guide), features in zip(guides.items(), (image, text), strict=True):
        if not isinstance(guide, Tensor) or guide.ndim != 2 or len(guide) != len(features):
            said = f"type {type(guide).__name__}"
            said = f"shape {list(guide.shape)}" if isinstance(guide, Tensor) else said
            return (
                f"Passed `{name}` of {said} with features of shape {list(features.shape)}. It must "
                "be a tensor with a row for each of them. Pass what the guide's encoder returns."
            )
        if guide.dtype not in FLOAT_DTYPES:
            return f"Passed `{name}` of dtype {guide.dtype}. Pass what the guide's encoder returns."
        problem = _device_problem(name, guide, features)
        if problem is not None:
            return problem
    left, right = request.guide_image, request.guide_text
    if left is not None and right is not None and left.shape[1] != right.shape[1]:
        return (
            f"Passed `guide_image` of shape {list(left.shape)} and `guide_text` of shape "
            f"{list(right.shape)}. Both must have one width. Take them from one guide."
        )
    return None


def _device_problem(name: str, value: Tensor, features: Tensor) -> str | None:
    if value.device == features.device:
        return None
    return (
        f"Passed `{name}` on {value.device} with features on {features.device}. Both must be "
        f"on one device. Move them, such as `{name}.to(features.device)`."
    )
