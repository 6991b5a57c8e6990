"""`ModelParallelBalancedAMP`: `BalancedAMP` for ModelParallelStrategy, on DTensor shards."""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.numerics.floats import HALF_DTYPES
from lightning_mp.precision.fsdp import ShardedBalancedAMP

__all__ = ["ModelParallelBalancedAMP"]


@explains_arguments()
class ModelParallelBalancedAMP(ShardedBalancedAMP):
    """Trains with `fully_shard` on half working weights, fp32 shards and fp32 norms.

    `ModelParallelStrategy` takes no `precision="16-mixed"`: with a scaler that sees its own shards
    only, one rank steps where another skips. Here all ranks skip, as in `FSDPBalancedAMP`, and clip
    unscaled gradients by the norm over all ranks. Arguments mean what those of `BalancedAMP` do.

    The model shards itself in `configure_model`, with the policies of this plugin:

        def configure_model(self):
            plugin, mesh = self.trainer.precision_plugin, self.device_mesh["data_parallel"]
            plugin.shard_fp32_modules(self, mesh)
            for block in self.network.blocks:
                fully_shard(block, mesh=mesh, mp_policy=plugin.mp_policy)
            fully_shard(self.network, mesh=mesh, mp_policy=plugin.mp_policy)

    Raises:
        ValueError: An argument cannot be used, or a name is unknown.
        MisconfigurationException: A module of `fp32_modules` is not sharded for itself.
        FloatingPointError: Steps at the smallest loss scale were skipped again and again.

    References:
        PyTorch FSDP, https://arxiv.org/abs/2304.11277

    Example: `Trainer(strategy=ModelParallelStrategy(), plugins=ModelParallelBalancedAMP())`
    """

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """For `fully_shard`: weights are gathered in half, of fp32 shards."""
        # Batches are not rounded: operations cast what they need.
        return MixedPrecisionPolicy(
            param_dtype=self.half_dtype, reduce_dtype=self._wire_dtype, cast_forward_inputs=False
        )

    def shard_fp32_modules(self, module: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> None:
        """Shard the modules of `fp32_modules` for themselves, in fp32; call it before the rest.

        Args:
            module: The LightningModule, where the paths in `fp32_modules` start.
            mesh: Over which to shard.
            **kwargs: What `fully_shard` takes beside them.
        """
        # Without `param_dtype` they are gathered as they rest.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        # Before the rest: `fully_shard` of a parent takes all parameters that no unit has yet.
        for kept in self._fp32_modules_of(module).values():
            fully_shard(kept, mesh=mesh, mp_policy=policy, **kwargs)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        # Without `super()`, which attaches half copies: here the sharding gathers in half.
        half = [
            n for n, p in module.named_parameters() if p.requires_grad and p.dtype in HALF_DTYPES
        ]
        if half:
            raise MisconfigurationException(
                f"Passed `{type(self).__name__}` with {half[0]!r} in half: its shards are what the "
                "optimizer steps, and would lose small updates. Call `self.float()` in "
                "`configure_model` before any `fully_shard`."
            )
        for name, kept in self._fp32_modules_of(module).items():
            if not isinstance(kept, FSDPModule):
                raise MisconfigurationException(
                    f"Passed `{type(self).__name__}(fp32_modules={self.fp32_modules!r})`, but "
                    f"{name!r} is not sharded for itself. In `configure_model`, call "
                    "`self.trainer.precision_plugin.shard_fp32_modules(self, mesh)` before any "
                    "other `fully_shard`, or pass `fp32_modules=[]`."
                )
        return module

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        self._first = next(model.parameters(), None)
        return super().connect(model, optimizers, lr_schedulers)
