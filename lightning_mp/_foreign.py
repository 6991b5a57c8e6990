"""Errors for users of `pytorch_lightning`, whose classes differ from those of `lightning`."""

from typing import NoReturn

__all__ = ["ForLightning", "check_trainer", "refuse"]


def refuse(name: str) -> NoReturn:
    """Raise for a class that was passed to a `pytorch_lightning.Trainer`."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    raise MisconfigurationException(
        f"Passed `{name}` to a `pytorch_lightning.Trainer`. The plugins of lightning_mp are for "
        "`lightning.pytorch`. Write `from lightning.pytorch import LightningModule, Trainer`."
    )


def check_trainer(trainer: object, component: object) -> None:
    """Raise if `component` was passed to a Trainer of `pytorch_lightning`."""
    # Compare module names, because `pytorch_lightning` may not be installed.
    if any(base.__module__.startswith("pytorch_lightning.") for base in type(trainer).__mro__):
        refuse(type(component).__name__)


class ForLightning:
    """Names `lightning.pytorch` in its `repr`.

    A `pytorch_lightning.Trainer` rejects plugins and strategies of `lightning.pytorch` before it
    calls their code, with an error that contains only their `repr`. The error of
    `lightning.pytorch` for `precision=` together with `plugins=` contains the `repr`, too.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for `lightning.pytorch`>"
