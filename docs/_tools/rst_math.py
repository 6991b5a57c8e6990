"""Prepares docstrings for the API pages.

Formulas in Sphinx' notation become MathML, which needs no script. Each formula of a `math` block
is put on a line of its own, so that it fits on a phone.
"""

import re
from typing import Any

import griffe
from latex2mathml.converter import convert

_BLOCK = re.compile(r"^( *)\.\. math::\n((?:\1 +.*\n?|\s*\n)+)", re.MULTILINE)
_SPACE = re.compile(r" *\\q?quad ")  # between formulas of a block
_INLINE = re.compile(r":math:`([^`]+)`")


def to_mathml(text: str) -> str:
    """Return a docstring with MathML in place of Sphinx' directives and roles."""

    def block(found: re.Match[str]) -> str:
        formulas = _SPACE.split(" ".join(found[2].split()))
        lines = [f"<div>{convert(formula, display='block')}</div>" for formula in formulas]
        return f"{found[1]}{''.join(lines)}\n\n"

    text = _INLINE.sub(lambda found: convert(found[1]), _BLOCK.sub(block, text))
    return text.replace("Example::\n", "**Example**\n")


class RstMath(griffe.Extension):
    """Rewrites every docstring once it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = to_mathml(obj.docstring.value)
