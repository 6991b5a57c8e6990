"""Docstrings of callbacks contain an example, every argument, and a page with details."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_mp import callbacks

DOCS = Path(__file__).parents[2] / "docs" / "callbacks"
BASE = {"Alarm", "InstabilityError", "InstabilityMonitor", "InstabilityWarning"}


@pytest.mark.parametrize("name", sorted({*callbacks.__all__} - BASE))
def test_docstring_has_a_valid_example_every_argument_and_a_page(name: str) -> None:
    cls: Any = getattr(callbacks, name)
    text = inspect.getdoc(cls) or ""
    assert re.match(r"(Warns|Writes|Replays|Compares) .+\.\n\n", text)
    described = text.partition("\nArgs:\n")[2].partition("\n\n")[0]
    arguments = re.findall(r"^    (\w+): .", described, re.MULTILINE)
    assert arguments == [*inspect.signature(cls).parameters]
    (example,) = re.findall(r"^Example: `(.+)`$", text, re.MULTILINE)
    names = {each: getattr(callbacks, each) for each in callbacks.__all__}
    made = eval(example, {**names, "Trainer": lambda callbacks: callbacks})
    assert any(isinstance(each, cls) for each in (made if isinstance(made, list) else [made]))
    page = re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower() + ".md"
    assert (DOCS / page).is_file()
    assert set(re.findall(r"docs/callbacks/([\w-]+\.md)", text)) <= {page}
