"""The tensors that one launch of `SafeAdamW` steps, and the choice of what steps them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_mp.numerics.tensor_stats import local_shard
from lightning_mp.numerics.triton_support import triton_problem
from lightning_mp.optim._adamw.foreach import AdamWOptions, foreach_adamw_step

__all__ = ["AdamWBatch"]


@dataclass
class AdamWBatch:
    """Parameters of one device, dtype and dtype of gradients, with their states."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    residuals: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)

    def append(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], *, as_shard: bool
    ) -> None:
        """Add a parameter: of a DTensor its local shard, or the whole, whose RMS a clip needs."""
        lists = [self.params, self.grads, self.exp_avgs, self.exp_avg_sqs]
        tensors = [parameter, gradient, state["exp_avg"], state["exp_avg_sq"]]
        if "residual" in state:
            lists.append(self.residuals)
            tensors.append(state["residual"])
        for collected, tensor in zip(lists, tensors, strict=True):
            collected.append(local_shard(tensor) if as_shard else tensor)
        self.steps.append(local_shard(state["step"]))

    def step(
        self,
        group: dict[str, Any],
        seed: int,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Step them in place, step counts included, or nothing of it where `found_inf` is not 0.

        The scale, which gradients are divided by, and `found_inf` may be on any device.
        """
        device = self.params[0].device
        if grad_scale is not None:
            grad_scale = grad_scale.reshape(()).to(device, non_blocking=True)
        if found_inf is not None:
            # GradScaler adds the signs of all devices, so that it can be more than 1.
            found_inf = (found_inf.reshape(()) != 0).to(device, torch.float32, non_blocking=True)
        torch._foreach_add_(self.steps, 1)
        _step_function(self.params[0], group)(
            self.params,
            self.grads,
            self.exp_avgs,
            self.exp_avg_sqs,
            self.residuals or None,
            self.steps,
            AdamWOptions(
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                maximize=group["maximize"],
                rule=group["rule"],
                write_back=group["write_back"],
                seed=seed,
                clip_update_rms=group["clip_update_rms"],
                grad_scale=grad_scale,
                found_inf=found_inf,
            ),
        )
        if found_inf is not None:
            torch._foreach_sub_(self.steps, [found_inf] * len(self.steps))


def _step_function(parameter: Tensor, group: dict[str, Any]) -> Callable[..., None]:
    is_fused = group["fused"]
    if is_fused is None:
        is_fused = group["foreach"] is None and triton_problem(parameter.device) is None
    # A DTensor arrives here as such only for the clip.
    if parameter.dtype == torch.float64 or hasattr(parameter, "to_local") or not is_fused:
        return foreach_adamw_step
    # Kernels are defined on import, and Triton need not be installed.
    from lightning_mp.optim._adamw.fused import fused_adamw_step

    return fused_adamw_step
