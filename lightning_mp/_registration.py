"""Makes `Trainer(strategy="inf_cl")` known without importing Lightning for it.

`import lightning_mp` would otherwise take as long as Lightning does, seconds of CPU time, also for
those who want a loss or an optimizer only. Lightning has no entry point for strategies.
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
    """Register the strategies with Lightning, now or as soon as it is imported.

    `pytorch_lightning`, the same code under another name, has a registry of its own and would not
    know them. There the names lead to an error that says so.
    """
    for name, make in (("lightning.pytorch", _make), ("pytorch_lightning", _refuse)):
        module = sys.modules.get(f"{name}.strategies")
        # Of a module that is just being imported, the registry may be missing yet.
        if hasattr(module, "StrategyRegistry"):
            _register(module, make)
        else:
            # In front, since the standard finder would find the module first.
            sys.meta_path.insert(0, _AfterImport(f"{name}.strategies", make))


class _AfterImport:
    """Lets the import of a registry take its course, and registers at its end."""

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name = name
        self.make = make

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)  # or the search below would come here again
        spec = importlib.util.find_spec(fullname)
        # Where it is not installed, its import fails as it would have.
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module, self.make)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(module: Any, make: Callable[..., Any]) -> None:
    for name, (class_name, description) in _STRATEGIES.items():
        # By class name too, for `strategy: InfCLStrategy` in YAML; the Trainer lowers the case.
        for alias in (name, class_name.lower()):
            module.StrategyRegistry.register(
                alias,
                make,
                description=description,
                override=True,  # the package may be imported anew, as in a notebook
                class_name=class_name,
            )


def _make(class_name: str) -> Any:
    # Through the lazy package: a strategy is imported when a Trainer asks for it by name.
    return getattr(importlib.import_module("lightning_mp"), class_name)()


def _refuse(class_name: str) -> Any:
    from lightning_mp._foreign import refuse

    refuse(class_name)
