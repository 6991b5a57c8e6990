"""Extracts the reason from the error messages of jsonargparse.

For a value that may have one of six types, jsonargparse explains for each type why the value does
not fit; the helpful line, such as "Expected a Literal['fp16', 'bf16']", is in the middle.
"""

import ast
import contextlib
import difflib
import inspect
import pydoc
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from jsonargparse import ArgumentParser

import lightning_mp
from lightning_mp._arguments import nearest

__all__ = ["explained", "reason_of"]

_UNION = "Does not validate against any of the Union subtypes"
_LOCATION = re.compile(r"""(?:Parser key "|Problem with given class_path ')(.+)["']:$""")
_OPTION = re.compile(r"Option '(.+)' is not accepted")
_UNKNOWN = re.compile(r"Expected a dot import path string: (.+)")
# Messages about types and classes that the user did not intend.
_NOISE = re.compile(r"Expected an? |Not a valid subclass of |Import path .+ does not correspond to")
_CLASS_WITHOUT_NESTED = re.compile(r"\{[^{}]*'class_path': [^{}]*\}")
_UNRECOGNIZED = "unrecognized arguments: "
_KEY = re.compile(r"(?:(?:Subcommand '\w+'|Group '(\w+)') does not accept o|O)ption '(.+?)'")
_PARTS = ("trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path", "seed_everything")
_MAX_REASONS = 3


@dataclass(frozen=True)
class _Reason:
    locations: tuple[str, ...]  # keys and classes, from outermost to innermost
    text: str
    rank: int  # 3 and 2 if the line says what to change, 0 if it is noise


def explained(message: str, parser: ArgumentParser) -> str:
    """Append to an error of a parser what to change, if that is known."""
    if not parser.exit_on_error:  # a nested class: its message becomes part of the outer message
        return message
    if message.startswith(_UNRECOGNIZED):
        return f"{message}{_hint(message[len(_UNRECOGNIZED) :].split()[0], parser)}"
    reason = reason_of(message)
    if reason is None or reason.startswith(message.strip()):
        return reason or message
    return f"{message.strip()}\nReason: {reason}"


def _hint(argument: str, parser: ArgumentParser) -> str:
    """Return a suggestion for an argument that the parser does not know."""
    options = [option for action in parser._actions for option in action.option_strings]
    if argument.startswith("-"):
        near = nearest(argument.partition("=")[0], options)
        return f". Did you mean `{near}`?" if near else ""
    names = ("--config",) if argument.endswith((".yaml", ".yml")) else ("--config", "--model")
    written = [f"`{name} {argument}`" for name in names if name in options]
    return f". Write {' or '.join(written)}." if written else ""


def _misspelt_key(message: str) -> str | None:
    """Suggest a key for one that neither `fit` nor its Trainer has."""
    if (found := _KEY.match(message)) is None:
        return None
    from lightning.pytorch import Trainer  # takes seconds

    path = f"{found[1] or ''}.{found[2]}".strip(".").split(".")
    names = [f"trainer.{name}" for name in inspect.signature(Trainer).parameters]
    is_inside = path[0] == "trainer"
    near = nearest(".".join(path[: 1 + is_inside]), names if is_inside else _PARTS)
    return near and f"{message.strip()}. Did you mean `{near}`?"


def reason_of(message: str) -> str | None:
    """Return the lines of an error that say what to change, or `None` for other errors."""
    if _UNION not in message and "Problem with given class_path" not in message:
        return _misspelt_key(message)
    found = _highest_ranked(_reasons(message.strip().splitlines()))[:_MAX_REASONS]
    return "\n".join(" -> ".join((*reason.locations, reason.text)) for reason in found)


