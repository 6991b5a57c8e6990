"""A folder for what is reproduced at its fastest size."""

from pathlib import Path

import pytest

from papers.output import Output


@pytest.fixture
def out(tmp_path: Path) -> Output:
    return Output(tmp_path, fast=True, title="test")
