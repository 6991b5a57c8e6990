"""The accepted values of the losses' string arguments."""

from typing import Literal

__all__ = [
    "Backend",
    "Directions",
    "Duplicates",
    "ExchangeName",
    "FalseNegatives",
    "Partition",
    "TileDtype",
    "Within",
]

Backend = Literal["auto", "triton", "torch"]
Directions = Literal["both", "image_to_text", "text_to_image"]
Duplicates = Literal["mask", "multi_positive"]
ExchangeName = Literal["slices", "ring"]
FalseNegatives = Literal["keep", "absolute", "relative"]
Partition = Literal["each", "joint"]
TileDtype = Literal["auto", "bf16", "fp16", "tf32", "fp32"]
Within = Literal["none", "image", "text", "both"]