def _reasons(
    lines: list[str], locations: tuple[str, ...] = (), *, is_choice: bool = False
) -> Iterator[_Reason]:
    head = lines[0].strip()
    body = [each for each in textwrap.dedent("\n".join(lines[1:])).splitlines() if each]
    if len(body) > 1 and body[0].startswith("- Expected a path"):  # the value could also be a path
        body = [body[1].removeprefix("- "), *body[2:]]
    location = _LOCATION.match(head)
    if location and body:
        yield from _reasons(body, (*locations, location[1]))
    elif head == _UNION and "Errors:" in body:
        items = (_reasons(item, locations, is_choice=True) for item in _errors_by_type(body))
        best = _highest_ranked(each for item in items for each in item)
        # A value that is no number or none of the literals was not intended as a class name.
        least = 2 if re.search(r"Literal\[|'float'|'int'", body[0]) else 1
        yield from best if best and best[0].rank >= least else [_no_type_fits(body, locations)]
        # jsonargparse reads such a class as arguments of the base class.
        for names in _beside_class_path(_given_value(body)):
            text = f"{names} must be below `init_args`, not beside `class_path`."
            yield _Reason(locations, text, rank=3)
    elif option := _OPTION.match(head):
        yield _Reason(locations, head + _near_option(option[1], locations), rank=2)
    elif unknown := _UNKNOWN.match(head):
        yield _Reason(locations, _unknown_class(unknown[1]), rank=1)
    else:
        yield _Reason(
            locations, _short_types(head), rank=0 if is_choice and _NOISE.match(head) else 2
        )


def _highest_ranked(reasons: Iterator[_Reason]) -> list[_Reason]:
    """Return the reasons with the highest rank, without repetitions."""
    unique = list(dict.fromkeys(reasons))
    highest = max((reason.rank for reason in unique), default=0)
    return [reason for reason in unique if reason.rank == highest]


def _errors_by_type(body: list[str]) -> Iterator[list[str]]:
    """Split the errors of a union by type, without the surrounding lines."""
    # jsonargparse prints a list indented by two spaces; items may have several lines.
    start = body.index("Errors:") + 1
    item: list[str] = []
    for line in body[start:]:
        if not line.startswith("  "):
            break
        if line.startswith("  - "):
            if item:
                yield item
            item = [line[4:]]
        else:
            item.append(line[4:])
    if item:
        yield item


def _given_value(body: list[str]) -> str:
    given = next((line for line in body if line.startswith("Given value: ")), "")
    return given.removeprefix("Given value: ")


def _beside_class_path(value: str) -> Iterator[str]:
    """Yield the names of arguments beside a `class_path`."""
    for described in _CLASS_WITHOUT_NESTED.findall(value):
        with contextlib.suppress(ValueError, SyntaxError):  # a value that is no literal
            names = ast.literal_eval(described).keys() - {"class_path", "init_args", "dict_kwargs"}
            if names:
                yield ", ".join(f"`{name}`" for name in sorted(names))


def _no_type_fits(body: list[str], locations: tuple[str, ...]) -> _Reason:
    types, value = _short_types(body[0].removeprefix("Subtypes: ")), _given_value(body)
    if locations[-1:] == ("trainer.precision",) and value in lightning_mp.precision.__all__:
        text = (
            f"{value} is a plugin. Pass `--trainer.plugins {value}` without `--trainer.precision`."
        )
        return _Reason(locations, text, rank=2)
    text = f"Expected one of {types}. Got value: {value}"
    return _Reason(locations, text, rank=2)


def _unknown_class(name: str) -> str:
    # Closer than options, because the names are of all kinds of classes: `Alarm` is no `AdamX`.
    near = difflib.get_close_matches(name, lightning_mp.__all__, n=1, cutoff=0.7)
    hint = f" Did you mean `{near[0]}`?" if near and near[0] != name else ""
    return f"No class `{name}` is accepted here.{hint}"


def _near_option(name: str, locations: tuple[str, ...]) -> str:
    """Return a suggestion of an option that the innermost class accepts."""
    cls = pydoc.locate(locations[-1]) if locations and "." in locations[-1] else None
    if not isinstance(cls, type):
        return ""
    names = ArgumentParser().add_class_arguments(cls, fail_untyped=False)
    near = nearest(name.partition(".")[0], [*names, "init_args"])
    if near:
        return f". Did you mean `{near}`?"
    return f". It accepts {', '.join(names)}." if names else ""


def _short_types(text: str) -> str:
    """Write types as in annotations."""
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    return re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", text).replace("NoneType", "None")
