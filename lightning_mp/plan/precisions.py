"""What every parameter costs by precision: weights, gradients, optimizer, copies, buckets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PRECISIONS", "StaticBytes"]


@dataclass(frozen=True)
class StaticBytes:
    """Bytes of one trained parameter on a rank."""

    weight: int  # the weight that the optimizer steps, with its residual if it has one
    copy: int  # a half copy that modules compute with; autocast makes one in each forward
    gradient: int  # as the optimizer sees it
    bucket: int  # of DDP, from which gradients are averaged
    activations: str  # dtype that most modules compute in
    policy: str  # how that dtype comes about: `"none"`, `"autocast"` or `"weights"`
    stepped: str = "float32"  # dtype of the weights that the optimizer is given

    def at_rest(self, parameters: int, states: Mapping[str, int]) -> float:
        """Return the bytes of weights, copies, optimizer states and buckets."""
        weights = parameters * (self.weight + self.copy + self.bucket)
        return float(weights + states[self.stepped])


PRECISIONS = {
    "32-true": StaticBytes(4, 0, 4, 4, "float32", "none"),
    "16-mixed": StaticBytes(4, 2, 4, 4, "float16", "autocast"),
    "bf16-mixed": StaticBytes(4, 2, 4, 4, "bfloat16", "autocast"),
    "BalancedAMP": StaticBytes(4, 2, 4, 4, "float16", "autocast"),
    "PureFP16": StaticBytes(4, 0, 4, 2, "float16", "weights"),
    "bf16-true": StaticBytes(2, 0, 2, 2, "bfloat16", "weights", stepped="bfloat16"),
}
"""By Lightning's name of a precision, or by the plugin. `PureFP16` has weight and residual of 2
bytes each, and gradients of 4 from `on_before_optimizer_step` on."""
