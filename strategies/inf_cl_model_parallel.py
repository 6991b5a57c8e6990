"""`InfCLModelParallelStrategy`: `InfCLStrategy` for models that `fully_shard` has sharded."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import explains_arguments, refuse_values
from lightning_mp.gradient_cache._served.sharding import own_parameters
from lightning_mp.gradient_cache._served.towers import sharded_modules
from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.model_parallel import ModelParallelBalancedAMP
from lightning_mp.strategies._inf_cl.averaging import GradientAverage
from lightning_mp.strategies._inf_cl.serving import ServesTowers

__all__ = ["InfCLModelParallelStrategy"]

_OTHERS = sorted(set(inspect.signature(ModelParallelStrategy.__init__).parameters) - {"self"})


@explains_arguments(also=_OTHERS)
class InfCLModelParallelStrategy(ServesTowers, ModelParallelStrategy):
    r"""FSDP2 for near-infinite contrastive batches: sharded towers, activations of a micro-batch.

    What `InfCLStrategy` is to DDP: calls to the towers in `training_step` are served in
    micro-batches and replayed for their gradients, which are those of the whole batch. Under plain
    FSDP2 each micro-batch of a replay would reduce and scatter all gradients, 128 times a step at
    128 micro-batches. Here replays run after the backward of the loss, and the last one reduces and
    scatters, once a step. The model shards itself in `configure_model`, over all ranks, as shown in
    docs/strategies/inf-cl-model-parallel.md. Parameters that are not sharded start as those of rank
    0, and their gradients are averaged as by DDP.

    Args:
        towers: Submodules or methods of the LightningModule by dotted path, such as `visual`.
            Methods of a sharded module are to be named to `register_fsdp_forward_method`.
        loader_batches_per_step: Batches of the training loader that make the batch of a step.
        offload: `"host"` leaves training batches in host memory until towers need them.
        **kwargs: As of `InfCLStrategy`, and `save_distributed_checkpoint`, `process_group_backend`
            and `timeout` of `ModelParallelStrategy`.

    Raises:
        ValueError: For arguments that cannot be used, with what is accepted.
        MisconfigurationException: Nothing is sharded, a tower is not in the model or not called, or
            the set-up cannot work with gradient caching.
        RuntimeError: A tower was called with an input that requires grad, or a micro-batch trains
            what the last one does not.

    References:
        - Inf-CL, https://arxiv.org/abs/2410.17243
        - PyTorch FSDP, https://arxiv.org/abs/2304.11277

    Example::

        strategy = InfCLModelParallelStrategy(towers=["visual", "text"], micro_batch_size=256)
        trainer = Trainer(strategy=strategy, plugins=ModelParallelBalancedAMP(half="bf16"))
    """

    strategy_name = "inf_cl_fsdp2"

    @override
    def _check_precision(self, plugin: Precision | None) -> None:
        if isinstance(plugin, BalancedAMP) and not isinstance(plugin, ModelParallelBalancedAMP):
            raise MisconfigurationException(
                f"Passed `{type(plugin).__name__}` with `{type(self).__name__}`. It does "
                "not know shards. Pass `ModelParallelBalancedAMP()` instead."
            )

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        self._reduces = True
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        if not sharded_modules(module):
            raise MisconfigurationException(
                f"Passed `{type(self).__name__}`, but no module is sharded. Call `fully_shard` in "
                "`configure_model`, or pass `InfCLStrategy`, which is DDP."
            )
        # Frozen ones too: a callback may let them train later on, and they start as rank 0's.
        own = {id(parameter) for parameter in own_parameters(module)}
        self._own = {name: p for name, p in module.named_parameters() if id(p) in own}
        self._average = GradientAverage()
        for parameter in self._own.values():
            dist.broadcast(parameter.detach(), 0)
        if trainer.state.fn == TrainerFn.FITTING:
            self._check_clipping(trainer)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        cache = self._check_calls()
        closure_loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        # Gathered parameters get gradients through FSDP2's hooks alone: replays follow the
        # backward.
        cache.finish(reduce=self._reduces)
        if self._reduces and self.world_size > 1:
            self._average.over_ranks(self._own)
        self._reshard()
        return closure_loss

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._reshard()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients on each rank, as Lightning does while it accumulates batches."""
        # FSDP2 has no `no_sync`, which is what Lightning enters here for DDP.
        others = sharded_modules(self.lightning_module)
        self._reduces = False
        for part in others:
            part.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            self._reduces = True
            for part in others:
                part.set_requires_gradient_sync(True, recurse=False)

    @override
    def _check_others(self, arguments: dict[str, Any]) -> None:
        for name in ("data_parallel_size", "tensor_parallel_size"):
            size = arguments.get(name, "auto")  # as LightningCLI passes it
            if size != "auto":
                reason = f"`{name}` must be 'auto', as all ranks share the batch. Leave it out."
                refuse_values(self, reason, **{name: size})

    @override
    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        # By 'auto', all ranks of a node would be a tensor-parallel mesh.
        self._data_parallel_size, self._tensor_parallel_size = self.world_size, 1

    def _reshard(self) -> None:
        """Leave nothing gathered between steps.

        What a frozen tower or a validation has gathered stays so, as no backward follows. Then
        `requires_grad_` and an optimizer's new group would get the gathered parameters, and the
        shards, which are trained, would stay frozen.
        """
        for part in sharded_modules(self.lightning_module):
            part.reshard()

    def _check_clipping(self, trainer: "pl.Trainer") -> None:
        by_value = trainer.gradient_clip_algorithm == "value"
        large = [
            name
            for name, parameter in trainer.lightning_module.named_parameters()
            # A single number, such as a logit scale, passes torch's norm beside shards.
            if parameter.numel() > 1 and parameter.requires_grad and name in self._own
        ]
        if trainer.gradient_clip_val and not by_value and large:
            raise MisconfigurationException(
                f"Passed `Trainer(gradient_clip_val={trainer.gradient_clip_val!r})`, but "
                f"{large[0]!r} is not sharded, and torch takes no norm over shards and whole "
                "gradients. Call `fully_shard` for what holds it, or clip by value."
            )
