"""`StartedRun`: the run of a config file, set up as in `fit` and stopped before its first batch.

Data are prepared, the model is configured, and the strategy and the precision plugin set up model
and optimizers. The callbacks and loggers of the config are made, but none of their hooks runs, so
that nothing is written.
"""

import copy
import logging
import os
import re
import sysconfig
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PassThroughProfiler

from lightning_mp import precision
from lightning_mp._config_files import class_and_arguments, plugins_of
from lightning_mp.cli.lightning_cli import LightningMPCLI
from lightning_mp.cli.reasons import reason_of

__all__ = ["StartedRun", "start"]

# Arguments of `fit` in a saved config, which a Trainer does not accept.
_OF_FIT = ("ckpt_path", "weights_only", "subcommand")


@dataclass
class StartedRun:
    """The objects of a run; an object that could not be made is `None` or empty.

    Attributes:
        settings: The config as it was read.
        trainer: The Trainer, on one device of this machine.
        model: The LightningModule.
        callbacks: The callbacks of the config.
        is_set_up: Whether the set-up is complete.
        error: The error that the config or the set-up raised.
        notes: What could not be inspected, and why.
    """

    settings: dict[str, Any]
    trainer: pl.Trainer | None = None
    model: pl.LightningModule | None = None
    callbacks: list[Callback] = field(default_factory=list)
    is_set_up: bool = False
    error: Exception | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """The error in one line."""
        return reason_of(str(self.error)) or str(self.error)

    @property
    def place(self) -> str:
        """The type of the error, and `ckpt_path` or the last line outside of installed packages."""
        place = ""
        for frame, line in traceback.walk_tb(getattr(self.error, "__traceback__", None)):
            path, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
            is_installed = "-packages" in path or path.startswith(sysconfig.get_path("stdlib"))
            if module.endswith(".checkpoint_connector") and self.settings.get("ckpt_path"):
                place = f" ({type(self.error).__name__} in `ckpt_path`)"
            if not is_installed and module.partition(".")[0] != "lightning_mp":
                name = f"{type(self.error).__name__} in {os.path.basename(path)}"
                place = f" ({name}, line {line})"
        return place

    @property
    def trainer_settings(self) -> dict[str, Any]:
        """The arguments of the Trainer as they were read."""
        return self.settings.get("trainer") or {}

    @property
    def balanced_plugin(self) -> str:
        """The plugin for fp32 weights that supports the strategy of the config."""
        strategy, _ = class_and_arguments(self.trainer_settings.get("strategy"))
        if re.search("modelparallel|fsdp2", strategy.lower().replace("_", "")):
            return "ModelParallelBalancedAMP"
        return "FSDPBalancedAMP" if "fsdp" in strategy.lower() else "BalancedAMP"

    @property
    def has_both_precisions(self) -> bool:
        """Whether `precision` is set in addition to a plugin, which no Trainer accepts."""
        names = [name for name, _ in plugins_of(self.trainer_settings)]
        is_named = any(n in precision.__all__ or n.endswith("Precision") for n in names)
        return is_named and self.trainer_settings.get("precision") is not None


class _SetUpError(Exception):
    """Ends `fit` when the set-up is complete."""


class _StopsAfterSetUp(Callback):
    def __init__(self, run: StartedRun, inspect: Callable[[StartedRun], None]) -> None:
        self._run, self._inspect = run, inspect

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._run.is_set_up = True
        try:
            trainer._checkpoint_connector.restore_training_state()  # `fit` does it after this hook
            trainer.fit_loop.setup_data()
        except Exception as error:
            self._run.error = error
        self._inspect(self._run)  # before plugin and strategy undo their set-up
        raise _SetUpError


def start(
    settings: dict[str, Any],
    inspect: Callable[[StartedRun], None] = lambda run: None,
    callback: Callback | None = None,
    **trainer: Any,
) -> StartedRun:
    """Make model, data and Trainer of a config, and set them up without a batch.

    Args:
        settings: The content of the config.
        inspect: Called once, after the set-up or its failure.
        callback: The only callback of the run, which stops it later; `None` stops it after the
            set-up.
        trainer: Arguments of the Trainer that replace those of the config.
    """
    run = StartedRun(settings)
    logging.disable(logging.WARNING)  # messages about devices would interrupt the findings
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _set_up(run, callback or _StopsAfterSetUp(run, inspect), trainer)
            if run.error is not None and not run.is_set_up:
                inspect(run)
    finally:
        logging.disable(logging.NOTSET)
    return run


