"""What CONTRIBUTING.md says of the sources is so."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SOURCES = sorted(
    path
    for folder in ("lightning_mp", "callbacks", "strategies", "papers")
    for path in (ROOT / folder).rglob("*.py")
    # In `lightning_mp` these are links to the folders beside it.
    if not path.is_relative_to(ROOT / "lightning_mp" / "callbacks")
    and not path.is_relative_to(ROOT / "lightning_mp" / "strategies")
)
MODULE, FUNCTION, KERNEL = 400, 60, 120


def test_limits_are_those_of_the_text() -> None:
    assert f"{MODULE} at the very most; a function fits in {FUNCTION} beside its docstring" in TEXT
    assert f"which cannot be divided, in {KERNEL}" in TEXT


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_and_its_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MODULE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            said = len((ast.get_docstring(node, clean=False) or "").splitlines())
            lines = (node.end_lineno or 0) - node.lineno + 1 - said
            is_kernel = any("jit" in ast.unparse(each) for each in node.decorator_list)
            assert lines <= (KERNEL if is_kernel else FUNCTION), node.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_environment_variable_is_written_at_import(path: Path) -> None:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            assert not re.search(r"os\.environ(\[.*\] =|\.(setdefault|update))", ast.unparse(node))


def test_rooms_exist_and_each_package_is_in_a_room() -> None:
    table = TEXT.partition("## Where things are")[2].partition("\n## ")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named: set[Path] = set()
    for cell in cells:
        first, *others = re.findall(r"`([^`]+)`", cell)
        home = ROOT / first if (ROOT / first).exists() else ROOT / "lightning_mp" / first
        named |= {home, *(home.parent / other for other in others)}
        named |= {ROOT / other for other in others if (ROOT / other).exists()}
    for path in named:
        assert path.exists() or (ROOT / "lightning_mp" / path.name).exists(), path
    packages = {path.parent for path in (ROOT / "callbacks").glob("_*/__init__.py")}
    assert packages <= named
