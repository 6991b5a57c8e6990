"""Subjects from a LightningCLI config: the model, towers and data of the run."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.fabric.connector import _convert_precision_to_unified_args
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_mp._config_files import read_config
from lightning_mp._nested import open_container, tensors_in
from lightning_mp.gradient_cache._served.towers import find_tower
from lightning_mp.plan.subject import PRECISIONS, StaticBytes, Subject, TowerBytes
from lightning_mp.plan.tower_bytes import SIZES, blank, computing_in, measure_towers

__all__ = ["subject_of_config"]


def subject_of_config(paths: str | Sequence[str], precision: str | None = None) -> Subject:
    """Make model and data of a config, and measure its towers in one training step.

    No Trainer of the config is made, so a config for 256 GPUs can be planned on a laptop. The bytes
    of a pair are those of the first batch of the training loader.

    Raises:
        ValueError: `PRECISIONS` lacks the precision of the config, or there is no training loader.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a `class_path` may refer to code in this folder
    settings = read_config(paths)
    trainer = settings.get("trainer") or {}
    kind, strategy = _class_and_arguments(trainer.get("strategy"))
    chosen = precision or _precision(trainer)
    if chosen not in PRECISIONS:
        raise ValueError(
            f"Passed a config with the precision {chosen!r}. `plan` knows "
            f"{', '.join(PRECISIONS)}: pass the nearest by `--precision`."
        )
    devices, nodes = _devices(trainer.get("devices")), int(trainer.get("num_nodes") or 1)
    run = _Run(settings, ranks=(devices or 1) * nodes)
    towers = strategy.get("towers", ["visual", "text"])
    model, optimizers, measured, found = run.measured(towers, PRECISIONS[chosen])
    micro_batch = strategy.get("micro_batch_size", 256)
    loader_batches = strategy.get("loader_batches_per_step", 1)
    return Subject.of(
        model,
        optimizers,
        name=type(model).__name__,
        towers=measured,
        pair_bytes=run.device_bytes(),
        loaded_pair_bytes=_bytes(run.batch) / run.pairs,
        precision=chosen,
        # The defaults of `InfCLStrategy`; 256 also stands for the result of "auto".
        micro_batch=256 if micro_batch == "auto" else micro_batch,
        offload=strategy.get("offload") == "host",
        prefetch=strategy.get("prefetch", 2),
        loader_batches=loader_batches,
        rank_batch=run.pairs * loader_batches,
        devices=devices,
        nodes=nodes,
        workers=run.workers,
        is_sharded=bool(re.search("fsdp|model_?parallel|deepspeed", kind.lower())),
        found=found,
    )


class _Trainer(Trainer):
    """A Trainer of one process that tells model and data the ranks of the config."""

    def __init__(self, settings: Mapping[str, Any], ranks: int) -> None:
        # Messages of the Trainer about devices would interrupt the plan.
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        off = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
        super().__init__(
            accelerator="cpu",
            devices=1,
            max_epochs=settings.get("max_epochs") or 1000,
            **dict.fromkeys(off, False),  # type: ignore[arg-type]
        )
        self._ranks = ranks

    @property
    def world_size(self) -> int:
        return self._ranks

    @property
    def estimated_stepping_batches(self) -> int:
        return 1000  # schedules ask for the number of steps, on which states do not depend


