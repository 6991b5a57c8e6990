"""Reads the YAML files of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

__all__ = ["read_config"]


def read_config(paths: str | Sequence[str]) -> dict[str, Any]:
    """Return the settings of YAML files, of which later ones override earlier ones as in `fit`.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is not valid YAML, or holds no mapping.
    """
    merged: dict[str, Any] = {}
    for path in [paths] if isinstance(paths, str) else paths:
        try:
            settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(
                f"Passed `--config {path}`, which is not valid YAML: {error}"
            ) from None
        if not isinstance(settings, dict):
            raise ValueError(
                f"Passed `--config {path}`, which holds no settings. It must be a YAML file as for "
                "`lightning-mp fit --config`."
            )
        merged = dict(_merged(merged, settings.get("fit", settings)))
    return merged


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    if "class_path" in new and new["class_path"] != old.get("class_path"):
        return new  # the arguments of another class
    return old | {name: _merged(old.get(name), value) for name, value in new.items()}
