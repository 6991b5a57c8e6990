"""`lightning-mp`: LightningCLI that knows this package's plugins, and commands of its own."""

import os
import sys
from collections.abc import Sequence

from lightning_mp.cli.commands import COMMANDS, run_command

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """Run `LightningMPCLI` on `args` (`sys.argv` if `None`), or a command that needs no Trainer.

    As with `python -m`, modules in the working directory can be imported, so that a `class_path`
    may lead to code beside the config file.

    Raises:
        SystemExit: The arguments cannot be parsed, a command cannot do its work, or the run was
            interrupted.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments and arguments[0] in COMMANDS:
        run_command(arguments[0], arguments[1:])  # without the seconds that Lightning takes to load
        return
    import jsonargparse

    import lightning_mp
    from lightning_mp.cli.lightning_cli import LightningMPCLI

    # A console script has its own folder on the path in the place of the working directory.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    jsonargparse.set_parsing_settings(add_print_completion_argument=True)
    cli = LightningMPCLI(
        args=args,  # type: ignore[arg-type]
        parser_kwargs={"prog": "lightning-mp", "version": lightning_mp.__version__},
        # A config saved by an earlier run in the same folder gives way, as its checkpoints do.
        save_config_kwargs={"overwrite": True},
    )
    if cli.trainer.interrupted:
        # Lightning shuts down in order and returns; a script must not take that for success.
        raise SystemExit("Interrupted before the end; the last checkpoint holds what was learned.")
