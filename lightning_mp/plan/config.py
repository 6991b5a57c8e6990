"""Subjects from a LightningCLI config: the model, towers and data of the run."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_mp._config_files import read_config
from lightning_mp._nested import map_tensors, tensors_in
from lightning_mp.gradient_cache._served.towers import find_tower
from lightning_mp.plan.subject import PRECISIONS, StaticBytes, Subject, TowerBytes
from lightning_mp.plan.tower_bytes import blank, computing_in, measure_towers

__all__ = ["subject_of_config"]


def subject_of_config(paths: str | Sequence[str], precision: str | None = None) -> Subject:
    """Make model and data of a config, and measure its towers in one training step.

    No Trainer is made, so a config for 256 GPUs can be planned on a laptop. The bytes of a pair are
    those of the first batch of the training loader.

    Raises:
        ValueError: `PRECISIONS` lacks the precision of the config, or there is no training loader.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a `class_path` may refer to code in this folder
    settings = read_config(paths)
    trainer = settings.get("trainer") or {}
    strategy = _arguments(trainer.get("strategy"))
    chosen = precision or _precision(trainer)
    if chosen not in PRECISIONS:
        raise ValueError(
            f"Passed a config with the precision {chosen!r}. `plan` knows "
            f"{', '.join(PRECISIONS)}: pass the nearest by `--precision`."
        )
    batch = _batch(settings)
    loader_batches = strategy.get("loader_batches_per_step", 1)
    micro_batch = strategy.get("micro_batch_size", 256)
    one = tensors_in(_resized(batch, 1, fake=False))
    model, towers, found = _measured_model(settings, strategy, batch, PRECISIONS[chosen])
    devices = trainer.get("devices")
    if isinstance(devices, list):
        devices = len(devices)
    return Subject.of(
        model,
        _optimizers(settings, model),
        name=type(model).__name__,
        towers=towers,
        pair_bytes=sum(tensor.nbytes for tensor in one),
        precision=chosen,
        # The defaults of `InfCLStrategy`; 256 also stands for the result of "auto".
        micro_batch=256 if micro_batch == "auto" else micro_batch,
        offload=strategy.get("offload") == "host",
        prefetch=strategy.get("prefetch", 2),
        loader_batches=loader_batches,
        rank_batch=_pairs(batch) * loader_batches,
        devices=devices if isinstance(devices, int) and devices > 0 else None,
        nodes=int(trainer.get("num_nodes") or 1),
        found=found,
    )


def _measured_model(
    settings: dict[str, Any], strategy: dict[str, Any], batch: Any, precision: StaticBytes
) -> tuple[LightningModule, dict[str, TowerBytes], str]:
    """Measure on tensors without memory, or on a few pairs if the model cannot run on them."""

    def measure(
        made_in: AbstractContextManager[object], *, fake: bool
    ) -> tuple[LightningModule, dict[str, TowerBytes]]:
        with made_in, computing_in(precision):
            model = _model(settings)
        if fake:
            blank(model)
        towers = [find_tower(model, name) for name in strategy.get("towers", ["visual", "text"])]

        def step(size: int) -> None:
            model.training_step(_resized(batch, size, fake), 0)

        return model, measure_towers(model, towers, step, precision)

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
            return *measure(made_in, fake=True), "on tensors without memory"
    return *measure(nullcontext(), fake=False), "on a few real pairs"


def _model(settings: dict[str, Any]) -> LightningModule:
    model: LightningModule = _made(settings, "model")
    for name in ("log", "log_dict"):  # there is no Trainer to log to
        setattr(model, name, lambda *args, **kwargs: None)
    return model


def _resized(batch: Any, size: int, fake: bool) -> Any:
    """Return a batch of another size; the values of a fake one do not matter."""
    pairs = _pairs(batch)

    def resize(leaf: Tensor) -> Tensor:
        if not leaf.ndim or len(leaf) != pairs:
            return leaf
        if fake:
            return torch.empty((size, *leaf.shape[1:]), dtype=leaf.dtype)
        return leaf[torch.arange(size) % pairs]

    return map_tensors(batch, resize)


def _pairs(batch: Any) -> int:
    leaves = [tensor for tensor in tensors_in(batch) if tensor.ndim]
    if not leaves:
        raise ValueError(
            f"Passed a config whose loader yields {type(batch).__name__} without tensors of rows. "
            "The bytes of a pair are then unknown; pass `--model` in place of the config."
        )
    return max(len(leaf) for leaf in leaves)  # a shorter tensor has no row for each pair


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
    # Messages of the Trainer about devices would interrupt the plan.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # Schedules ask the Trainer for the number of steps, on which states do not depend.
    model.trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=-1, max_steps=1000, logger=False
    )
    made = tree_leaves(model.configure_optimizers())
    return [leaf for leaf in made if isinstance(leaf, Optimizer)]


def _batch(settings: dict[str, Any]) -> Any:
    """Return the first batch of the training loader of the data module, or of the model."""
    data = _made(settings, "data") if "data" in settings else _model(settings)
    if not is_overridden("train_dataloader", data):
        raise ValueError(
            "Passed a config without `data`, whose model has no `train_dataloader`, so the bytes "
            "of a pair are unknown. Add the data module of the run."
        )
    data.prepare_data()
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def _arguments(described: Any) -> dict[str, Any]:
    has_any = isinstance(described, dict) and described.get("init_args")
    return dict(described["init_args"]) if has_any else {}


def _precision(trainer: dict[str, Any]) -> str:
    """Return the key of `PRECISIONS` that the Trainer's settings select."""
    plugins = trainer.get("plugins") or []
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        path = plugin["class_path"] if isinstance(plugin, dict) else plugin
        name = str(path).rpartition(".")[2]
        if name in PRECISIONS:
            return name
    named = str(trainer.get("precision"))
    return "32-true" if named in ("32", "None") else named
