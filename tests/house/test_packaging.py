"""The wheel holds the tree, installs into an empty environment, and has the right import names."""

import ast
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Installed paths of the folders at the top of the tree.
INSTALLED_AS = {"callbacks": "lightning_mp/callbacks", "strategies": "lightning_mp/strategies"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Built from a copy, because setuptools would add the files of an earlier build in `build/`.
    others = shutil.ignore_patterns(".*", "build", "*.egg-info", "cache", "output", "__pycache__")
    tree = shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=others)
    # In a clone, setuptools-scm passes the files of the last commit to setuptools.
    git = ["git", "-C", tree, "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in ("init", "add --all --force", "commit --message clone"):
        subprocess.run([*git, *command.split()], check=True, capture_output=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, tree],
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return path


def _tree() -> set[str]:
    """Return the paths inside the wheel of all source files of the tree."""
    files = set()
    for folder in ("lightning_mp", *INSTALLED_AS):
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT)
            through_symlink = inside.parts[:2] in (("lightning_mp", name) for name in INSTALLED_AS)
            if (
                path.suffix in (".py", ".typed", ".json", ".html", ".css", ".js")
                and not through_symlink
            ):
                parts = (INSTALLED_AS.get(inside.parts[0], inside.parts[0]), *inside.parts[1:])
                files.add("/".join(parts))
    return files


@pytest.mark.slow
def test_wheel_holds_exactly_the_tree(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == _tree()
    assert "lightning_mp/strategies/inf_cl.py" in packaged
    assert "lightning_mp/py.typed" in packaged
    assert any(name.endswith("licenses/LICENSE") for name in names)


def _public_names() -> dict[str, list[str]]:
    """Return every literal `__all__` of the modules in the wheel, read without importing."""
    names = {}
    for file in sorted(_tree()):
        if not file.endswith(".py"):
            continue
        source = ROOT / file
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in ast.parse(source.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", 0)]
            is_all = any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets)
            if is_all and isinstance(node.value, ast.List):
                names[module] = ast.literal_eval(node.value)
    return names


@pytest.mark.sweep
def test_wheel_in_a_fresh_environment_imports_every_public_name(
    wheel: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    # A path file adds the dependencies of this environment without copying gigabytes, and without
    # the editable install of this environment.
    site = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")})
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = [*pip, "install", "--no-deps", "--ignore-installed", "--quiet", wheel]
    subprocess.run(install, check=True, capture_output=True)
    check = subprocess.run([*pip, "check"], capture_output=True, text=True)
    assert "lightning-mp" not in check.stdout  # all requirements are met
    names = _public_names()
    assert "InfCLStrategy" in names["lightning_mp.strategies"]
    script = "\n".join(
        [
            "import lightning_mp",
            "from lightning.pytorch.strategies import StrategyRegistry",
            "assert 'inf_cl' in StrategyRegistry.available_strategies()",
            "assert lightning_mp.strategies.InfCLStrategy and lightning_mp.callbacks.SpikeGuard",
            "from lightning_mp import *",
            *(f"from {module} import {name}" for module, all_ in names.items() for name in all_),
            "print(lightning_mp.__file__)",
        ]
    )
    # `PYTHONPATH` would put another copy of the package before the wheel.
    outside = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": ""}}
    run = subprocess.run(
        [python, "-W", "ignore", "-c", script], capture_output=True, text=True, **outside
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(tmp_path))
    console = subprocess.run(
        [python.with_name("lightning-mp"), "--help"], capture_output=True, text=True, **outside
    )
    assert console.returncode == 0, console.stderr
    assert "{fit,validate,test,predict,report,plan,doctor,preflight}" in console.stdout
    # The requirements of `lightning-mp fit` are not in an extra.
    (metadata,) = Path(site).glob("lightning_mp-*.dist-info/METADATA")
    needed = r"^Requires-Dist: jsonargparse\[[^;]*signatures[^;]*$"
    assert re.search(needed, metadata.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", ["callbacks", "strategies"])
def test_import_without_the_package_name_suggests_the_right_import(name: str) -> None:
    with pytest.raises(ImportError, match=f"write `import lightning_mp.{name}`"):
        __import__(name)


@pytest.mark.parametrize("name", ["callbacks", "strategies"])
def test_symlinks_lead_to_the_folders_at_the_top(name: str) -> None:
    link = ROOT / "lightning_mp" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


@pytest.mark.parametrize(
    "package", ["callbacks", "contrastive", "metrics", "optim", "precision", "strategies"]
)
def test_root_of_a_package_holds_public_names_only(package: str) -> None:
    module = importlib.import_module(f"lightning_mp.{package}")
    rooms = {getattr(module, name).__module__.rpartition(".")[2] for name in module.__all__}
    roots = {each.name for each in pkgutil.iter_modules(module.__path__)}
    assert {name for name in roots if not name.startswith("_")} <= rooms


@pytest.mark.slow
@pytest.mark.parametrize(
    "package", ["numerics", "contrastive", "optim", "metrics", "callbacks/_rules"]
)
def test_numerical_packages_do_not_import_lightning(package: str) -> None:
    for path in (ROOT / "lightning_mp" / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for module in modules:
                assert module.split(".")[0] not in ("lightning", "pytorch_lightning"), path