class _Run:
    """The data of a config, and training steps of its model on a few pairs."""

    def __init__(self, settings: dict[str, Any], ranks: int) -> None:
        self._settings = settings
        self._trainer = _Trainer(settings.get("trainer") or {}, ranks)
        self._data = _made(settings, "data") if "data" in settings else None
        source = self._attached(_made(settings, "model")) if self._data is None else self._data
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
        self.batch = next(iter(loader))[0]
        self.workers = max(getattr(each, "num_workers", 0) for each in loader.flattened)
        lengths = {len(tensor) for tensor in tensors_in(self.batch) if tensor.ndim and len(tensor)}
        if not lengths:
            raise ValueError(
                f"Passed a config whose loader yields {type(self.batch).__name__} without tensors "
                "of rows. The bytes of a pair are then unknown; pass `--model` in place of the "
                "config."
            )
        # A field may have several rows for each pair, such as five texts.
        sizes = {getattr(each, "batch_size", None) for each in loader.flattened}
        self.pairs = max(lengths & sizes or lengths)
        self._stepped: dict[int, int] = {}  # bytes of the batch of a step, by its pairs

    def device_bytes(self) -> float:
        """Return the bytes of a pair in the batch that the training step receives."""
        few, many = SIZES
        slope = (self._stepped[many] - self._stepped[few]) / (many - few)
        return slope + (self._stepped[few] - few * slope) / self.pairs  # shared by all pairs

    def measured(
        self, towers: Sequence[str], precision: StaticBytes
    ) -> tuple[LightningModule, list[Optimizer], dict[str, TowerBytes], str]:
        """Measure on tensors without memory, or on a few pairs if the model cannot run on them."""
        # Some models cannot be made without memory, because open_clip moves its models to a device.
        # Others read values, or have operators without a shape function.
        for made_in in (nullcontext(), unset_fake_temporarily()):
            with (
                contextlib.suppress(Exception),
                FakeTensorMode(allow_non_fake_inputs=True),
                warnings.catch_warnings(),
            ):
                # `nn.TransformerEncoder` copies its layer, and `copy.deepcopy` reads the pointer.
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
                on_fakes = self._measured(made_in, towers, precision, fake=True)
                return *on_fakes, "on tensors without memory"
        on_pairs = self._measured(nullcontext(), towers, precision, fake=False)
        return *on_pairs, "on a few real pairs"

    def _measured(
        self,
        made_in: AbstractContextManager[object],
        towers: Sequence[str],
        precision: StaticBytes,
        *,
        fake: bool,
    ) -> tuple[LightningModule, list[Optimizer], dict[str, TowerBytes]]:
        with made_in, computing_in(precision):
            model = self._attached(_made(self._settings, "model"))
            model.setup("fit")
            try:
                found = [find_tower(model, name) for name in towers]
            except ValueError:
                # Only now, because it may shard over a mesh, which does not exist here.
                model.configure_model()
                found = [find_tower(model, name) for name in towers]
        if fake:
            blank(model)
        optimizers = _optimizers(self._settings, model)
        self._trainer.strategy.optimizers = optimizers
        # The index of the batch is optional, as in `fit`.
        takes_index = is_param_in_hook_signature(model.training_step, "batch_idx", min_args=2)

        def step(size: int) -> None:
            batch = model._on_before_batch_transfer(self._resized(self.batch, size, fake))
            batch = model._apply_batch_transfer_handler(batch, torch.device("cpu"))
            self._stepped[size] = _bytes(batch)
            model.training_step(batch, *([0] if takes_index else []))

        return model, optimizers, measure_towers(model, found, step, precision)

    def _attached(self, model: LightningModule) -> LightningModule:
        for name in ("log", "log_dict"):  # nothing is logged
            setattr(model, name, lambda *args, **kwargs: None)
        self._trainer.strategy.connect(model)
        self._trainer._data_connector.attach_data(model, datamodule=self._data)
        return model

    def _resized(self, value: Any, size: int, fake: bool) -> Any:
        """Return a batch with the rows of `size` pairs; the values of a fake one do not matter."""
        if isinstance(value, Tensor):
            if not self._has_rows(value):
                return value
            rows = size * (len(value) // self.pairs)
            if fake:
                return torch.empty((rows, *value.shape[1:]), dtype=value.dtype)
            return value[torch.arange(rows) % len(value)]
        opened = open_container(value)
        if opened is None:
            return value
        items, is_list = opened.items, isinstance(value, (list, tuple))
        # One item for each pair, such as a text; a batch of two fields may have two pairs.
        if is_list and len(items) == self.pairs and not any(map(self._has_rows, items)):
            return type(value)([items[index % self.pairs] for index in range(size)])
        return opened.close([self._resized(item, size, fake) for item in items])

    def _has_rows(self, value: object) -> bool:
        """Return whether a tensor has one or more rows for each pair."""
        rows = len(value) if isinstance(value, Tensor) and value.ndim else 0
        return rows > 0 and rows % self.pairs == 0


def _bytes(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(batch))


def _made(settings: dict[str, Any], part: str, **options: Any) -> Any:
    """Make one part of a config."""
    kind = {"model": LightningModule, "data": LightningDataModule, "optimizer": Optimizer}[part]
    # By default, the parser would exit and print the usage of another command.
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(kind, part, **options)
    try:
        parsed = parser.parse_object({part: settings.get(part)})
    except ArgumentError as error:
        raise ValueError(f"Passed a config whose `{part}` cannot be made: {error}") from error
    return parser.instantiate_classes(parsed)[part]


def _optimizers(settings: dict[str, Any], model: LightningModule) -> list[Optimizer]:
    """Return the optimizers of the config, or of the model."""
    if settings.get("optimizer"):
        described = _made(settings, "optimizer", instantiate=False, skip={"params"})
        return [instantiate_class(([*model.parameters()],), described)]
    made = tree_leaves(model.configure_optimizers())
    return [leaf for leaf in made if isinstance(leaf, Optimizer)]


def _class_and_arguments(described: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of a class, without its module, and the arguments of the config."""
    given = described if isinstance(described, dict) else {"class_path": described}
    return str(given.get("class_path")).rpartition(".")[2], dict(given.get("init_args") or {})


def _devices(devices: Any) -> int | None:
    """Return the ranks of a node, `None` if the config does not say."""
    if isinstance(devices, str) and devices.strip("0123456789, ") == "":
        # As for the Trainer, "2" is a number and "0,1" or "1," are indices.
        devices = [n for n in devices.split(",") if n.strip()] if "," in devices else int(devices)
    if isinstance(devices, list):
        return len(devices)
    return devices if isinstance(devices, int) and devices > 0 else None


def _precision(trainer: dict[str, Any]) -> str:
    """Return the key of `PRECISIONS` that the Trainer's settings select, or another name."""
    plugins = trainer.get("plugins") or []
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        name, arguments = _class_and_arguments(plugin)
        if name.endswith("BalancedAMP"):  # also those for sharded weights
            return "BalancedAMP"
        if name in PRECISIONS:
            return name
        if name.endswith("Precision"):
            return str(arguments.get("precision", name))
    return _convert_precision_to_unified_args(trainer.get("precision")) or "32-true"
