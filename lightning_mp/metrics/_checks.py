"""What can be wrong with the features and ids that are passed to a metric."""

import torch
from torch import Tensor

from lightning_mp.numerics.floats import FLOAT_DTYPES

__all__ = ["check_features", "check_ids"]

_ID_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_features(image_features: Tensor, text_features: Tensor) -> None:
    """Refuse what is not (n, D) and (m, D) of one floating-point dtype on one device.

    Raises:
        ValueError: With what is accepted.
    """
    for name, features in (("image_features", image_features), ("text_features", text_features)):
        if not isinstance(features, Tensor):
            raise ValueError(
                f"Passed `{name}` as {type(features).__name__}. `ContrastiveRecall` accepts a "
                "floating-point tensor of shape (n, D): stack the features."
            )
        if features.ndim != 2 or not features.shape[1] or features.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"Passed `{name}` of shape {tuple(features.shape)} and dtype {features.dtype}. "
                "`ContrastiveRecall` accepts (n, D) in float16, bfloat16, float32 or float64: pool "
                "to one vector a row, or cast."
            )
    image, text = image_features, text_features
    if (image.shape[1], image.dtype, image.device) != (text.shape[1], text.dtype, text.device):
        raise ValueError(
            f"Passed image features of width {image.shape[1]}, {image.dtype} on {image.device} and "
            f"text features of width {text.shape[1]}, {text.dtype} on {text.device}. "
            "`ContrastiveRecall` needs the same of both: project to one width, or use `.to()`."
        )


def check_ids(side: str, ids: Tensor, n_rows: int, *, what: str = "ids") -> None:
    """Refuse what is not one integer a row.

    Raises:
        ValueError: With what is accepted.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in _ID_DTYPES or ids.shape != (n_rows,):
        passed = (
            f"of shape {tuple(ids.shape)} and dtype {ids.dtype}"
            if isinstance(ids, Tensor)
            else f"as {type(ids).__name__}"
        )
        raise ValueError(
            f"Passed `{side}_{what}` {passed} for {n_rows} rows. `ContrastiveRecall` accepts one "
            f"integer a row: write `torch.tensor([...])` of shape ({n_rows},), dtype torch.int64."
        )
