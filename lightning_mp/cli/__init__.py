"""The command `lightning-mp`: LightningCLI with this package's classes, and further commands."""

import os
import sys
from collections.abc import Sequence

from lightning_mp.cli.commands import COMMANDS, run_command

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """Run `LightningMPCLI` or a command without a Trainer on `args` (`sys.argv` if `None`).

    As with `python -m`, modules in the working directory can be imported, so that `class_path` may
    refer to them.

    Raises:
        SystemExit: The arguments are invalid, a command fails, or the run was interrupted.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    # For a console script, `sys.path` starts with the script's folder, not the working directory.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if arguments and arguments[0] in COMMANDS:
        run_command(arguments[0], arguments[1:])  # does not spend seconds on importing Lightning
        return
    import jsonargparse

    import lightning_mp
    from lightning_mp.cli.lightning_cli import LightningMPCLI

    jsonargparse.set_parsing_settings(add_print_completion_argument=True)
    cli = LightningMPCLI(
        args=args,  # type: ignore[arg-type]
        parser_kwargs={
            "prog": "lightning-mp",
            "version": lightning_mp.__version__,
            "description": "LightningCLI with all classes of lightning-mp available by name, and "
            "commands that plan, check and report a run.",
        },
        # Overwrite the config of an earlier run in the same folder, as its checkpoints are.
        save_config_kwargs={"overwrite": True},
    )
    if cli.trainer.interrupted:
        # Lightning returns normally after an interruption; the exit status must not be 0.
        raise SystemExit("The run was interrupted. Resume it from the last checkpoint.")
