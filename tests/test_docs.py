"""The code blocks of README.md and docs/ run unchanged.

A block with a title, such as ```python title="clip.py"```, is a file that all other blocks may
import. Every other Python block is a script, and every YAML block a config for `lightning-mp fit`.
The added and unchanged lines of a `diff` block are a script. A `text` block after a script is its
expected output. `<!-- sweep -->` above a block defers it to `make sweep`, `<!-- ranks -->` runs it
on 2 ranks with `torchrun`, and `<!-- only ... -->` names the requirement without which it is not
run.
"""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lightning_mp import __all__ as NAMES
from lightning_mp.cli import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r'(?:^ *<!-- (?P<note>[^\n]*) -->\n)?^(?P<indent> *)```(?P<language>\w*)(?: title="(?P<title>'
    r'[\w./]+)")?\n(?P<code>.*?)^(?P=indent)```$(?:\n+(?P=indent)```text\n(?P<prints>.*?)^(?P=indent)'
    r"```$)?",
    re.MULTILINE | re.DOTALL,
)
RUN = ("python", "yaml", "diff")
SHOWN = ("", "text", "bash", "json", "css")  # not run: commands, tables, printed output


class Block(NamedTuple):
    """A code block of a page."""

    page: str
    line: int
    language: str
    title: str | None
    code: str
    note: str
    prints: str | None


def blocks_of(page: Path) -> list[Block]:
    text, found = page.read_text(), []
    for match in FENCE.finditer(text):
        code, indent = match["code"], match["indent"]
        if match["language"] == "diff":
            code = "".join(s[1:] for s in code.splitlines(keepends=True) if not s.startswith("-"))
        prints = match["prints"]
        found.append(
            Block(
                page=str(page.relative_to(ROOT)),
                line=text.count("\n", 0, match.start()) + 1,
                language=match["language"],
                title=match["title"],
                code=textwrap.dedent(code) if indent else code,
                note=match["note"] or "",
                prints=None if prints is None else textwrap.dedent(prints),
            )
        )
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
FILES = {block.title: block.code for block in BLOCKS if block.title}
SCRIPTS = [
    pytest.param(
        block,
        id=f"{block.page}:{block.line}",
        marks=pytest.mark.sweep if block.note == "sweep" else pytest.mark.slow,
    )
    for block in BLOCKS
    if block.language in RUN and not block.note.startswith(("only ", "ranks"))
]
ON_RANKS = [pytest.param(b, id=f"{b.page}:{b.line}") for b in BLOCKS if b.note == "ranks"]
pytestmark = pytest.mark.filterwarnings(
    # Lightning's advice about data loaders and loops, and its own deprecations.
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:Precision .* is not supported by the model summary",
    "ignore::DeprecationWarning",
    # Pages show failing runs.
    "ignore::lightning_mp.callbacks.InstabilityWarning",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with all files that have a title."""
    for title, code in FILES.items():
        (tmp_path / title).write_text(code)
        monkeypatch.delitem(sys.modules, title.removesuffix(".py"), raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-mp", "fit", "--config", "config.yaml"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # several GPUs would start this test on each
    return tmp_path


@pytest.mark.parametrize("block", SCRIPTS)
def test_code_block_runs_unchanged(
    block: Block, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    if block.language == "yaml":
        (folder / "config.yaml").write_text(block.code)
        main()
        return
    (folder / "script.py").write_text(block.code)
    runpy.run_path("script.py", run_name="__main__")
    printed = capsys.readouterr().out
    if block.prints is not None:
        expected = block.prints.split()
        assert printed.split()[-len(expected) :] == expected  # behind the Trainer's own table


@pytest.mark.sweep
@pytest.mark.distributed
@pytest.mark.parametrize("block", ON_RANKS)
def test_block_runs_on_two_ranks(block: Block, folder: Path) -> None:
    # `print` writes in parts, between which the other rank may write.
    report = "import os\nos.write(1, f'\\n{trainer.global_step} steps\\n'.encode())"
    (folder / "script.py").write_text(block.code + report)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", "script.py"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^[1-9]\d* steps$", done.stdout, re.MULTILINE)) == 2


def test_every_block_has_a_tested_language() -> None:
    for block in BLOCKS:
        assert block.language in (*RUN, *SHOWN), f"{block.page}:{block.line}"
    fences = sum(len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) for page in PAGES)
    printed = sum(block.prints is not None for block in BLOCKS)
    assert fences == 2 * (len(BLOCKS) + printed)  # none was missed


def test_every_public_name_is_on_an_api_page() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    # `epsilon_report` also names a module, so its page has the full path of the function.
    assert set(re.findall(r"^::: lightning_mp\.(?:\w+\.)*(\w+)$", pages, re.M)) == set(NAMES)


def test_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for block in BLOCKS:
        for target in re.findall(r"^make ([\w-]+)", block.code, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), (block.page, target)


def test_command_of_contributing_fills_in_the_address(tmp_path: Path) -> None:
    (command,) = re.findall(r"^sed .*$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    names = [name for name in shlex.split(command) if (ROOT / name).is_file()]
    for name in names:
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run(shlex.split(command), cwd=tmp_path, check=True)
    filled = {name: (tmp_path / name).read_text() for name in names}
    assert "OWNER" not in "".join(filled.values())
    address = "https://github.com/your-account/lightning-mp"
    assert f'\nHomepage = "{address}"\n' in filled["pyproject.toml"]
    assert f"\nrepo_url: {address}\n" in filled["mkdocs.yml"]
    assert f"\nrepository-code: {address}\n" in filled["CITATION.cff"]


def test_figures_equal_the_output_of_their_script(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}
    monkeypatch.setattr(Path, "write_text", lambda path, text: drawn.__setitem__(path, text))
    runpy.run_path(str(ROOT / "docs" / "_tools" / "figures.py"), run_name="__main__")
    monkeypatch.undo()
    assert drawn == {path: path.read_text() for path in drawn}
    # By docs/_tools/preflight_picture.py and docs/_tools/doctor_picture.py.
    measured = {ROOT / "docs/images/preflight.svg", ROOT / "docs/images/doctor.svg"}
    assert {*(ROOT / "docs/images").glob("*.svg")} == {*drawn, *measured}


def test_readme_links_resolve() -> None:
    text = PAGES[0].read_text()
    for target in re.findall(r"(?:\]\(|src=\")([^)\"#]+)", text):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    assert len(text.splitlines()) < 120


def test_files_of_the_tour_exist() -> None:
    text = (ROOT / "docs" / "tour.md").read_text()
    paths = [path for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
             for path in re.findall(r"`([\w/]+(?:\.py|/))`", row)]  # fmt: skip
    assert len(paths) > 25
    package = ROOT / "lightning_mp"
    rooms = [package, package / "callbacks"]  # a row may continue in the folder of its first file
    missing = [path for path in paths if not any((room / path).exists() for room in rooms)]
    assert missing == []
