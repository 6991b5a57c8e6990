"""The promised versions are the tested versions, and pyproject.toml is their only source."""

import importlib.metadata
import re
import runpy
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import lightning_mp

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
PINS = runpy.run_path(str(ROOT / ".ci" / "floor.py"))["pins"](PYPROJECT)


def _requirements() -> list[Requirement]:
    project = pytest.importorskip("tomllib").loads(PYPROJECT)["project"]  # from Python 3.11 on
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    found = [Requirement(line) for group in groups for line in group]
    return [each for each in found if each.name != project["name"]]


def test_every_requirement_has_a_lower_bound_that_the_floor_pins() -> None:
    pins = {pin.name: pin for pin in map(Requirement, PINS)}
    for requirement in _requirements():
        (lowest,) = (each.version for each in requirement.specifier if each.operator == ">=")
        pin = pins[requirement.name]
        assert str(pin.specifier) == f"=={lowest}"
        assert requirement.specifier.contains(lowest), requirement  # not excluded by `!=`
        assert str(pin.marker) == str(requirement.marker)


def test_readme_states_the_requirements() -> None:
    lowest = {pin.name: str(pin.specifier)[2:] for pin in map(Requirement, PINS)}
    lowest["Python"] = re.search(r'requires-python = ">=([\d.]+)"', PYPROJECT)[1]
    said = re.search(r"`pip install \.` \((.*?)\)", (ROOT / "README.md").read_text())[1]
    promised = dict(part.split(" >= ") for part in said.split(", "))
    assert set(promised) == {"Python", "torch", "lightning"}
    assert promised.items() <= lowest.items()


WORKFLOWS = sorted(path.name for path in (ROOT / ".github" / "workflows").iterdir())


@pytest.mark.parametrize("file", WORKFLOWS)
def test_workflows_run_targets_of_the_makefile(file: str) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / file).read_text())
    makefile = (ROOT / "Makefile").read_text()
    assert workflow["permissions"] == {
        "contents": "read"
    }  # jobs request further permissions themselves
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        targets = matrix.get("target", [each["target"] for each in matrix.get("include", [])])
        commands = [step["run"] for step in job["steps"] if "run" in step]
        targets = targets or [command.removeprefix("make ") for command in commands]
        for target in " ".join(targets).split():
            assert re.search(rf"^{target}:", makefile, re.MULTILINE)
        for step in job["steps"]:
            # A tag can be moved, a digest cannot.
            assert re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + 40 * "0")), step


def test_version_equals_the_tag() -> None:
    assert 'dynamic = ["version"]' in PYPROJECT
    assert "[tool.setuptools_scm]" in PYPROJECT
    assert lightning_mp.__version__ == importlib.metadata.version("lightning-mp")
    released = re.findall(r"^## \[([\d.]+)\] - (\d{4}-\d\d-\d\d)$", CHANGELOG, re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert released[0] == (citation["version"], str(citation["date-released"]))
