"""`InfCLStrategy`: DDP whose towers see a micro-batch while the loss sees the global batch."""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp._foreign import ForLightning
from lightning_mp.contrastive._cache.towers import Tower, find_tower
from lightning_mp.contrastive.gradient_cache import GradientCache
from lightning_mp.precision.model_parallel import ModelParallelBalancedAMP
from lightning_mp.strategies._inf_cl.arguments import check_arguments
from lightning_mp.strategies._inf_cl.loader_batches import gather_batches
from lightning_mp.strategies._inf_cl.reduction import reduce_gradients

__all__ = ["InfCLStrategy"]

# What `**kwargs` take; DDPStrategy passes on what it does not know, and sees to the first four.
_DDP = {
    name
    for base in (DDPStrategy, DistributedDataParallel)
    for name in inspect.signature(base.__init__).parameters
} - {"self", "kwargs", "module", "device_ids"}


@explains_arguments(also=sorted(_DDP))
class InfCLStrategy(DDPStrategy, ForLightning):
    r"""DDP for near-infinite contrastive batches: activations of one micro-batch, gradients of all.

    Every feature of a contrastive batch meets every other, so a batch cannot simply be accumulated
    from smaller ones: 8 times 4,096 pairs have an eighth of the negatives of 32,768. With plain
    DDP all activations of the towers must then be held at once. Here calls to the towers are served
    in micro-batches without grad, and once the loss has its gradients for the features, each
    micro-batch is replayed with grad (gradient caching). The gradients are those of the whole
    batch; the price is one more forward of the towers, about a third of a step.

    `training_step` stays as it is. Only calls to the named towers inside `training_step` are served
    in this way; validation, test and prediction run them plainly. Together with `ContrastiveLoss`,
    memory grows with the batch only by features and data.

    **Exact**, and verified: each replay's outputs are compared with those of the call, and a
    difference beyond rounding is an error. Dropout masks are drawn again from the same generator
    states (CPU, GPU, Python, numpy, those of modules); buffers such as running statistics are
    updated once a step; the autocast of the forward holds in the replay. Every parameter gets its
    whole gradient once, with hooks, and gradients are all-reduced once a bucket and step.

    **Not the same as a whole batch**: layers that mix rows (BatchNorm) see micro-batches, and
    dropout draws micro-batch by micro-batch, so its masks differ from those of one big call.

    Args:
        towers: Submodules or methods of the LightningModule by dotted path, such as `visual` or
            `model.encode_image`. Their tensors, in and out, have the batch first. One may be
            called several times in a step, and may be `torch.compile`d.
        micro_batch_size: Rows that a tower sees at a time on one rank. As large as memory allows
            is fastest; it does not change the gradients.
        loader_batches_per_step: Batches of the training loader that make the batch of a step, in
            the dtype of the data set and in pinned memory for CUDA. Workers then hold small
            batches, and the host one whole one; `limit_train_batches`, the progress bar and
            `accumulate_grad_batches` count whole ones. As one loader of whole batches otherwise.
        offload: `"host"` leaves training batches in host memory in the dtype of the data set and
            copies micro-batches to the device as towers need them. What `training_step` itself
            does with the batch is then done on the CPU.
        prefetch: Micro-batches to copy ahead with `offload="host"`.
            Copies run beside the towers from 2 on; `max(prefetch + 1, 2)` are on the device at
            most.
        rows: Names of arguments of towers that have one row, or element, for each of the batch,
            where that cannot be told by their shapes.
        whole: Names of arguments that all rows share, such as a prompt with as many rows as the
            batch.
        leave_out: Names of outputs that towers return as `None` and do not keep for the whole
            batch, such as `last_hidden_state`.
        replay_tolerance: See `GradientCache`; a larger one is for kernels that are not
            deterministic.
        **kwargs: All that `DDPStrategy` takes, and for `DistributedDataParallel` as there.

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

    def __init__(
        self,
        *,
        towers: Sequence[str] = ("visual", "text"),
        micro_batch_size: int = 256,
        loader_batches_per_step: int = 1,
        offload: Literal["none", "host"] = "none",
        prefetch: int = 2,
        rows: Sequence[str] = (),
        whole: Sequence[str] = (),
        leave_out: Sequence[str] = (),
        replay_tolerance: float | None = None,
        **kwargs: Any,
    ) -> None:
        counts = {
            "micro_batch_size": (micro_batch_size, 1),
            "loader_batches_per_step": (loader_batches_per_step, 1),
            "prefetch": (prefetch, 0),
        }
        check_arguments(towers, counts, offload, kwargs)
        super().__init__(**kwargs)
        self.towers = tuple(towers)
        self.micro_batch_size = micro_batch_size
        self.loader_batches_per_step = loader_batches_per_step
        self.offload = offload
        self.prefetch = prefetch
        self.rows = tuple(rows)
        self.whole = tuple(whole)
        self.leave_out = tuple(leave_out)
        self.replay_tolerance = replay_tolerance
        self._forward_redirection = _NoSyncForwardRedirection()
        self._cache: GradientCache | None = None

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # Called by the constructor, and by that of the Trainer with its own.
        if isinstance(precision_plugin, (FSDPPrecision, ModelParallelBalancedAMP)):
            raise MisconfigurationException(
                f"Passed `{type(precision_plugin).__name__}` with `InfCLStrategy`. It is for "
                "sharded models, and `InfCLStrategy` is DDP. Pass `BalancedAMP()` instead."
            )
        self._precision_plugin = precision_plugin

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._find_towers()  # a wrong name should not cost a set-up
        super().setup(trainer)
        if fitting:
            _warn_of_batch_norm(self._find_towers())  # the precision plugin may replace modules
            self._cache = GradientCache(
                micro_batch_size=self.micro_batch_size,
                device=self.root_device,
                prefetch=self.prefetch,
                rows=self.rows,
                whole=self.whole,
                leave_out=self.leave_out,
                replay_tolerance=self.replay_tolerance,
                context=self.precision_plugin.train_step_context,
            )

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self._cache is not None
        assert self.lightning_module is not None
        batch = args[0] if args else next(iter(kwargs.values()), None)
        with self._cache.serving(self.lightning_module, self.towers, batch):
            return super().training_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        # DDP would prepare to reduce during the loss's backward; `backward` reduces after it.
        pass

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        assert self._cache is not None
        if not self._cache.calls:
            raise MisconfigurationException(
                f"Passed `InfCLStrategy(towers={list(self.towers)})`, but the first training step "
                "called none of them, so nothing would be served in micro-batches. Name what "
                "`training_step` calls, and call it there as `self.name(batch)`: not as "
                "`self.name.forward(batch)`, and not from inside compiled code."
            )
        closure_loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        # Not under `no_sync`, as Lightning holds it while it accumulates batches.
        if (
            isinstance(self.model, DistributedDataParallel)
            and self.model.require_backward_grad_sync
        ):
            reduce_gradients(self.model)
        return closure_loss

    @override
    def teardown(self) -> None:
        cache, self._cache = self._cache, None
        super().teardown()
        if cache is not None:
            cache.check()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        module = self.lightning_module
        if self.loader_batches_per_step == 1 or module is None or not module.trainer.training:
            return dataloader
        pin = self.root_device.type == "cuda"
        return gather_batches(dataloader, self.loader_batches_per_step, pin=pin)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        module = self.lightning_module
        if self.offload == "host" and module is not None and module.trainer.training:
            device = torch.device("cpu")
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        if self.offload == "none":
            return super()._setup_model(model)
        # With `device_ids`, DDP's forward would move the whole batch to the device.
        on_gpu = self.root_device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
            return DistributedDataParallel(module=model, **self._ddp_kwargs)

    def _find_towers(self) -> list[Tower]:
        module = self.lightning_module
        assert module is not None
        if module._compiler_ctx is not None:
            raise MisconfigurationException(
                f"Passed `torch.compile({type(module).__name__}())` with `InfCLStrategy`. Calls to "
                "towers cannot be served from inside one compiled training step. Compile the "
                f"towers instead, such as `self.{self.towers[0]}.compile()`."
            )
        try:
            return [find_tower(module, name) for name in self.towers]
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error


class _NoSyncForwardRedirection(_ForwardRedirection):
    """Runs `training_step` through DDP's forward without preparing DDP to reduce.

    Reentrant checkpoints in towers accumulate into the parameters themselves, once a micro-batch,
    which DDP would take for an error; and parameters that a step leaves out need no setting.
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


def _warn_of_batch_norm(towers: Sequence[Tower]) -> None:
    names = [
        f"{tower.name}.{name}" if name else tower.name
        for tower in towers
        for name, module in tower.module.named_modules()
        if isinstance(module, _BatchNorm)
    ]
    if names:
        rank_zero_warn(
            f"{len(names)} BatchNorm layers in the towers (the first is `{names[0]}`) see "
            "micro-batches: they normalise by the statistics of `micro_batch_size` rows, not of "
            "the batch. Use LayerNorm or GroupNorm, or a larger `micro_batch_size`, if that "
            "matters."
        )
