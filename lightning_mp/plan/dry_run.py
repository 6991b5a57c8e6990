"""The run of a config without its Trainer: the first batch, and training steps on a few pairs."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_mp._nested import open_container, tensors_in
from lightning_mp.cli.reasons import reason_of
from lightning_mp.gradient_cache._served.towers import find_tower
from lightning_mp.plan.subject import PRECISIONS, StaticBytes, Subject, TowerBytes
from lightning_mp.plan.tower_bytes import SIZES, blank, measure_towers
from lightning_mp.precision._weights.half_module import cast_castable

__all__ = ["DryRun"]


class _Trainer(Trainer):
    """A Trainer of one process that tells model and data the ranks of the config."""

    def __init__(self, settings: Mapping[str, Any], ranks: int) -> None:
        # Messages of the Trainer about devices would interrupt the plan.
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        epochs = settings.get("max_epochs") or 1000
        super().__init__(accelerator="cpu", devices=1, max_epochs=epochs, barebones=True)
        self._ranks = ranks

    @property
    def world_size(self) -> int:
        return self._ranks

    @property
    def estimated_stepping_batches(self) -> int:
        return 1000  # for schedules; the states do not depend on the number of steps


class _WithoutValues(FakeTensorMode):
    """A mode whose tensors have no values, not even `torch.tensor(0)`, as in batch normalization.

    `copy.deepcopy` of a tensor with a value fails in torch 2.13, and the next garbage collection
    ends the process with a segmentation fault.
    """

    @override
    def may_turn_const(self, t: Tensor) -> bool:
        return False


class DryRun:
    """The data of a config, and training steps of its model on a few pairs."""

    def __init__(self, settings: dict[str, Any], ranks: int) -> None:
        self._settings = settings
        self._trainer = _Trainer(settings.get("trainer") or {}, ranks)
        self._data = None
        if "data" in settings:
            self._data = _made(settings, "data", LightningDataModule)
        source = self._model() if self._data is None else self._data
        if not is_overridden("train_dataloader", source):
            raise ValueError(
                "Passed a config without `data`, whose model has no `train_dataloader`, so the "
                "bytes of a pair are unknown. Add the data module of the run."
            )
        source.trainer = self._trainer
        source.prepare_data()
        source.setup("fit")
        loader = source.train_dataloader()
        # As in `fit`, several loaders yield one batch of all.
        if not isinstance(loader, CombinedLoader):
            loader = CombinedLoader(loader, "max_size_cycle")
        self._batch: Any = next(iter(loader), (None,))[0]  # `None` if the data are empty
        self._workers = max(getattr(each, "num_workers", 0) for each in loader.flattened)
        lengths = {len(tensor) for tensor in tensors_in(self._batch) if tensor.ndim and len(tensor)}
        if not lengths:
            raise ValueError(
                f"Passed a config whose loader yields {type(self._batch).__name__} without tensors "
                "of rows. The bytes of a pair are then unknown; pass `--model` in place of the "
                "config."
            )
        # A field may have several rows for each pair, such as five texts.
        sizes = {getattr(each, "batch_size", None) for each in loader.flattened}
        self._pairs = max(lengths & sizes or lengths)
        self._stepped: dict[int, int] = {}  # bytes of the batch that a step of some pairs received

    def subject(self, towers: Sequence[str], precision: str, **known: Any) -> Subject:
        """Measure on tensors without memory, or on a few pairs if the model needs values."""
        # Some models cannot be made without memory, because open_clip moves its models to a device.
        # Others read values, or have operators without a shape function.
        modes = (_WithoutValues, nullcontext()), (FakeTensorMode, unset_fake_temporarily())
        for mode, made_in in modes:
            with (
                contextlib.suppress(Exception),
                mode(allow_non_fake_inputs=True),
                warnings.catch_warnings(),
            ):
                # `nn.TransformerEncoder` copies its layer, and `copy.deepcopy` reads the pointer.
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
                measured = self._measured(made_in, towers, PRECISIONS[precision], fake=True)
                found = "on tensors without memory"
                break
        else:
            measured = self._measured(nullcontext(), towers, PRECISIONS[precision], fake=False)
            found = "on a few real pairs"
        model, optimizers, figures = measured
        few, many = SIZES
        slope = (self._stepped[many] - self._stepped[few]) / (many - few)
        shared = self._stepped[few] - few * slope
        return Subject.of(
            model,
            optimizers,
            name=type(model).__name__,
            towers=figures,
            pair_bytes=slope + shared / self._pairs,
            loaded_pair_bytes=_bytes(self._batch) / self._pairs,
            precision=precision,
            loader_pairs=self._pairs,
            workers=self._workers,
            found=found,
            **known,
        )

    def _measured(
        self,
        made_in: AbstractContextManager[object],
        towers: Sequence[str],
        precision: StaticBytes,
        *,
        fake: bool,
    ) -> tuple[LightningModule, list[Optimizer], dict[str, TowerBytes]]:
        with made_in:
            model = self._model()
            model.setup("fit")
            try:
                found = [find_tower(model, name) for name in towers]
            except ValueError:
                # Last, because the hook may shard towers over a mesh, which is `None` here.
                with contextlib.suppress(TypeError):
                    model.configure_model()
                found = [find_tower(model, name) for name in towers]
        if fake:
            blank(model, precision.weights_dtype)
        else:
            model.to(precision.weights_dtype)
        optimizers = _optimizers(self._settings, model)
        self._trainer.strategy.optimizers = optimizers
        # The index of the batch is optional, as in `fit`.
        takes_index = is_param_in_hook_signature(model.training_step, "batch_idx", min_args=2)

        def step(size: int) -> None:
            batch = self._resized(self._batch, size)
            if precision.weights_dtype:  # as by Lightning's plugins
                batch = cast_castable(batch, precision.weights_dtype)
            batch = model._on_before_batch_transfer(batch)
            batch = model._apply_batch_transfer_handler(batch, torch.device("cpu"))
            self._stepped[size] = _bytes(batch)
            model.training_step(batch, *([0] if takes_index else []))

        return model, optimizers, measure_towers(model, found, step, precision)

    def _model(self) -> LightningModule:
        model: LightningModule = _made(self._settings, "model", LightningModule)
        for name in ("log", "log_dict"):  # nothing is logged
            setattr(model, name, lambda *args, **kwargs: None)
        self._trainer.strategy.connect(model)
        self._trainer._data_connector.attach_data(model, datamodule=self._data)
        return model

    def _resized(self, value: Any, size: int) -> Any:
        """Return a batch with the rows of `size` pairs."""
        if rows := self._rows_of_a_pair(value):
            return value[torch.arange(size * rows) % len(value)]
        opened = open_container(value)
        if opened is None:
            return value
        items, is_list = opened.items, isinstance(value, (list, tuple))
        # One item for each pair, such as a text. A batch of two pairs may also have two fields.
        is_field = any(self._rows_of_a_pair(item) == 1 for item in items)
        if is_list and len(items) == self._pairs and not is_field:
            return type(value)([items[index % self._pairs] for index in range(size)])
        return opened.close([self._resized(item, size) for item in items])

    def _rows_of_a_pair(self, value: object) -> int:
        """Return the rows of a tensor for each pair; 0 if it has no rows."""
        rows = len(value) if isinstance(value, Tensor) and value.ndim else 0
        return 0 if rows % self._pairs else rows // self._pairs


def _bytes(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(batch))


def _made(settings: dict[str, Any], part: str, kind: type, **options: Any) -> Any:
    """Make one part of a config."""
    # By default, the parser would exit and print the usage of another command.
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(kind, part, **options)
    try:
        parsed = parser.parse_object({part: settings.get(part)})
    except ArgumentError as error:
        reason = reason_of(str(error)) or error
        raise ValueError(f"Passed a config whose `{part}` cannot be made: {reason}") from error
    return parser.instantiate_classes(parsed)[part]


def _optimizers(settings: dict[str, Any], model: LightningModule) -> list[Optimizer]:
    """Return the optimizers of the config, or of the model."""
    if settings.get("optimizer"):
        described = _made(settings, "optimizer", Optimizer, instantiate=False, skip={"params"})
        return [instantiate_class(([*model.parameters()],), described)]
    made = tree_leaves(model.configure_optimizers())
    return [leaf for leaf in made if isinstance(leaf, Optimizer)]
