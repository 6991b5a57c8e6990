"""A fixture for the output of a paper's parts at their fastest sizes."""

from pathlib import Path

import pytest

from papers.output import Output


@pytest.fixture
def out(tmp_path: Path) -> Output:
    return Output(tmp_path, fast=True, title="test")
