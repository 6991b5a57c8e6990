"""`ModelParallelBalancedAMP`: `BalancedAMP` for ModelParallelStrategy, on DTensor shards."""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.numerics.floats import HALF_DTYPES
from lightning_mp.precision._scaling.scaled_precision import ScaledPrecision
from lightning_mp.precision.fsdp import ShardedBalancedAMP

__all__ = ["ModelParallelBalancedAMP"]


@explains_arguments()
class ModelParallelBalancedAMP(ShardedBalancedAMP):
    """`fully_shard` training with half-precision working weights, fp32 shards and fp32 norms.

    `ModelParallelStrategy` refuses `precision="16-mixed"`, because a scaler that sees only local
    shards lets one rank step while another rank skips. With this plugin all ranks skip together, as
    in `FSDPBalancedAMP`, and clip unscaled gradients by the norm over all ranks. The arguments are
    those of `BalancedAMP`.

    Shard the model in `configure_model` with the policies of this plugin:

        def configure_model(self):
            plugin, mesh = self.trainer.precision_plugin, self.device_mesh["data_parallel"]
            plugin.shard_fp32_modules(self, mesh)
            for block in self.network.blocks:
                fully_shard(block, mesh=mesh, mp_policy=plugin.mp_policy)
            fully_shard(self.network, mesh=mesh, mp_policy=plugin.mp_policy)

    Raises:
        ValueError: An argument is invalid or a name is unknown.
        MisconfigurationException: A module of `fp32_modules` is not sharded separately.
        FloatingPointError: `patience` consecutive steps were skipped at the smallest loss scale.

    References:
        PyTorch FSDP, https://arxiv.org/abs/2304.11277

    Example: `Trainer(strategy=ModelParallelStrategy(), plugins=ModelParallelBalancedAMP())`
    """

    _trained: list[bool] | None = None  # which parameters were trained in the last step

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """Policy for `fully_shard` that gathers fp32 shards in half precision."""
        # Inputs are not cast here; autocast casts them per operation.
        return MixedPrecisionPolicy(
            param_dtype=self.half_dtype, reduce_dtype=self._wire_dtype, cast_forward_inputs=False
        )

    def shard_fp32_modules(self, module: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> None:
        """Shard the modules of `fp32_modules` separately in fp32; call before `fully_shard`.

        Names are relative to `module`, the LightningModule; `kwargs` are passed to `fully_shard`.
        """
        # Without `param_dtype`, parameters are gathered in their own dtype.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        # Submodules first, because `fully_shard` takes all parameters that are not in a unit yet.
        for kept in reversed(self._fp32_modules_of(module).values()):
            fully_shard(kept, mesh=mesh, mp_policy=policy, **kwargs)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        # Not `BalancedAMP`'s, which would attach half copies; `fully_shard` gathers in half.
        ScaledPrecision.convert_module(self, module)
        for each in module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()  # an evaluation leaves half weights of the root module gathered
        half = [
            n for n, p in module.named_parameters() if p.requires_grad and p.dtype in HALF_DTYPES
        ]
        if half:
            raise MisconfigurationException(
                f"Passed `{type(self).__name__}` with the half-precision parameter {half[0]!r}. "
                "The optimizer steps its shards, which would lose small updates. Call "
                "`self.float()` in `configure_model` before any `fully_shard`."
            )
        for name, kept in self._fp32_modules_of(module).items():
            if not isinstance(kept, FSDPModule):
                raise MisconfigurationException(
                    f"Passed `{type(self).__name__}(fp32_modules={self.fp32_modules!r})`, but "
                    f"{name!r} is not sharded separately. Pass `ModelParallelStrategy()`, and in "
                    "`configure_model` call `self.trainer.precision_plugin.shard_fp32_modules(self,"
                    " mesh)` before any other `fully_shard`, or pass `fp32_modules=[]`."
                )
        return module

    @override
    def connect(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._first = next(model.parameters(), None)
        self._undo.callback(setattr, self, "_trained", None)
        return super().connect(model, *args, **kwargs)

    @override
    def _prepare(self) -> None:
        before, self._trained = self._trained, [p.requires_grad for p in self._parameters or ()]
        if before not in (None, self._trained) and self._ledger.root is not None:
            for each in self._ledger.root.modules():
                if isinstance(each, FSDPModule):
                    # Reads the dtypes of gradients, which FSDP does not know of a unit that was
                    # frozen in its first forward.
                    each.unshard()
                    each.reshard()
