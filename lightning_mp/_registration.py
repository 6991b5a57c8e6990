"""Registers the strategies with Lightning without importing Lightning.

Importing Lightning takes seconds, also for users of a loss or an optimizer alone, and Lightning has
no entry point for strategies.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["register_strategies"]

_STRATEGIES = {
    "inf_cl": (
        "InfCLStrategy",
        "DDP with gradient-cached towers for near-infinite contrastive batches",
    ),
    "inf_cl_fsdp2": (
        "InfCLModelParallelStrategy",
        "FSDP2 with gradient-cached towers for near-infinite contrastive batches",
    ),
}


def register_strategies() -> None:
    """Register the strategies with Lightning, now or when Lightning is imported.

    `pytorch_lightning`, the same code under another name, has a registry of its own. There the
    names raise an error with an explanation.
    """
    for name, make in (("lightning.pytorch", _make), ("pytorch_lightning", _refuse)):
        module = sys.modules.get(f"{name}.strategies")
        # While the module is being imported, the registry may not exist yet.
        if hasattr(module, "StrategyRegistry"):
            _register(module, make)
        else:
            # In front of the standard finder.
            sys.meta_path.insert(0, _AfterImport(f"{name}.strategies", make))


class _AfterImport:
    """Import hook that registers the strategies after Lightning's registry was imported."""

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name = name
        self.make = make

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)  # the search below must not find this hook
        spec = importlib.util.find_spec(fullname)
        # If the module is not installed, its import fails as usual.
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module, self.make)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(module: Any, make: Callable[..., Any]) -> None:
    for name, (class_name, description) in _STRATEGIES.items():
        # Also the class name, for `strategy: InfCLStrategy` in YAML; the Trainer lowercases it.
        for alias in (name, class_name.lower()):
            module.StrategyRegistry.register(
                alias,
                make,
                description=description,
                override=True,  # a notebook may reload the package
                class_name=class_name,
            )


def _make(class_name: str) -> Any:
    # Imported here, when a Trainer uses the name.
    return getattr(importlib.import_module("lightning_mp"), class_name)()


def _refuse(class_name: str) -> Any:
    from lightning_mp._foreign import refuse

    refuse(class_name)
