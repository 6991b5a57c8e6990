"""Runs of `PrecisionPreflight` that several test modules share."""

import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import yaml

from lightning_mp import LightningMPCLI, PrecisionPreflight
from tests.preflight.models import Sentences, Words, trainer
from tests.quiet import QUIET

NAMES = ["BalancedAMP fp16", "16-mixed", "PureFP16 fp16"]  # names of precision plugins


def run_preflight(
    model: pl.LightningModule, name: str, steps: int = 1, **kwargs: Any
) -> PrecisionPreflight:
    """Run the preflight of a model with a plugin and stop before training."""
    callback = PrecisionPreflight(steps=steps, stops=True)
    pl.seed_everything(0, verbose=False)
    trainer(name, callback, **kwargs).fit(model, Sentences())
    return callback


def make_words(weak: str | None = None, **kwargs: Any) -> Words:
    """Return a seeded `Words` model."""
    torch.manual_seed(1)
    return Words(weak, **kwargs)


def rerun_with_settings(
    callback: PrecisionPreflight, model: pl.LightningModule
) -> PrecisionPreflight:
    """Apply printed settings as `fit --config` does, and return the preflight of this run."""
    settings = yaml.safe_load(callback.settings)["trainer"]
    args: Any = {"model": "tests.preflight.models.Words", "trainer": {**QUIET, **settings}}
    with warnings.catch_warnings():  # LightningCLI warns about the arguments of pytest
        warnings.simplefilter("ignore")
        cli = LightningMPCLI(
            args=args,
            run=False,
            save_config_callback=None,
            parser_kwargs={"exit_on_error": False},
        )
    callback = PrecisionPreflight(steps=1, stops=True)
    pl.seed_everything(0, verbose=False)
    plugins = cli.trainer.precision_plugin
    run = pl.Trainer(**{**QUIET, "max_steps": 4, "callbacks": callback}, plugins=plugins)  # type: ignore[arg-type]
    run.fit(model, Sentences())
    return callback


def checkpointed(model: Words, use_reentrant: bool) -> Words:
    """Checkpoint the activations of each block."""
    for block in model.blocks:
        block.forward = partial(  # type: ignore[method-assign]
            torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=use_reentrant
        )
    return model
