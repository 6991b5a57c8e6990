"""Facts about a run at the head of a report: model, precision, optimizers, versions."""

import dataclasses
import datetime
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from torch.nn.parameter import is_lazy

from lightning_mp.precision.loss_scaler import LossScaler

__all__ = ["now", "preflight_page_of", "run_facts"]

_MAX_GROUPS = 8  # layer-wise learning rates need one group per layer
_GROUP_KEYS = ("lr", "betas", "eps", "momentum", "weight_decay")


def now() -> str:
    """Return the time, to the second, with its zone."""
    return datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def run_facts(trainer: pl.Trainer, highest_rates: Mapping[int, float]) -> list[list[str]]:
    """Return [label, value] pairs; a host sync if learning rates are on a GPU."""
    import lightning_mp

    module = trainer.lightning_module
    parameters = sum(p.numel() for p in module.parameters() if not is_lazy(p))
    plugin = trainer.precision_plugin
    root = trainer.strategy.root_device
    device = torch.cuda.get_device_name(root) if root.type == "cuda" else str(root)
    batches, clip_val = trainer.accumulate_grad_batches, trainer.gradient_clip_val
    # Lightning converts the string to an enum.
    how = trainer.gradient_clip_algorithm or "norm"
    return [
        ["Model", f"{type(module).__name__}, {parameters:,} parameters"],
        ["Precision", f"{type(plugin).__name__}({_settings(plugin)})"],
        # The verdicts of `PrecisionPreflight` are the first lines of its text.
        *(
            ["PrecisionPreflight", each.text.partition("\n")[0] or "nothing measured"]
            for each in _preflights(trainer)
        ),
        *(
            ["Optimizer", _optimizer(each) + _schedule_in_words(each, highest_rates.get(index))]
            for index, each in enumerate(trainer.optimizers[:_MAX_GROUPS])
        ),
        ["Accumulation", "none" if batches == 1 else f"{batches} batches a step"],
        ["Clipping", f"{clip_val:g} by {getattr(how, 'value', how)}" if clip_val else "none"],
        ["Strategy", f"{type(trainer.strategy).__name__}, world size {trainer.world_size}"],
        ["Device", device],
        [
            "Versions",
            f"lightning-mp {lightning_mp.__version__}, torch {torch.__version__}, "
            f"lightning {lightning.__version__}, Python {platform.python_version()}",
        ],
    ]


def _preflights(trainer: pl.Trainer) -> list[Any]:
    # By name, so that a run without `PrecisionPreflight` does not import it.
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if type(each).__name__ == "PrecisionPreflight"]


def preflight_page_of(trainer: pl.Trainer, report: Path | None) -> str | None:
    """Return the name of the page of `PrecisionPreflight` if it is in the report's folder."""
    pages = [each.path for each in _preflights(trainer) if each.path]
    beside = [page.name for page in pages if report is not None and page.parent == report.parent]
    return beside[-1] if beside else None


def _settings(plugin: object) -> str:
    """Return the public attributes of plain types, and the settings of the loss scale."""
    found: dict[str, object] = {"precision": getattr(plugin, "precision", "unknown")}
    # Private attributes are state, and the texts of objects would fill the page.
    found |= {k: v for k, v in vars(plugin).items() if not k.startswith("_") and _is_printable(v)}
    text = _join(found.items())
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, LossScaler):
        text += f"; loss scale: {_join(dataclasses.asdict(scaler.config).items())}"
    elif scaler is not None:
        text += f"; loss scale: {type(scaler).__name__}"
    return text


def _optimizer(optimizer: Any) -> str:
    # A schedule changes `lr` and keeps the configured learning rate as `initial_lr`.
    groups = [{**g, "lr": g.get("initial_lr", g.get("lr"))} for g in optimizer.param_groups]
    kinds = (_join((k, g[k]) for k in _GROUP_KEYS if g.get(k) is not None) for g in groups)
    texts = list(dict.fromkeys(kinds))
    more = f"; {len(texts) - _MAX_GROUPS} more kinds" if len(texts) > _MAX_GROUPS else ""
    return f"{type(optimizer).__name__}({'; '.join(texts[:_MAX_GROUPS])}{more})"


def _schedule_in_words(optimizer: Any, highest: float | None) -> str:
    """Return the highest and the current learning rate of the first group under a schedule."""
    # Without an optimizer, Lightning's mock optimizer has no groups.
    group: dict[str, Any] = next(iter(optimizer.param_groups), {})
    if "initial_lr" not in group or highest is None:
        return ""
    return f"; its schedule reached {highest:g} and is at {float(group['lr']):g}"


def _is_printable(value: object) -> bool:
    values = value if isinstance(value, tuple | list) else [value]
    return all(isinstance(each, str | int | float) for each in values)


def _join(items: Iterable[tuple[str, object]]) -> str:
    return ", ".join(f"{name}={_setting_in_words(value)}" for name, value in items)


def _setting_in_words(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_setting_in_words, value))}]"
    return f"{float(value):g}" if isinstance(value, float | torch.Tensor) else str(value)
