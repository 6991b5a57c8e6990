"""Commands of `lightning-mp` that need no Trainer: functions, whose arguments are the command's."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import ArgumentParser

from lightning_mp.doctor.command import doctor
from lightning_mp.doctor.preflight import preflight
from lightning_mp.plan.command import plan

__all__ = ["COMMANDS", "command_parser", "run_command", "summary"]


def report(run_dir: str) -> None:
    """Make the page of a run from what its InstabilityReport has left, also if it was killed.

    Args:
        run_dir: The folder that the callback wrote to, one above it, or the .json file itself.
    """
    from lightning_mp.cli.report import rebuild_page

    try:
        page = rebuild_page(run_dir)
    except (ValueError, OSError) as error:
        raise SystemExit(f"lightning-mp report: {error}") from None
    print(f"Report: {page.resolve()}")


# A new command is a function with types and a docstring, and its name here. What it needs beyond
# the standard library it imports itself, so that `--help` and the others start at once.
COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command for command in (report, plan, doctor, preflight)
}


def summary(name: str) -> str:
    """Return the line that says what a command does."""
    return (inspect.getdoc(COMMANDS[name]) or "").partition("\n")[0]


def command_parser(name: str, **kwargs: Any) -> ArgumentParser:
    """Return the parser of a command, whose arguments are those of its function."""
    parser = ArgumentParser(description=summary(name), **kwargs)
    parser.add_function_arguments(COMMANDS[name], as_group=False, as_positional=True)
    for action in parser._actions:
        if action.type is bool or getattr(action, "_typehint", None) is bool:
            action.nargs, action.const = "?", True  # the bare option will do, as anywhere
        # Both ways to write an option are in use; that of the shell comes first.
        hyphened = [name.replace("_", "-") for name in action.option_strings if "_" in name]
        action.option_strings = [*hyphened, *action.option_strings]
        # argparse prints `option_strings`, and parses by this table.
        parser._option_string_actions.update(dict.fromkeys(hyphened, action))
    return parser


def run_command(name: str, args: Sequence[str]) -> None:
    """Parse the arguments of a command, and run it."""
    parser = command_parser(name, prog=f"lightning-mp {name}")
    COMMANDS[name](**parser.parse_args(args).as_dict())
