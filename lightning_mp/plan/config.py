"""Subjects from a LightningCLI config: the run's own model, towers and data."""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import sys
import timeit
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_mp._nested import map_tensors, tensors_in
from lightning_mp.gradient_cache._served.towers import find_tower
from lightning_mp.plan.subject import PRECISIONS, StaticBytes, Subject, TowerBytes
from lightning_mp.plan.tower_bytes import blank, computing_in, measure_towers

__all__ = ["pairs_per_second", "subject_of_config"]


def subject_of_config(path: str, precision: str | None = None) -> Subject:
    """Make model and data of a config, and measure its towers in one training step.

    The Trainer is not made, so a config for 256 GPUs can be planned on a laptop. The data module
    is: its first batch says how many bytes a pair has.

    Raises:
        ValueError: The config names a precision that is not among `PRECISIONS`, or its model has
            no batch to be measured on.
    """
    settings = _settings(path)
    trainer = settings.get("trainer") or {}
    strategy = _arguments(trainer.get("strategy"))
    chosen = precision or _precision(trainer)
    if chosen not in PRECISIONS:
        raise ValueError(
            f"Passed a config with the precision {chosen!r}. `plan` knows "
            f"{', '.join(PRECISIONS)}: pass the nearest by `--precision`."
        )
    data, batch = _data(settings)
    loader_batches = strategy.get("loader_batches_per_step", 1)
    micro_batch = strategy.get("micro_batch_size", 256)
    one = tree_leaves(_rows(batch, 1, fake=False))
    model, towers, found = _measured(settings, strategy, batch, PRECISIONS[chosen])
    return Subject.of(
        model,
        _optimizers(settings, model),
        name=type(model).__name__,
        towers=towers,
        pair_bytes=sum(leaf.nbytes for leaf in one if isinstance(leaf, Tensor)),
        precision=chosen,
        # The defaults are those of `InfCLStrategy`; 256 also stands for what "auto" would find.
        micro_batch=256 if micro_batch == "auto" else micro_batch,
        offload=strategy.get("offload") == "host",
        prefetch=strategy.get("prefetch", 2),
        loader_batches=loader_batches,
        batch=getattr(data, "batch_size", None),
        rank_batch=_pairs(batch) * loader_batches,
        found=found,
    )


def _settings(path: str) -> dict[str, Any]:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a `class_path` may lead to code beside the config
    settings: dict[str, Any] = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    return settings


def _measured(
    settings: dict[str, Any], strategy: dict[str, Any], batch: Any, precision: StaticBytes
) -> tuple[LightningModule, dict[str, TowerBytes], str]:
    """Measure on tensors without memory, or on a few pairs where a model needs more."""

    def measure(
        made_in: AbstractContextManager[object], *, fake: bool
    ) -> tuple[LightningModule, dict[str, TowerBytes]]:
        with made_in, computing_in(precision):
            model = _model(settings)
        if fake:
            blank(model)
        towers = [find_tower(model, name) for name in strategy.get("towers", ["visual", "text"])]

        def step(size: int) -> None:
            model.training_step(_rows(batch, size, fake), 0)

        return model, measure_towers(model, towers, step, precision)

    # Some models cannot be made without memory, as open_clip moves what it made to a device. Others
    # look at values, or have operators without a shape function.
    for made_in in (nullcontext(), unset_fake_temporarily()):
        with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
            return *measure(made_in, fake=True), "on tensors without memory"
    return *measure(nullcontext(), fake=False), "on a few real pairs"


def pairs_per_second(path: str, micro_batch: int) -> float:
    """Time a micro-batch of a config's towers on this machine, with gradient caching's replay."""
    settings = _settings(path)
    _, batch = _data(settings)
    model, rows = _model(settings), _rows(batch, micro_batch, fake=False)

    def step() -> None:
        with torch.no_grad():
            model.training_step(rows, 0)
        loss: Any = model.training_step(rows, 0)
        (loss if isinstance(loss, Tensor) else loss["loss"]).backward()

    _, *seconds = timeit.repeat(step, number=1, repeat=4)  # the first one warms up
    return micro_batch / statistics.median(seconds)


def _model(settings: dict[str, Any]) -> LightningModule:
    model: LightningModule = _made(settings, "model")
    for name in ("log", "log_dict"):  # there is no Trainer to log to
        setattr(model, name, lambda *args, **kwargs: None)
    return model


def _rows(batch: Any, size: int, fake: bool) -> Any:
    """Return a batch of another size; without memory its values do not matter."""
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
    return max(len(leaf) for leaf in leaves)  # what is shorter has no row for each pair


def _made(settings: dict[str, Any], part: str, **options: Any) -> Any:
    """Make one part of a config alone."""
    kind = {"model": LightningModule, "data": LightningDataModule, "optimizer": Optimizer}[part]
    # By default it would end the process, and show the usage of a command that nobody called.
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(kind, part, **options)
    try:
        parsed = parser.parse_object({part: settings.get(part)})
    except ArgumentError as error:
        raise ValueError(f"Passed a config whose `{part}` cannot be made: {error}") from error
    return parser.instantiate_classes(parsed)[part]


def _optimizers(settings: dict[str, Any], model: LightningModule) -> list[Optimizer]:
    """Return the optimizers of a run: the config's, as LightningCLI has them, or the model's."""
    if settings.get("optimizer"):
        described = _made(settings, "optimizer", instantiate=False, skip={"params"})
        return [instantiate_class(([*model.parameters()],), described)]
    # What a Trainer says of devices would stand in the middle of the plan.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # Schedules ask it for the steps of a run; states do not depend on them.
    model.trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=-1, max_steps=1000, logger=False
    )
    made = tree_leaves(model.configure_optimizers())
    return [leaf for leaf in made if isinstance(leaf, Optimizer)]


def _data(settings: dict[str, Any]) -> tuple[LightningDataModule | LightningModule, Any]:
    """Return what has the training loader, the data module or the model, and a batch of it."""
    data = _made(settings, "data") if "data" in settings else _model(settings)
    if not is_overridden("train_dataloader", data):
        raise ValueError(
            "Passed a config without `data`, whose model has no `train_dataloader`, so the bytes "
            "of a pair are unknown. Add the data module that the run will have."
        )
    # There is no Trainer to call them.
    data.prepare_data()
    data.setup("fit")
    return data, next(iter(data.train_dataloader()))


def _arguments(described: Any) -> dict[str, Any]:
    has_any = isinstance(described, dict) and described.get("init_args")
    return dict(described["init_args"]) if has_any else {}


def _precision(trainer: dict[str, Any]) -> str:
    """Return the key of `PRECISIONS` that a Trainer's settings come to."""
    plugins = trainer.get("plugins") or []
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        path = plugin["class_path"] if isinstance(plugin, dict) else plugin
        name = str(path).rpartition(".")[2]
        if name in PRECISIONS:
            return name
    named = str(trainer.get("precision"))
    # A Trainer's own default, and another name of it.
    return "32-true" if named in ("32", "None") else named
