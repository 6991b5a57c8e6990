"""Print the lowest versions that pyproject.toml allows, as pip's constraints: for `make floor`.

So the floor stands in one place: whoever raises a bound moves what is tested with it.
"""

import re
from pathlib import Path

# A requirement with a lower bound, such as "triton>=3.6; sys_platform == 'linux'".
BOUND = re.compile(r'"([\w-]+)(?:\[[\w,-]+\])?>=([\w.]+)[^";]*(;[^"]*)?"')


def pins(pyproject: str) -> list[str]:
    """Return `name==lowest` of every bounded requirement in the text of a pyproject.toml."""
    return [f"{name}=={lowest}{marker}" for name, lowest, marker in BOUND.findall(pyproject)]


if __name__ == "__main__":
    print(*pins((Path(__file__).parents[1] / "pyproject.toml").read_text()), sep="\n")
