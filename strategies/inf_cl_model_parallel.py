"""`InfCLModelParallelStrategy`: gradient caching for models sharded by `fully_shard`."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_mp._arguments import explains_arguments, refuse_values
from lightning_mp.gradient_cache._served.sharding import set_reduction, unsharded_parameters
from lightning_mp.gradient_cache._served.towers import sharded_modules
from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.model_parallel import ModelParallelBalancedAMP
from lightning_mp.strategies._inf_cl.serving import ServesTowers

__all__ = ["InfCLModelParallelStrategy"]

_BASE_ARGUMENTS = sorted(
    set(inspect.signature(ModelParallelStrategy.__init__).parameters) - {"self"}
)


@explains_arguments(also=_BASE_ARGUMENTS)
class InfCLModelParallelStrategy(ServesTowers, ModelParallelStrategy):
    r"""FSDP2 for near-infinite contrastive batches: sharded towers, activations of one micro-batch.

    The counterpart of `InfCLStrategy` for FSDP2: towers called in `training_step` run in
    micro-batches and are replayed for the gradients of the global batch. Under plain FSDP2 each
    replayed micro-batch would reduce-scatter all gradients, 128 times per step for 128
    micro-batches. Here replays follow the backward of the loss, and only the last micro-batch
    reduce-scatters. The model calls `fully_shard` over all ranks in `configure_model`, as shown in
    docs/strategies/inf-cl-model-parallel.md. Parameters that are not sharded are initialized from
    rank 0, and their gradients are averaged as in DDP.

    Args:
        towers: Dotted paths of submodules or methods of the LightningModule, such as `visual`.
            Methods of a sharded module need `register_fsdp_forward_method`.
        loader_batches_per_step: Number of loader batches to concatenate into the batch of a step.
        offload: `"host"` keeps training batches in host memory until towers need them.
        **kwargs: As in `InfCLStrategy`, and `save_distributed_checkpoint`, `process_group_backend`
            and `timeout` of `ModelParallelStrategy`.

    Raises:
        ValueError: On invalid arguments.
        MisconfigurationException: No module is sharded, a tower is not in the model or not called,
            or the set-up does not support gradient caching.
        RuntimeError: The input of a tower requires grad, or a micro-batch trains parameters that
            the last micro-batch does not train.

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
                f"Passed `{type(plugin).__name__}` with `{type(self).__name__}`. The plugin does "
                "not support sharded models. Pass `ModelParallelBalancedAMP()` instead."
            )

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        self._reduces = True
        super().setup(trainer)
        module = self.lightning_module
        if not sharded_modules(module):
            raise MisconfigurationException(
                f"Passed `{type(self).__name__}`, but no module is sharded. Call `fully_shard` in "
                "`configure_model`, or pass `InfCLStrategy`, which is DDP."
            )
        # Including frozen parameters, which a callback may unfreeze later.
        unsharded = {id(parameter) for parameter in unsharded_parameters(module)}
        self._unsharded = {name: p for name, p in module.named_parameters() if id(p) in unsharded}
        for parameter in self._unsharded.values():
            dist.broadcast(parameter.detach(), 0)
        if trainer.state.fn == TrainerFn.FITTING:
            self._check_clipping(trainer)

    @override
    def _complete_gradients(self) -> None:
        # Only FSDP2's hooks give sharded parameters their gradients, and the hooks do not run in
        # a nested backward. So replays follow the backward, in the context of a backward.
        plugin, is_ours = self.precision_plugin, isinstance(self.precision_plugin, BalancedAMP)
        with plugin.backward_context(self.lightning_module) if is_ours else nullcontext():
            self._cache.finish(reduce=self._reduces)
        if self._reduces and self.world_size > 1:
            self._average.over_ranks(self._unsharded)
        self._reshard()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._reshard()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients on each rank while Lightning accumulates batches."""
        # FSDP2 has no `no_sync`, which Lightning enters here for DDP.
        modules = sharded_modules(self.lightning_module)
        self._reduces = False
        self._cache.unreduced.update(dict.fromkeys(modules))
        set_reduction(modules, False)
        try:
            yield
        finally:
            self._reduces = True
            set_reduction(modules, True)

    @override
    def _check_strategy_arguments(self, arguments: dict[str, Any]) -> None:
        for name in ("data_parallel_size", "tensor_parallel_size"):
            size = arguments.get(name, "auto")  # LightningCLI passes 'auto'
            if size != "auto":
                reason = f"`{name}` must be 'auto', as all ranks share the batch. Leave it out."
                refuse_values(self, reason, **{name: size})

    @override
    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        # With 'auto', Lightning would put all ranks of a node into a tensor-parallel mesh.
        self._data_parallel_size, self._tensor_parallel_size = self.world_size, 1

    def _reshard(self) -> None:
        """Free all gathered parameters between steps.

        Without a backward, as for frozen towers and in validation, FSDP2 keeps them gathered.
        Then `requires_grad_` and new optimizer groups would refer to gathered parameters instead of
        the shards that train.
        """
        for submodule in sharded_modules(self.lightning_module):
            submodule.reshard()

    def _check_clipping(self, trainer: "pl.Trainer") -> None:
        by_value = trainer.gradient_clip_algorithm == "value"
        large = [
            name
            for name, parameter in trainer.lightning_module.named_parameters()
            # torch computes the norm of shards together with single numbers, as a logit scale.
            if parameter.numel() > 1 and parameter.requires_grad and name in self._unsharded
        ]
        if trainer.gradient_clip_val and not by_value and large:
            raise MisconfigurationException(
                f"Passed `Trainer(gradient_clip_val={trainer.gradient_clip_val!r})`, but the "
                f"parameter {large[0]!r} is not sharded, and torch computes no norm over sharded "
                "and whole gradients together. Call `fully_shard` on the module of the parameter, "
                "or clip by value."
            )
