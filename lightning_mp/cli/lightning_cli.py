"""`LightningMPCLI`: LightningCLI with the classes of this package available by name."""

import sys
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

import lightning_mp
from lightning_mp.cli.commands import COMMANDS, Parser, command_parser, run_command, summary
from lightning_mp.cli.reasons import reason_of

__all__ = ["LightningMPCLI"]


class _Parser(Parser, LightningArgumentParser):
    @override
    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        # LightningCLI does not expose the action to which commands are added.
        self.subcommands = super().add_subcommands(*args, **kwargs)
        return self.subcommands


class LightningMPCLI(LightningCLI):
    """LightningCLI with the classes of this package available by name; used by `lightning-mp`.

    LightningCLI accepts short names only for classes that were imported, and requires the module
    for others. For a value that may have several classes, such as `plugins:`, its error explains
    why the value is none of them; the mistake, such as `half: float16`, is hard to find. This
    class repeats the reason in the last line and suggests the closest name.

    To use it in your own script, with `report` and the other commands, change one import:

        from lightning_mp import LightningMPCLI as LightningCLI

    Args:
        *args: As in `LightningCLI`.
        **kwargs: As in `LightningCLI`. A custom `parser_class` has neither reasons nor commands.

    Raises:
        SystemExit: The arguments are invalid.
        ValueError: A class cannot be instantiated; the last line contains the reason.

    Example: `lightning-mp fit --trainer.plugins BalancedAMP --optimizer SafeAdamW ...`
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("parser_class", _Parser)
        super().__init__(*args, **kwargs)

    @override
    def setup_parser(self, add_subcommands: bool, *args: Any, **kwargs: Any) -> None:
        """Import all public classes, and add the commands without a Trainer."""
        # jsonargparse resolves short names among imported subclasses.
        for name in lightning_mp.__all__:
            getattr(lightning_mp, name)
        super().setup_parser(add_subcommands, *args, **kwargs)
        if add_subcommands and isinstance(self.parser, _Parser):
            for name in COMMANDS:
                parser = command_parser(name)
                self.parser.subcommands.add_subcommand(name, parser, help=summary(name))

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments; run a command without a Trainer and exit."""
        name, *options = (sys.argv[1:] if args is None else [*args]) or [""]
        if name not in COMMANDS:
            super().parse_arguments(parser, args)
            return
        classes: dict[str, Any] = {}
        if not self.subclass_mode_model:
            classes["model"] = self.model_class
        if not self.subclass_mode_data:
            classes["data"] = self.datamodule_class
        run_command(name, options, classes)
        raise SystemExit(0)  # LightningCLI would instantiate a model and a Trainer

    @override
    def instantiate_classes(self) -> None:
        """Instantiate model, data and Trainer."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            reason = reason_of(str(error))
            if reason is None:
                raise
            raise ValueError(reason) from error
