"""Names of a package that are imported when they are first used (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping

__all__ = ["lazy_names"]


def lazy_names(
    package: str, names_of: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package that imports its names on demand.

    Args:
        package: Its `__name__`.
        names_of: Module, relative to the package, to the names that are taken from it. The modules
            themselves are names too.
    """
    home_of = {name: module for module, names in names_of.items() for name in names}

    def get(name: str) -> object:
        module = home_of.get(name, name if name in names_of else None)
        # An AttributeError: `hasattr` and `from ... import` of a missing name rely on it.
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = importlib.import_module(f"{package}.{module}")
        if name in home_of:
            value = getattr(value, name)
            vars(sys.modules[package])[name] = value  # so that it is asked for only once
        return value

    def names() -> list[str]:
        modules = (module for module in names_of if "." not in module and module[0] != "_")
        # What the package itself imports is no name of it.
        own = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*own, *home_of, *modules})

    return get, names
