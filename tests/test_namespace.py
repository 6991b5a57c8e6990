"""Every public name can be imported from `lightning_mp` and is loaded at first use."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import lightning_mp
import lightning_mp.callbacks
from lightning_mp._registration import _AfterImport

ROOT = Path(__file__).parents[1]
# Public names of these modules that belong to another package.
NOT_AT_THE_TOP = {"precision": {"LossScaler"}, "cli": {"main"}}


def _run(code: str, tree: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a new process with a source tree instead of the installed package."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tree)


@pytest.mark.slow
def test_import_loads_neither_torch_nor_lightning() -> None:
    ran = _run(
        "import sys, lightning_mp, lightning_mp.cli.report, lightning_mp.cli\n"
        "print({'torch', 'lightning', 'triton', 'torchmetrics'} & set(sys.modules))",
        ROOT,
    )
    assert ran.stdout == "set()\n", ran.stderr


@pytest.mark.parametrize(
    "package",
    [
        "callbacks",
        "contrastive",
        "gradient_cache",
        "metrics",
        "optim",
        "precision",
        "strategies",
        "cli",
    ],
)
def test_names_of_packages_can_be_imported_from_the_top(package: str) -> None:
    module = importlib.import_module(f"lightning_mp.{package}")
    public = set(module.__all__) - NOT_AT_THE_TOP.get(package, set())
    for name in public:
        assert getattr(lightning_mp, name) is getattr(module, name)
    assert public <= set(lightning_mp.__all__)


@pytest.mark.parametrize("module", [lightning_mp, lightning_mp.callbacks])
def test_type_checkers_see_lazily_loaded_names(module: ModuleType) -> None:
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and "TYPE" in ast.dump(node))
    seen = [(node.module, alias) for node in block.body for alias in node.names]
    for home, alias in seen:
        assert alias.asname == alias.name, "mypy --strict takes no other import for a re-export"
        if home != module.__name__:
            assert getattr(module, alias.name) is getattr(importlib.import_module(home), alias.name)
    names = [alias.name for home, alias in seen if home != module.__name__]
    assert sorted(name for name in names if name != "__version__") == module.__all__


def test_star_import_imports_every_name() -> None:
    names: dict[str, object] = {}
    exec("from lightning_mp import *", names)
    assert set(lightning_mp.__all__) <= set(names)
    assert len(set(lightning_mp.__all__)) == len(lightning_mp.__all__)


def test_dir_lists_names_and_packages() -> None:
    packages = {"callbacks", "cli", "contrastive", "metrics", "numerics", "optim", "precision"}
    packages.add("gradient_cache")
    shown = {name for name in dir(lightning_mp) if not name.startswith("__")}
    assert shown == {*lightning_mp.__all__, *packages, "strategies"}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'lightning_mp' has no attribute 'SpikeGard'"):
        lightning_mp.SpikeGard  # type: ignore[attr-defined]  # noqa: B018


def test_strategies_are_registered_when_the_registry_is_imported_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_lightning"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "strategies.py").write_text(
        "from lightning.fabric.strategies.registry import _StrategyRegistry\n"
        "StrategyRegistry = _StrategyRegistry()\n"
        "StrategyRegistry.register('ddp', dict)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    finder = _AfterImport("some_lightning.strategies", lambda class_name: f"made {class_name}")
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    registry = importlib.import_module("some_lightning.strategies").StrategyRegistry
    assert registry.available_strategies()[0] == "ddp"  # the import succeeded before
    assert registry.get("inf_cl") == registry.get("infclstrategy") == "made InfCLStrategy"
    assert finder not in sys.meta_path


def test_tree_without_symlinks_can_be_imported(tmp_path: Path) -> None:
    # git on Windows and zip downloads replace a symlink by a text file.
    for folder in ("lightning_mp", "callbacks", "strategies"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True)
    for folder in ("callbacks", "strategies"):
        (tmp_path / "lightning_mp" / folder).unlink()
        (tmp_path / "lightning_mp" / folder).write_text(f"../{folder}")
    ran = _run(
        "import importlib.util, lightning_mp.callbacks._report.page\n"
        "print(lightning_mp.callbacks._report.page.__file__)\n"
        "print(importlib.util.find_spec('lightning_mp.strategies').origin)",
        tmp_path,
    )
    found = [tmp_path / "callbacks/_report/page.py", tmp_path / "strategies/__init__.py"]
    assert ran.stdout.split() == [str(path) for path in found], ran.stderr
