"""One sentence for users of `pytorch_lightning`, whose classes are not those of `lightning`."""

from typing import NoReturn

__all__ = ["ForLightning", "check_trainer", "refuse"]


def refuse(name: str) -> NoReturn:
    """Refuse a class that was passed to a `pytorch_lightning.Trainer`."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    raise MisconfigurationException(
        f"Passed `{name}` to a `pytorch_lightning.Trainer`. The plugins of lightning_mp are for "
        "`lightning.pytorch`. Write `from lightning.pytorch import LightningModule, Trainer`."
    )


def check_trainer(trainer: object, component: object) -> None:
    """Refuse a Trainer of `pytorch_lightning`, which `component` was passed to."""
    # By names, since `pytorch_lightning` need not be installed.
    if any(base.__module__.startswith("pytorch_lightning.") for base in type(trainer).__mro__):
        refuse(type(component).__name__)


class ForLightning:
    """Says in its `repr` what it is for.

    A `pytorch_lightning.Trainer` refuses plugins and strategies of `lightning.pytorch` before it
    calls any code of theirs, and names in its error their `repr` alone. That of `lightning.pytorch`
    has it in the error for `precision=` beside `plugins=`.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for `lightning.pytorch`>"
