"""The rules of CONTRIBUTING.md hold in the sources."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TABLE = TEXT.partition("## Where things are")[2].partition("\n## ")[0]
ROWS = [row.split("|")[1:-1] for row in TABLE.splitlines() if row.startswith("| `")]
SOURCES = sorted(
    path
    for folder in ("lightning_mp", "callbacks", "strategies", "papers")
    for path in (ROOT / folder).rglob("*.py")
    # In `lightning_mp`, these are links to the folders at the top.
    if not path.is_relative_to(ROOT / "lightning_mp" / "callbacks")
    and not path.is_relative_to(ROOT / "lightning_mp" / "strategies")
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MODULE, FUNCTION, KERNEL = 400, 60, 120
FOREIGN = {"torch", "lightning", "pytorch_lightning"}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each imported module with the name that the importing module gives to it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, (alias.asname or alias.name).partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{node.module}.{alias.name}", alias.asname or alias.name


def paths_of(cell: str) -> list[Path]:
    """Return the paths of a row of the table: the first, and others in the same folder."""
    first, *others = re.findall(r"`([^`]+)`", cell)
    homes = [ROOT, ROOT / "lightning_mp"]
    home = next((home / first for home in homes if (home / first).exists()), ROOT / first)
    return [home, *((ROOT if "/" in other else home.parent) / other for other in others)]


def test_limits_equal_those_of_contributing() -> None:
    assert f"{MODULE} at the very most; a function fits in {FUNCTION} beside its docstring" in TEXT
    assert f"which cannot be divided, in {KERNEL}" in TEXT


def test_modules_are_short() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: count for name, count in lines.items() if count > MODULE} == {}


def test_functions_are_short() -> None:
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                said = len((ast.get_docstring(node, clean=False) or "").splitlines())
                lines = (node.end_lineno or 0) - node.lineno + 1 - said
                is_kernel = any("jit" in ast.unparse(each) for each in node.decorator_list)
                limit = KERNEL if is_kernel else FUNCTION
                assert lines <= limit, f"{name_of(path)}: {node.name}"


def test_no_environment_variable_is_written_at_import() -> None:
    write = re.compile(r"os\.(environ(\[.*\] =| \|=|\.(setdefault|update))|putenv)")
    for path in SOURCES:
        for node in tree(path).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                assert not write.search(ast.unparse(node)), name_of(path)


def test_no_statement_is_global() -> None:
    found = [name_of(p) for p in SOURCES for n in ast.walk(tree(p)) if isinstance(n, ast.Global)]
    assert found == []


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_nothing_of_torch_and_lightning_is_patched() -> None:
    for path in SOURCES:
        theirs = {name for module, name in imports_of(path) if module.split(".")[0] in FOREIGN}
        for node in ast.walk(tree(path)):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AugAssign):
                targets = [node.target]
            written = [each for each in targets if isinstance(each, ast.Attribute | ast.Subscript)]
            patched = [ast.unparse(node) for each in written if _root(each) in theirs]
            assert patched == [], name_of(path)


def test_one_module_has_an_import_hook() -> None:
    hooks = [name_of(path) for path in SOURCES if "sys.meta_path" in path.read_text()]
    assert hooks == ["lightning_mp/_registration.py"]


def test_packages_of_the_table_import_lightning_only_where_they_may() -> None:
    closed = [path for cells in ROWS if cells[2].strip() == "no" for path in paths_of(cells[0])]
    assert ROOT / "lightning_mp" / "gradient_cache" in closed
    for folder in closed:
        assert folder.exists(), folder
        for path in folder.rglob("*.py") if folder.is_dir() else [folder]:
            modules = {module.partition(".")[0] for module, _ in imports_of(path)}
            assert not modules & {"lightning", "pytorch_lightning"}, name_of(path)


def test_rules_return_numbers_and_no_sentences() -> None:
    """Keys of templates have at most three words."""
    for path in (ROOT / "callbacks" / "_rules").glob("*.py"):
        statements = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Expr)]
        docstrings = {id(node.value) for node in statements}
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                is_short = len(node.value.split()) <= 3
                assert is_short or id(node) in docstrings, f"{path.name}: {node.value}"
        assert not any("._words" in module for module, _ in imports_of(path)), path.name


def test_table_names_every_package() -> None:
    named = {path for cells in ROWS for path in paths_of(cells[0])}
    assert [path for path in named if not path.exists()] == []
    homes = ("callbacks", "strategies", "lightning_mp/*")
    packages = {
        path.parent.resolve() for home in homes for path in ROOT.glob(f"{home}/_*/__init__.py")
    }
    assert packages
    assert packages - named == set()


def test_tests_have_a_folder_for_each_package() -> None:
    folders = {path.parent.name for path in TESTS if path.name.startswith("test_")} - {"tests"}
    packages = {
        path.parent.name
        for home in (ROOT, ROOT / "lightning_mp")
        for path in home.glob("*/__init__.py")
    }
    packages -= {"lightning_mp", "tests"}
    assert packages - folders == set()
    rooms = {path.parent.name.removeprefix("_") for path in SOURCES if path.stem == "__init__"}
    (row,) = (cells[1] for cells in ROWS if "`tests/`" in cells[0])
    own = set(re.findall(r"`tests/(\w+)/`", row))
    assert folders - rooms - own == {"benchmarks", "examples"}


def test_each_test_file_has_a_docstring() -> None:
    silent = [name_of(path) for path in TESTS if not path.read_text().startswith(('"""', 'r"""'))]
    assert silent == []


def test_no_test_asserts_on_elapsed_time() -> None:
    clock = re.compile(r"\b(perf_counter|monotonic|process_time|time\.time)\w*\(")
    for path in TESTS:
        reads_a_clock = clock.search(path.read_text())
        for node in ast.walk(tree(path)) if reads_a_clock else ():
            if isinstance(node, ast.Assert):
                assert not clock.search(ast.unparse(node)), f"{name_of(path)}:{node.lineno}"


def test_commands_and_files_of_the_text_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z]+)", TEXT):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    folders = "tests|docs|benchmarks|callbacks|lightning_mp|strategies|papers|\\.github"
    for path in re.findall(rf"(?:`|\()((?:{folders})/[\w./-]*)", TEXT):
        assert (ROOT / path).exists(), path
