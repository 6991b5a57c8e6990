"""Docstrings of public classes, which `--help` and the API pages show, stay short."""

import inspect

import pytest

import lightning_mp

CLASSES = [name for name in lightning_mp.__all__ if inspect.isclass(getattr(lightning_mp, name))]
MOST_LINES = 40


@pytest.mark.parametrize("name", CLASSES)
def test_docstring_of_public_class_fits_on_a_screen(name: str) -> None:
    text = inspect.getdoc(getattr(lightning_mp, name)) or ""
    assert 1 <= len(text.splitlines()) <= MOST_LINES
