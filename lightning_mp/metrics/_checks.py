"""Checks of the features and ids that are passed to a metric."""

import torch
from torch import Tensor

from lightning_mp._arguments import Check, refuse_values
from lightning_mp.numerics.floats import FLOAT_DTYPES

__all__ = ["TOP_K", "check_features", "check_ids", "check_rows", "check_value"]

TOP_K = Check("[1, inf)", least=1, fix="Pass `top_k=[1, 5]`.")
_ID_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_value(metric: object, value: str | None, names: list[str]) -> None:
    """Raise if `value` does not name a value that the metric returns."""
    if value is not None and value not in names:
        reason = f"`value` must be one of {names}. Leave it out to get all of them."
        refuse_values(metric, reason, value=value)


def check_rows(metric: str, name: str, features: Tensor) -> None:
    """Raise unless features have shape (n, D) and a floating-point dtype."""
    if not isinstance(features, Tensor):
        raise ValueError(
            f"Passed `{name}` as {type(features).__name__}. `{metric}` accepts a floating-point "
            "tensor of shape (n, D): stack the features."
        )
    if features.ndim != 2 or not features.shape[1] or features.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"Passed `{name}` of shape {tuple(features.shape)} and dtype {features.dtype}. "
            f"`{metric}` accepts (n, D) in float16, bfloat16, float32 or float64: pool to one "
            "vector per row, or cast."
        )


def check_features(metric: str, image_features: Tensor, text_features: Tensor) -> None:
    """Raise unless features are (n, D) and (m, D) in one floating-point dtype on one device."""
    check_rows(metric, "image_features", image_features)
    check_rows(metric, "text_features", text_features)
    image, text = image_features, text_features
    if (image.shape[1], image.dtype, image.device) != (text.shape[1], text.dtype, text.device):
        raise ValueError(
            f"Passed image features of width {image.shape[1]}, {image.dtype} on {image.device} and "
            f"text features of width {text.shape[1]}, {text.dtype} on {text.device}. `{metric}` "
            "requires equal widths, dtypes and devices: project to one width, or use `.to()`."
        )


def check_ids(metric: str, name: str, ids: Tensor, n_rows: int) -> None:
    """Raise unless there is one integer per row."""
    if not isinstance(ids, Tensor) or ids.dtype not in _ID_DTYPES or ids.shape != (n_rows,):
        passed = (
            f"of shape {tuple(ids.shape)} and dtype {ids.dtype}"
            if isinstance(ids, Tensor)
            else f"as {type(ids).__name__}"
        )
        raise ValueError(
            f"Passed `{name}` {passed} for {n_rows} rows. `{metric}` accepts one integer per row: "
            f"write `torch.tensor([...])` of shape ({n_rows},), dtype torch.int64."
        )
