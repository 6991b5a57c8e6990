"""`InfCLStrategy`: DDP with gradient caching for contrastive losses over the global batch."""

import inspect
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_mp._arguments import explains_arguments, refuse_values
from lightning_mp.precision.model_parallel import ModelParallelBalancedAMP
from lightning_mp.strategies._inf_cl.averaging import sparse_weights
from lightning_mp.strategies._inf_cl.serving import ServesTowers

__all__ = ["InfCLStrategy"]

# Names that `**kwargs` accept; DDPStrategy passes those it does not know to DDP.
_DDP = {
    name
    for base in (DDPStrategy, DistributedDataParallel)
    for name in inspect.signature(base.__init__).parameters
    # Lightning passes `module` and `device_ids` itself.
} - {"self", "kwargs", "module", "device_ids"}


@explains_arguments(also=sorted(_DDP))
class InfCLStrategy(ServesTowers, DDPStrategy):
    r"""DDP for near-infinite contrastive batches: exact gradients, activations of one micro-batch.

    A contrastive loss compares every feature with every other, so gradient accumulation is no
    substitute for a large batch: 8 batches of 4,096 pairs have an eighth of the negatives of one
    batch of 32,768. This strategy runs the towers called in `training_step` in micro-batches
    without keeping activations. When the loss has computed the gradients of the features, each
    micro-batch is replayed with grad, and its outputs are compared with the first run's. The
    gradients are those of the global batch and are averaged over ranks once per step. The price is
    one more forward of the towers. docs/strategies/inf-cl.md lists what differs from plain DDP.

    Args:
        towers: Dotted paths of submodules or methods of the LightningModule, such as `visual` or
            `model.encode_image`. The first dimension of their inputs and outputs is the batch.
        loader_batches_per_step: Number of loader batches to concatenate in host memory into the
            batch of a training step. The Trainer counts the concatenated batches.
        offload: `"host"` keeps training batches in host memory, in the dtype of the data set, and
            copies micro-batches to the device when towers need them.
        **kwargs: `micro_batch_size` (default 256 rows per rank, or `"auto"`), `activation_bytes`,
            `prefetch`, `roles` and `replay_tolerance`, see `GradientCache`; all arguments of
            `DDPStrategy` and `DistributedDataParallel`.

    Raises:
        ValueError: On invalid arguments.
        MisconfigurationException: A tower is not in the model or not called in the first training
            step, or the set-up does not support gradient caching.

    References:
        - Inf-CL, https://arxiv.org/abs/2410.17243
        - GradCache, https://arxiv.org/abs/2101.06983

    Example::

        trainer = Trainer(strategy=InfCLStrategy(towers=["visual", "text"], micro_batch_size=256))
    """

    strategy_name = "inf_cl"

    @override
    def _check_precision(self, plugin: Precision | None) -> None:
        if isinstance(plugin, (FSDPPrecision, ModelParallelBalancedAMP)):
            raise MisconfigurationException(
                f"Passed `{type(plugin).__name__}` with `InfCLStrategy`. The plugin is for sharded "
                "models, but `InfCLStrategy` is DDP. Pass `BalancedAMP()` instead."
            )

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        # DDPStrategy's own redirection would prepare DDP's reducer before towers are replayed.
        self._forward_redirection = _NoSyncForwardRedirection()
        super().setup(trainer)

    @override
    def _complete_gradients(self) -> None:
        model = self.model
        # False inside `no_sync`, which Lightning enters during gradient accumulation.
        if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
            hook = model._comm_hooks[-1] if model._comm_hooks else None
            if self.world_size > 1 or hook is not None:
                self._average.over_ranks(
                    dict(model.module.named_parameters()),
                    group=model.process_group,
                    hook=hook,
                    bucket_bytes=model.bucket_bytes_cap,
                    sparse=sparse_weights(model),
                )

    @override
    def _check_strategy_arguments(self, arguments: dict[str, Any]) -> None:
        if arguments.get("static_graph"):
            reason = (
                "This strategy averages complete gradients after the backward, without the graph "
                "that DDP would record. Leave `static_graph` out; gradients are all-reduced once "
                "per step in any case."
            )
            refuse_values(self, reason, static_graph=True)
        if arguments.get("mixed_precision") is not None:
            reason = (
                "DDP's mixed precision relies on DDP's reducer, which this strategy does not use. "
                "Pass `Trainer(plugins=BalancedAMP())`."
            )
            refuse_values(self, reason, mixed_precision=arguments["mixed_precision"])

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        if self.offload == "none":
            return super()._setup_model(model)
        # With `device_ids`, DDP's forward would move the whole batch to the device.
        on_gpu = self.root_device.type == "cuda"
        # DDPStrategy uses a side stream here, too.
        with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
            return DistributedDataParallel(module=model, **self._ddp_kwargs)


class _NoSyncForwardRedirection(_ForwardRedirection):
    """Runs `training_step` through DDP's forward without preparing DDP's reducer.

    DDP's reducer averages the parameters that trained when DDP was constructed, and would reduce
    the gradients of a single micro-batch. `GradientAverage` averages the parameters that train now,
    when their gradients are complete.
    """

    @override
    def on_after_inner_forward(
        self, wrapper_module: nn.Module, original_module: "pl.LightningModule"
    ) -> None:
        self._sync = wrapper_module.require_backward_grad_sync
        wrapper_module.require_backward_grad_sync = False  # type: ignore[assignment]

    @override
    def on_after_outer_forward(
        self, wrapper_module: nn.Module, original_module: "pl.LightningModule"
    ) -> None:
        wrapper_module.require_backward_grad_sync = self._sync
        # The next forward sends rank 0's buffers, as under DDP.
        wrapper_module.require_forward_param_sync = self._sync
