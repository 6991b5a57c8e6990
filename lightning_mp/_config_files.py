"""Reads the YAML files of a run."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import get_loader

__all__ = ["class_and_arguments", "plugins_of", "read_config"]

_PARTS = "trainer", "model", "data", "optimizer", "lr_scheduler"


def read_config(paths: Sequence[str], classes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of YAML files, of which later ones override earlier ones as in `fit`.

    `classes` are those of parts of which the files contain only the arguments.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is not valid YAML, or holds no mapping.
    """
    merged: dict[str, Any] = {}
    for path in paths:
        settings = _read(Path(path))
        if not isinstance(settings, dict):
            raise ValueError(
                f"Passed `--config {path}`, which holds no settings. It must be a YAML file as for "
                "`lightning-mp fit --config`."
            )
        settings = _with_files(settings.get("fit", settings), Path(path).parent, _PARTS)
        if not isinstance(settings.get("trainer") or {}, dict):
            raise ValueError(f"Passed `--config {path}`, whose `trainer` holds no settings.")
        merged = dict(_merged(merged, settings))
    for part, cls in (classes or {}).items():
        path = f"{cls.__module__}.{cls.__qualname__}"
        merged[part] = {"class_path": path, "init_args": merged.get(part) or {}}
    return merged


def class_and_arguments(described: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of a class, without its module, and its arguments."""
    given = described if isinstance(described, dict) else {"class_path": described}
    return str(given.get("class_path")).rpartition(".")[2], given.get("init_args") or {}


def plugins_of(trainer: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the class name and the arguments of each plugin in the settings of a Trainer."""
    return [class_and_arguments(each) for each in _listed(trainer.get("plugins"))]


def _read(path: Path) -> Any:
    try:
        # As for `fit`; PyYAML itself reads 1e-3 as a string.
        return get_loader("yaml")(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"Passed `--config {path}`, which is not valid YAML: {error}") from None


def _with_files(settings: dict[str, Any], folder: Path, parts: Container[str]) -> dict[str, Any]:
    """Replace paths to files of a part, such as `trainer: trainer.yaml`, by the part."""
    found = {}
    for name, value in settings.items():
        home = folder
        if name in parts and isinstance(value, str) and value.endswith((".yaml", ".yml", ".json")):
            home = (folder / value).parent
            value = _read(folder / value)
        is_trainer = name == "trainer" and isinstance(value, dict)
        found[name] = _with_files(value, home, value) if is_trainer else value
    return found


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    if "class_path" in new and new["class_path"] != old.get("class_path"):
        return new  # the arguments of another class
    merged = old | {name: _merged(old.get(name), value) for name, value in new.items()}
    for name in new.keys() & {f"{known}+" for known in old}:  # appends to a list
        merged[name[:-1]] = _listed(old[name[:-1]]) + _listed(merged.pop(name))
    return merged


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
