"""Commands of `lightning-mp` without a Trainer; a function's arguments are its options."""

import inspect
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, get_args

from jsonargparse import ArgumentParser
from typing_extensions import override

from lightning_mp._config_files import read_config
from lightning_mp.cli.reasons import explained
from lightning_mp.doctor.command import doctor
from lightning_mp.doctor.preflight import preflight
from lightning_mp.plan.command import plan

__all__ = ["COMMANDS", "Parser", "command_parser", "run_command", "summary"]


def report(run_dir: str) -> None:
    """Rebuild the instability report of a run from its data, also after a killed run.

    Args:
        run_dir: Output folder of the callback, a parent folder, or the .json file.
    """
    from lightning_mp.cli.report import rebuild_page

    print(f"Report: {rebuild_page(run_dir).resolve()}")


# A command is a typed function with a docstring that is listed here. Its argument `settings` is
# the content of the files passed by `--config`. It imports packages outside the standard library
# itself, so that `--help` and other commands start quickly.
COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command for command in (report, plan, doctor, preflight)
}


def summary(name: str) -> str:
    """Return the first line of a command's docstring."""
    return (inspect.getdoc(COMMANDS[name]) or "").partition("\n")[0]


class Parser(ArgumentParser):
    """Appends to the error messages of jsonargparse what to change."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        super().error(explained(message, self), ex)


def command_parser(name: str, **kwargs: Any) -> ArgumentParser:
    """Return the parser of a command, with the arguments of its function."""
    parser = Parser(description=summary(name), **kwargs)
    if "settings" in (known := inspect.signature(COMMANDS[name]).parameters):
        parser.add_argument(
            *("-c", "--config"),
            action="append",
            required=known["settings"].default is inspect.Parameter.empty,
            help="YAML file of a run, as for `lightning-mp fit`; repeat the option for more.",
        )
    parser.add_function_arguments(
        COMMANDS[name], as_group=False, as_positional=True, skip={"settings"}
    )
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        if bool in (hint, *get_args(hint)):
            action.nargs, action.const = "?", True  # an option without a value means True
        # Accept hyphens and underscores in options; `--help` shows hyphens first.
        hyphened = [name.replace("_", "-") for name in action.option_strings if "_" in name]
        action.option_strings = [*hyphened, *action.option_strings]
        # argparse prints `option_strings` and parses with this table.
        parser._option_string_actions.update(dict.fromkeys(hyphened, action))
    return parser


def run_command(name: str, args: Sequence[str], classes: Mapping[str, Any] | None = None) -> None:
    """Parse the arguments of a command and run it.

    Args:
        name: A key of `COMMANDS`.
        args: The arguments.
        classes: Classes of parts of which the config contains only arguments, as in a CLI for one
            model.

    Raises:
        SystemExit: The arguments are invalid, or the command fails.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may not be in the encoding of a terminal
        sys.stdout.reconfigure(errors="backslashreplace")
    given = command_parser(name, prog=f"lightning-mp {name}").parse_args(args).as_dict()
    try:
        if files := given.pop("config", None):
            given["settings"] = read_config(files, classes)
        COMMANDS[name](**given)
    except (ValueError, OSError) as error:  # the arguments are wrong: a traceback would not help
        raise SystemExit(f"lightning-mp {name}: {error}") from None
