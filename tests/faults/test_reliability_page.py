"""The page states how many cases of each fault the tests contain."""

import re
from pathlib import Path

from tests.faults.table import counts

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_page_has_the_counts_of_the_tables() -> None:
    tried = PAGE.read_text().partition("## Tested faults")[2]
    printed = {name: int(n) for name, n in re.findall(r"^\| ([a-z ]+) \| (\d+) \|$", tried, re.M)}
    assert printed == {**counts(), "total": sum(counts().values())}
