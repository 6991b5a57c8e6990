"""Subjects from a LightningCLI config: the model, towers and data of the run."""

from __future__ import annotations

import re
from typing import Any

from lightning.fabric.connector import _convert_precision_to_unified_args
from lightning.fabric.utilities.device_parser import _normalize_parse_gpu_string_input

from lightning_mp._config_files import class_and_arguments, plugins_of
from lightning_mp.plan.dry_run import DryRun
from lightning_mp.plan.subject import PRECISIONS, Subject
from lightning_mp.strategies import InfCLStrategy

__all__ = ["devices_of", "subject_of_config"]

_ARGUMENTS = {"towers", "micro_batch_size", "offload", "prefetch", "loader_batches_per_step"}


def subject_of_config(settings: dict[str, Any], precision: str | None = None) -> Subject:
    """Make the model and data of a config, and measure the towers in two training steps.

    No Trainer of the config is made, so a config for 256 GPUs can be planned on a laptop. The bytes
    of a pair are those of the first batch of the training loader.

    Raises:
        ValueError: `PRECISIONS` lacks the precision of the config, or there is no training loader.
    """
    trainer = settings.get("trainer") or {}
    kind, given = class_and_arguments(trainer.get("strategy"))
    # Its constructor checks the arguments, and has the defaults for other strategies.
    strategy = InfCLStrategy(**{name: given[name] for name in _ARGUMENTS & given.keys()})
    chosen = precision or _precision(trainer)
    if chosen not in PRECISIONS:
        raise ValueError(
            f"Passed a config with the precision {chosen!r}. `plan` knows "
            f"{', '.join(PRECISIONS)}: pass the nearest by `--precision`."
        )
    devices, nodes = devices_of(trainer), int(trainer.get("num_nodes") or 1)
    micro_batch = strategy.micro_batch_size
    return DryRun(settings, ranks=(devices or 1) * nodes).subject(
        strategy.towers,
        chosen,
        # A run determines the size of "auto".
        micro_batch=256 if micro_batch == "auto" else micro_batch,
        offload=strategy.offload == "host",
        prefetch=strategy.prefetch,
        loader_batches=strategy.loader_batches_per_step,
        devices=devices,
        nodes=nodes,
        is_sharded=bool(re.search("fsdp|model_?parallel|deepspeed", kind.lower())),
    )


def devices_of(trainer: dict[str, Any]) -> int | None:
    """Return the ranks of a node of a Trainer's settings; `None` if they give no number."""
    devices = trainer.get("devices")
    # For the Trainer, "2" is a number, and "0,1" or "1," are indices.
    if isinstance(devices, str) and re.fullmatch(r"\d[\d, ]*", devices):
        devices = _normalize_parse_gpu_string_input(devices)
    if isinstance(devices, list):
        return len(devices)
    return devices if isinstance(devices, int) and devices > 0 else None


def _precision(trainer: dict[str, Any]) -> str:
    """Return the key of `PRECISIONS` that the Trainer's settings select, or another name."""
    for name, arguments in plugins_of(trainer):
        if name.endswith("BalancedAMP"):  # also those for sharded weights
            return "BalancedAMP"
        if name in PRECISIONS:
            return name
        if name.endswith("Precision"):
            return str(arguments.get("precision", name))
    return _convert_precision_to_unified_args(trainer.get("precision")) or "32-true"