def _set_up(run: StartedRun, callback: Callback, trainer: dict[str, Any]) -> None:
    arguments = {key: value for key, value in run.settings.items() if key not in _OF_FIT}
    arguments["trainer"] = {**run.trainer_settings, **_on_this_machine(run), **trainer}
    arguments = copy.deepcopy(arguments)  # the parser puts objects into lists
    try:
        cli = LightningMPCLI(
            args=arguments,  # type: ignore[arg-type]
            run=False,
            save_config_callback=None,
            parser_kwargs={"exit_on_error": False},
        )
    except Exception as error:
        run.error = error
        return
    run.trainer, run.model = cli.trainer, cli.model
    run.callbacks = [each for each in cli.trainer.callbacks if isinstance(each, Callback)]  # type: ignore[attr-defined]
    cli.trainer.callbacks[:] = [callback]  # type: ignore[attr-defined]
    cli.trainer.loggers, cli.trainer.profiler = [], PassThroughProfiler()  # type: ignore[attr-defined]
    path = run.settings.get("ckpt_path")
    # A folder is a sharded checkpoint, which needs the ranks of the run.
    loaded = path if isinstance(callback, _StopsAfterSetUp) and os.path.isfile(str(path)) else None
    is_word = str(path).partition(":")[0] in ("best", "last", "hpc", "registry")
    if path and not is_word and loaded is None:
        why = "was not loaded" if os.path.exists(str(path)) else "does not exist on this machine"
        run.notes.append(f"`ckpt_path: {path}`, which {why}.")
    options = {k: v for k, v in run.settings.items() if k == "weights_only"}
    try:
        cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=loaded, **options)
    except _SetUpError:
        pass
    except Exception as error:
        run.error = error


def _on_this_machine(run: StartedRun) -> dict[str, Any]:
    """Return arguments of the Trainer for this machine."""
    changed: dict[str, Any] = {"devices": 1, "num_nodes": 1}
    settings = run.trainer_settings
    if settings.get("strategy") is not None:
        changed["strategy"] = _in_this_process(settings["strategy"])
    if not torch.cuda.is_available():
        changed["accelerator"] = "cpu"
        if str(settings.get("precision")) in ("16", "16-mixed"):
            run.notes.append(
                "`precision: 16-mixed`, in place of which Lightning uses bf16 on a CPU."
            )
        name, _ = class_and_arguments(settings.get("strategy"))
        if "fsdp" in name.lower():
            changed["strategy"] = "auto"
            changed["plugins"] = _without_fsdp(settings.get("plugins"))
            run.notes.append(
                "The FSDP strategy, which needs a GPU, was left out. `BalancedAMP` replaces "
                "`FSDPBalancedAMP`, whose arguments are the same."
            )
    if run.has_both_precisions:
        changed["precision"] = None  # so that the other checks can run
    return changed


def _in_this_process(strategy: Any) -> Any:
    """Return a strategy that starts no processes and has the backend of this machine."""
    if isinstance(strategy, dict) and strategy.get("init_args"):
        name, given = class_and_arguments(strategy)
        removed = {"start_method", "process_group_backend"}
        if name == "ModelParallelStrategy":  # of the machines of the run
            removed |= {"data_parallel_size", "tensor_parallel_size"}
        return {**strategy, "init_args": {k: v for k, v in given.items() if k not in removed}}
    is_name = isinstance(strategy, str)
    return re.sub(r"^ddp_(spawn|fork|notebook)", "ddp", strategy) if is_name else strategy


def _without_fsdp(plugins: Any) -> Any:
    """Return plugins with `BalancedAMP` in place of `FSDPBalancedAMP`."""
    if isinstance(plugins, list):
        return [_without_fsdp(each) for each in plugins]
    if isinstance(plugins, dict) and "class_path" in plugins:
        return {**plugins, "class_path": _without_fsdp(plugins["class_path"])}
    is_fsdp = isinstance(plugins, str) and plugins.rpartition(".")[2] == "FSDPBalancedAMP"
    return "BalancedAMP" if is_fsdp else plugins
