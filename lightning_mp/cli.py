"""`lightning-mp fit|validate|test|predict`: LightningCLI that knows this package's plugins."""

import importlib.util
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """Run LightningCLI on `args` (`sys.argv` if `None`).

    Plugins of this package can be named by their class alone in YAML, such as
    `class_path: InfCLStrategy`. As with `python -m`, modules in the working directory can be
    imported, so that a `class_path` may lead to code beside the config file.

    Raises:
        SystemExit: `jsonargparse` is not installed or cannot parse the arguments, or the run was
            interrupted.
    """
    if importlib.util.find_spec("jsonargparse") is None:
        raise SystemExit(
            "Called `lightning-mp` without `jsonargparse`, which reads its arguments. Install the "
            "extra: `pip install 'lightning-mp[cli]'`."
        )
    from lightning.pytorch.cli import LightningCLI

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    import lightning_mp  # registers the plugins

    cli = LightningCLI(
        args=args,  # type: ignore[arg-type]
        parser_kwargs={"version": lightning_mp.__version__},
        # A config saved by an earlier run in the same folder gives way, as its checkpoints do.
        save_config_kwargs={"overwrite": True},
    )
    if cli.trainer.interrupted:
        # Lightning shuts down in order and returns; a script must not take that for success.
        raise SystemExit("Interrupted before the end; the last checkpoint holds what was learned.")


if __name__ == "__main__":
    main()
