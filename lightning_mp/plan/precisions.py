"""What every parameter costs by precision: weights, gradients, optimizer, copies, buckets."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PRECISIONS", "StaticBytes"]


@dataclass(frozen=True)
class StaticBytes:
    """Bytes of one trained parameter on a rank.

    Args:
        weight: The weight that the optimizer steps, with its residual if it has one.
        copy: A half copy that modules compute with; autocast makes one in each forward.
        gradient: As the optimizer sees it.
        bucket: Of DDP, from which gradients are averaged.
        activations: Dtype that most modules compute in.
        policy: How that dtype comes about: `"none"`, `"autocast"` or `"weights"`.
        widens_states: Whether optimizer states are fp32 whatever the weight is.
    """

    weight: int
    copy: int
    gradient: int
    bucket: int
    activations: str
    policy: str
    widens_states: bool = True

    def at_rest(self, parameters: int, optimizer_bytes: int) -> float:
        """Return the bytes of weights, copies, optimizer states and buckets.

        Args:
            parameters: Number of trained values.
            optimizer_bytes: Of the states of one value in fp32: 8 with Adam, 4 with momentum.
        """
        states = optimizer_bytes if self.widens_states else optimizer_bytes * self.weight // 4
        return float(parameters * (self.weight + self.copy + self.bucket + states))


PRECISIONS = {
    "32-true": StaticBytes(4, 0, 4, 4, "float32", "none"),
    "16-mixed": StaticBytes(4, 2, 4, 4, "float16", "autocast"),
    "bf16-mixed": StaticBytes(4, 2, 4, 4, "bfloat16", "autocast"),
    "BalancedAMP": StaticBytes(4, 2, 4, 4, "float16", "autocast"),
    "PureFP16": StaticBytes(4, 0, 4, 2, "float16", "weights"),
    "bf16-true": StaticBytes(2, 0, 2, 2, "bfloat16", "weights", widens_states=False),
}
"""By Lightning's name of a precision, or by the plugin. `PureFP16` has weight and residual of 2
bytes each, and gradients of 4 from `on_before_optimizer_step` on."""
