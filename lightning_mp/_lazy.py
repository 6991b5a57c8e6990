"""Imports the names of a package on first use (PEP 562)."""

import ast
import importlib
import sys
from collections.abc import Callable

__all__ = ["lazy_names"]


def lazy_names(
    package: str,
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that imports names on demand.

    The names are the imports under `if TYPE_CHECKING:` in the package, which type checkers, editors
    and this function read. Submodules are names, too, but are not in `__all__`.
    """
    home_of, modules = _imports_of(package)

    def get(name: str) -> object:
        module = home_of.get(name, f"{package}.{name}" if name in modules else None)
        # `hasattr` and `from ... import` rely on AttributeError for missing names.
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = importlib.import_module(module)
        if name in home_of:
            value = getattr(value, name)
            vars(sys.modules[package])[name] = value  # `__getattr__` is not called again
        return value

    def names() -> list[str]:
        # Without the modules and functions that the package itself imports.
        own = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*own, *home_of, *(name for name in modules if name[0] != "_")})

    return get, names, sorted(name for name in home_of if name[0] != "_")


def _imports_of(package: str) -> tuple[dict[str, str], set[str]]:
    """Return the home module of each name under `if TYPE_CHECKING:`, and all submodules."""
    # Read through the loader, because the package may be in a zip file.
    loader = sys.modules[package].__spec__.loader  # type: ignore[union-attr]
    source = loader.get_source(package)  # type: ignore[union-attr]
    home_of: dict[str, str] = {}
    modules: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            for each in node.body:
                assert isinstance(each, ast.ImportFrom)
                if each.module == package:
                    modules |= {alias.name for alias in each.names}
                else:
                    home_of |= {alias.name: str(each.module) for alias in each.names}
    # The home modules of names are names, too.
    homes = {home.removeprefix(f"{package}.") for home in home_of.values()}
    return home_of, modules | {home for home in homes if "." not in home}
