"""Names of a package that are imported when they are first used (PEP 562)."""

import ast
import importlib
import sys
from collections.abc import Callable

__all__ = ["lazy_names"]


def lazy_names(
    package: str,
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that imports names on demand.

    The names stand in the package once, as imports under `if TYPE_CHECKING:`, where type checkers
    and editors read them, and this function, too. Modules are names, but not of `__all__`.

    Args:
        package: Its `__name__`.
    """
    home_of, modules = _imports_of(package)

    def get(name: str) -> object:
        module = home_of.get(name, f"{package}.{name}" if name in modules else None)
        # An AttributeError: `hasattr` and `from ... import` of a missing name rely on it.
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = importlib.import_module(module)
        if name in home_of:
            value = getattr(value, name)
            vars(sys.modules[package])[name] = value  # so that it is asked for only once
        return value

    def names() -> list[str]:
        # What the package itself imports is no name of it.
        own = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*own, *home_of, *(name for name in modules if name[0] != "_")})

    return get, names, sorted(name for name in home_of if name[0] != "_")


def _imports_of(package: str) -> tuple[dict[str, str], set[str]]:
    """Return the module of each name that a package imports for type checkers, and its modules."""
    # By the loader, as a package may be in a zip file.
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
    # The modules that they come from are names, too.
    homes = {home.removeprefix(f"{package}.") for home in home_of.values()}
    return home_of, modules | {home for home in homes if "." not in home}
