"""`LightningMPCLI`: LightningCLI that knows the classes of this package by name."""

from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

import lightning_mp
from lightning_mp.cli.commands import COMMANDS, command_parser, summary
from lightning_mp.cli.reasons import reason_of

__all__ = ["LightningMPCLI"]


class _Parser(LightningArgumentParser):
    """Says what is wrong last, after all that jsonargparse has tried."""

    @override
    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        # LightningCLI keeps the action that takes further commands to itself.
        self.subcommands = super().add_subcommands(*args, **kwargs)
        return self.subcommands

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        # The parsers of nested classes do not exit: their messages become part of the outer one.
        reason = reason_of(message) if self.exit_on_error else None
        super().error(message if reason is None else f"{message.strip()}\nReason: {reason}", ex)


class LightningMPCLI(LightningCLI):
    """LightningCLI that knows the classes of this package by name, as `lightning-mp` does.

    LightningCLI knows by name what has been imported, and asks for the module of everything else.
    Where a value may be of several classes, as in `plugins:`, its error says of each why it is not
    that one, and what is wrong with `half: float16` stands somewhere among them. Here it is said
    once more as the last line, with what is near where a name is wrong.

    In a script of your own, one line gives you both, and `report` among the subcommands:

        from lightning_mp import LightningMPCLI as LightningCLI

    Args:
        *args: As in `LightningCLI`.
        **kwargs: As in `LightningCLI`. A `parser_class` of your own goes without the two extras.

    Raises:
        SystemExit: The arguments cannot be parsed.
        ValueError: A class cannot be made with its arguments; the last line says why.

    Example: `lightning-mp fit --trainer.plugins BalancedAMP --optimizer SafeAdamW ...`
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("parser_class", _Parser)
        super().__init__(*args, **kwargs)

    @override
    def setup_parser(self, add_subcommands: bool, *args: Any, **kwargs: Any) -> None:
        """Load what is to be known by name, and add the commands that need no Trainer."""
        # jsonargparse resolves bare class names among the subclasses that are loaded.
        for name in lightning_mp.__all__:
            getattr(lightning_mp, name)
        super().setup_parser(add_subcommands, *args, **kwargs)
        if add_subcommands and isinstance(self.parser, _Parser):
            for name in COMMANDS:
                parser = command_parser(name)
                self.parser.subcommands.add_subcommand(name, parser, help=summary(name))

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, and if it is a command that needs no Trainer, run that and exit."""
        super().parse_arguments(parser, args)
        name = self.config.get("subcommand")
        if name in COMMANDS:
            COMMANDS[name](**self.config[name].as_dict())
            raise SystemExit(0)  # LightningCLI would go on to make a model and a Trainer

    @override
    def instantiate_classes(self) -> None:
        """Make model, data and Trainer."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            reason = reason_of(str(error))
            if reason is None:
                raise
            raise ValueError(reason) from error
