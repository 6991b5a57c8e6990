"""Gradient caching in a strategy, shared by `InfCLStrategy` and `InfCLModelParallelStrategy`."""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import Check, explains_arguments
from lightning_mp._foreign import ForLightning
from lightning_mp.contrastive._exchange.exchange import CollectiveError
from lightning_mp.gradient_cache._served.roles import DeclaredRoles
from lightning_mp.gradient_cache._served.towers import Tower, find_tower
from lightning_mp.gradient_cache.gradient_cache import CHECKS, GradientCache
from lightning_mp.strategies._inf_cl.averaging import GradientAverage
from lightning_mp.strategies._inf_cl.joining import field_roles, local_ids
from lightning_mp.strategies._inf_cl.loader_batches import GatheredLoader, drop_states
from lightning_mp.strategies._inf_cl.loader_order import sampler_of, starts_again

__all__ = ["ServesTowers"]

if TYPE_CHECKING:  # the class it is mixed into

    class _Strategy(ParallelStrategy):
        lightning_module: pl.LightningModule  # type: ignore[assignment]  # set by the Trainer
else:
    _Strategy = object


@explains_arguments(
    checks={
        **CHECKS,
        "towers": Check(
            least=1,
            test=lambda towers: len(set(towers)) == len(towers),
            words="a non-empty list of distinct names",
        ),
        "loader_batches_per_step": "[1, inf)",
    }
)
class ServesTowers(ForLightning, _Strategy):
    """Mixin for strategies: runs the towers called in `training_step` in micro-batches.

    Its arguments are those of `InfCLStrategy`; all others are passed to the strategy.
    """

    def __init__(
        self,
        *,
        towers: Sequence[str] = ("visual", "text"),
        loader_batches_per_step: int = 1,
        offload: Literal["none", "host"] = "none",
        micro_batch_size: int | Literal["auto"] = 256,
        activation_bytes: int | None = None,
        prefetch: int = 2,
        roles: Mapping[str, str] | None = None,
        replay_tolerance: float | None = None,
        **kwargs: Any,
    ) -> None:
        self._check_strategy_arguments(kwargs)
        super().__init__(**kwargs)
        self.towers = tuple(towers)
        self.loader_batches_per_step = loader_batches_per_step
        self.offload = offload
        self.micro_batch_size = micro_batch_size
        self.prefetch = prefetch
        self._make_cache = functools.partial(
            GradientCache,
            micro_batch_size=micro_batch_size,
            activation_bytes=activation_bytes,
            prefetch=prefetch,
            roles=roles,
            replay_tolerance=replay_tolerance,
        )
        self._declared = DeclaredRoles(roles)
        self._cache = self._make_cache()
        self._ids_are_checked = False  # whether the `ids` of the first step were checked

    __init__.__doc__ = GradientCache.__doc__  # explains the arguments of the cache, for `--help`

    # Only the setter differs.
    @ParallelStrategy.precision_plugin.setter  # type: ignore[attr-defined]
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # Called by the constructors of the strategy and of the Trainer.
        self._check_precision(precision_plugin)
        self._precision_plugin = precision_plugin

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._find_towers()  # reports a wrong name before the slow set-up
        super().setup(trainer)
        if fitting:
            _warn_about_mixed_rows(self._find_towers())  # again: set-up may replace modules
            self._average = GradientAverage()
            context = self.precision_plugin.train_step_context
            state = self._cache.state_dict()  # a checkpoint may have been loaded before
            self._cache = self._make_cache(
                # Read here, because a user may have set them after an earlier fit.
                micro_batch_size=self.micro_batch_size,
                prefetch=self.prefetch,
                device=self.root_device,
                context=context,
            )
            self._cache.declared.owner, self._cache.declared.agree = self, self._on_any_rank
            self._cache.load_state_dict(state)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        # Lightning passes the batch first, then its index and the index of the loader.
        batch = args[0] if args else next(iter(kwargs.values()), None)
        if self.world_size > 1 and not self._ids_are_checked:
            self._check_local_ids(batch)
        known = dict(self._cache.micro_batch_sizes)
        with self._cache.serving(self.lightning_module, self.towers, batch):
            try:
                output = super().training_step(*args, **kwargs)
            except CollectiveError as error:
                step = self.lightning_module.trainer.global_step
                error.args = (f"{error} The run was at step {step}.",)
                raise
        # "auto" chooses the size in the first call of a tower, so this logs once.
        if self._cache.micro_batch_sizes != known:
            self._log_new_sizes(known)
        is_skipped = output is None and self.lightning_module.automatic_optimization
        # Before the backward, which without cached towers needs the activations of all rows.
        if not self._cache.calls and not is_skipped:
            raise MisconfigurationException(
                f"Passed `{type(self).__name__}(towers={list(self.towers)})`, but the first "
                "training step called none of these towers, so nothing runs in micro-batches. Name "
                "the modules or methods that `training_step` calls, and call them as "
                "`self.name(batch)`: not as `self.name.forward(batch)`, and not from inside "
                "compiled code."
            )
        return output

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: DDP would prepare its reducer, which does not see the gradients."""

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        self.pre_backward(closure_loss)
        plugin, module = self.precision_plugin, self.lightning_module
        closure_loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        # Before `on_after_backward`, which sees the gradients of the global batch, as under DDP.
        self._complete_gradients()
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def teardown(self) -> None:
        super().teardown()
        # After the strategy's teardown, because the checks may raise. At the end of a run, ranks
        # may not reach the same check of declared names.
        self._cache.declared.is_open = False
        self._cache.check()  # the last replays on a GPU are not compared yet

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self._cache.micro_batch_sizes:
            # A resumed run needs the same micro-batches to draw the same dropout masks.
            checkpoint |= self._cache.state_dict()
        super().save_checkpoint(checkpoint, *args, **kwargs)

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self._cache.load_state_dict(checkpoint)
        return checkpoint

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        trainer = self.lightning_module.trainer
        if not trainer.training:  # only training loaders are changed
            return dataloader
        loop: Any = trainer.fit_loop
        sampler = sampler_of(dataloader)
        if hasattr(sampler, "set_epoch"):
            # In a resumed run, Lightning sets it only after workers have received first indices.
            sampler.set_epoch(loop.epoch_progress.current.processed)
        if self.loader_batches_per_step == 1:
            drop_states(loop)
            return dataloader
        gathered = GatheredLoader(
            dataloader,
            self.loader_batches_per_step,
            self._declared,
            pin=self.root_device.type == "cuda",
            epoch_batches=lambda: loop.max_batches,
        )
        is_within = loop.restarting and loop.epoch_loop.batch_progress.current.ready
        if is_within and not loop._combined_loader_states_to_load:
            rank_zero_info(
                starts_again("the checkpoint does not contain the position of the loader")
            )
        return gathered

    def roles_of(self, batch: Any = None) -> dict[str, dict[str, dict[str, str]]]:
        """Return the roles of the fields of a batch and of the towers' arguments and outputs.

        Args:
            batch: A loader batch, whose roles are returned under `"batch"` and `"fields"`.

        Returns:
            Roles by name, under `"arguments"` and `"outputs"` of each tower called in this run.
        """
        if batch is None:
            return dict(self._cache.roles)
        fields = {path: str(role) for path, role in field_roles(batch, self._declared).items()}
        return {"batch": {"fields": fields}, **self._cache.roles}

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if self.offload == "host" and self.lightning_module.trainer.training:
            # The cache copies micro-batches to the device when towers need them.
            device = torch.device("cpu")
        return super().batch_to_device(batch, device, dataloader_idx)

    def _on_any_rank(self, facts: list[bool]) -> list[bool]:
        """Return which facts hold on any rank; all ranks must call this method."""
        on_some = torch.tensor(facts, dtype=torch.int32, device=self.root_device)
        dist.all_reduce(on_some, dist.ReduceOp.MAX)
        return on_some.bool().tolist()

    def _check_local_ids(self, batch: Any) -> None:
        """Warn if each rank numbers its `ids` from 0, because losses compare ids across ranks."""
        self._ids_are_checked = True
        name = local_ids(batch, self._declared)
        (differs,) = self._on_any_rank([name is None])
        if not differs:
            rank_zero_warn(
                f"Every rank numbers `{name}` of its batch from 0. Losses compare ids across "
                "ranks, so equal ids on two ranks would mean the same item. Use ids of the data "
                f"set, such as row indices. If `{name}` are class labels, declare "
                f"`roles={{{name!r}: 'rows'}}`."
            )

    def _complete_gradients(self) -> None:
        """Average the gradients over ranks after a backward."""
        raise NotImplementedError

    def _check_precision(self, plugin: Precision | None) -> None:
        """Raise if the strategy does not support the precision plugin."""

    def _check_strategy_arguments(self, arguments: dict[str, Any]) -> None:
        """Raise for arguments of the base strategy that this strategy does not support."""

    def _log_new_sizes(self, known: Collection[str]) -> None:
        """Log the sizes that `micro_batch_size="auto"` chose in this step."""
        sizes = self._cache.micro_batch_sizes
        new = {name: rows for name, rows in sizes.items() if name not in known}
        found = ", ".join(f"{rows} rows for `{name}`" for name, rows in new.items())
        rank_zero_info(f"{type(self).__name__}(micro_batch_size='auto') chose {found}.")
        trainer = self.lightning_module.trainer
        for logger in trainer.loggers:
            metrics = {f"micro_batch_size/{name}": float(rows) for name, rows in new.items()}
            logger.log_metrics(metrics, step=trainer.global_step)

    def _find_towers(self) -> list[Tower]:
        module = self.lightning_module
        if module._compiler_ctx is not None:
            raise MisconfigurationException(
                f"Passed `torch.compile({type(module).__name__}())` with `{type(self).__name__}`. "
                "Calls of towers cannot be intercepted inside a compiled training step. Compile "
                f"the towers instead, such as `self.{self.towers[0]}.compile()`."
            )
        try:
            return [find_tower(module, name) for name in self.towers]
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error


def _warn_about_mixed_rows(towers: Sequence[Tower]) -> None:
    """Warn about layers whose results for a row depend on the other rows of a micro-batch."""
    mixing = [
        f"`{tower.name}{name and '.'}{name}` ({type(module).__name__})"
        for tower in towers
        for name, module in tower.module.named_modules()
        if (isinstance(module, _BatchNorm) and module.training)
        or getattr(module, "scale_grad_by_freq", False)
    ]
    if mixing:
        rank_zero_warn(
            f"{len(mixing)} layers in the towers use the statistics of a micro-batch of "
            f"`micro_batch_size` rows, not of the whole batch. The first is {mixing[0]}. BatchNorm "
            "normalizes by them, and `scale_grad_by_freq` counts indices. If this matters, use "
            "LayerNorm, `scale_grad_by_freq=False`, or a larger `micro_batch_size`."
        )
