"""`InfCLStrategy`: DDP whose towers see a micro-batch while the loss sees the global batch."""

import inspect
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import explains_arguments, refuse_values
from lightning_mp.precision.model_parallel import ModelParallelBalancedAMP
from lightning_mp.strategies._inf_cl.averaging import GradientAverage, sparse_weights
from lightning_mp.strategies._inf_cl.serving import ServesTowers

__all__ = ["InfCLStrategy"]

# What `**kwargs` take; DDPStrategy passes on what it does not know, and sees to the first four.
_DDP = {
    name
    for base in (DDPStrategy, DistributedDataParallel)
    for name in inspect.signature(base.__init__).parameters
    # Lightning passes `module` and `device_ids` itself; given twice they are a TypeError at set-up.
} - {"self", "kwargs", "module", "device_ids"}


@explains_arguments(also=sorted(_DDP))
class InfCLStrategy(ServesTowers, DDPStrategy):
    r"""DDP for near-infinite contrastive batches: activations of one micro-batch, gradients of all.

    Every feature of a contrastive batch meets every other, so a batch cannot simply be accumulated
    from smaller ones: 8 times 4,096 pairs have an eighth of the negatives of 32,768. Here calls to
    the towers in `training_step` are served in micro-batches without grad, and once the loss has
    its gradients for the features, each micro-batch is replayed with grad, and its outputs are
    compared with those of the call. The gradients are those of the whole batch, averaged over ranks
    once a step for all that trains in it; the price is one more forward of the towers. What is the
    same as without the strategy, and what is not, stands in docs/strategies/inf-cl.md.

    Args:
        towers: Submodules or methods of the LightningModule by dotted path, such as `visual` or
            `model.encode_image`. Their tensors, in and out, have the batch first.
        loader_batches_per_step: Batches of the training loader that make the batch of a step, in
            host memory; the Trainer then counts whole batches.
        offload: `"host"` leaves training batches in host memory in the dtype of the data set and
            copies micro-batches to the device as towers need them.
        **kwargs: `micro_batch_size` (256 rows on one rank, or `"auto"`), `activation_bytes`,
            `prefetch`, `roles` and `replay_tolerance` as of
            `GradientCache`; all that `DDPStrategy` takes, and for `DistributedDataParallel`.

    Raises:
        ValueError: For arguments that cannot be used, with what is accepted.
        MisconfigurationException: A tower is not in the model, is not called in the first training
            step, or the set-up cannot work with gradient caching.

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
                f"Passed `{type(plugin).__name__}` with `InfCLStrategy`. It is for "
                "sharded models, and `InfCLStrategy` is DDP. Pass `BalancedAMP()` instead."
            )

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        # Under DDPStrategy's own, DDP's forward would prepare to reduce before towers are replayed.
        self._forward_redirection = _NoSyncForwardRedirection()
        self._average = GradientAverage()
        super().setup(trainer)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        # DDP would prepare to reduce during the loss's backward; `backward` averages after it.
        pass

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        # Before the backward: it would run with the activations of the whole batch.
        self._check_calls()
        closure_loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        model = self.model
        # Not under `no_sync`, as Lightning holds it while it accumulates batches.
        if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
            model.require_forward_param_sync = True  # the next forward sends rank 0's buffers
            hook = model._comm_hooks[-1] if model._comm_hooks else None
            if self.world_size > 1 or hook is not None:
                self._average.over_ranks(
                    dict(model.module.named_parameters()),
                    group=model.process_group,
                    hook=hook,
                    bucket_bytes=model.bucket_bytes_cap,
                    sparse=sparse_weights(model),
                )
        return closure_loss

    @override
    def _check_others(self, arguments: dict[str, Any]) -> None:
        if arguments.get("static_graph"):
            reason = (
                "Gradients are averaged when all are complete, not in the graph that DDP would "
                "record. Leave `static_graph` out; they are all-reduced once a step all the same."
            )
            refuse_values(self, reason, static_graph=True)
        if arguments.get("mixed_precision") is not None:
            reason = (
                "DDP's reducer turns the gradients of its mixed precision into those of the "
                "parameters, and it is not used here. Pass `Trainer(plugins=BalancedAMP())`."
            )
            refuse_values(self, reason, mixed_precision=arguments["mixed_precision"])

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        if self.offload == "none":
            return super()._setup_model(model)
        # With `device_ids`, DDP's forward would move the whole batch to the device.
        on_gpu = self.root_device.type == "cuda"
        # On a stream of its own, as in DDPStrategy.
        with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
            return DistributedDataParallel(module=model, **self._ddp_kwargs)


class _NoSyncForwardRedirection(_ForwardRedirection):
    """Runs `training_step` through DDP's forward without preparing DDP to reduce.

    DDP's reducer averages what trained when it was made, and takes gradients of micro-batches for
    whole ones; `GradientAverage` averages what trains now, once gradients are complete.
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
