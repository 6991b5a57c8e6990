"""The page says how many faults were tried, in the numbers of the tables of cases."""

import re
from pathlib import Path

from tests.faults.table import counts

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_page_has_the_counts_of_the_tables() -> None:
    tried = PAGE.read_text().partition("## What was tried")[2]
    printed = {name: int(n) for name, n in re.findall(r"^\| ([a-z ]+) \| (\d+) \|$", tried, re.M)}
    assert printed == {**counts(), "all": sum(counts().values())}
