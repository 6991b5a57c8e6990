"""`lightning-mp`: LightningCLI that knows this package's plugins, and reports of runs."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """Run LightningCLI on `args` (`sys.argv` if `None`), or `report RUN_DIR`.

    Plugins of this package can be named by their class alone in YAML, such as
    `class_path: InfCLStrategy`. As with `python -m`, modules in the working directory can be
    imported, so that a `class_path` may lead to code beside the config file.

    `report RUN_DIR` makes the page of an `InstabilityReport` anew from its data, which is there
    also where the run was killed.

    Raises:
        SystemExit: `jsonargparse` is not installed or cannot parse the arguments, the run was
            interrupted, or there is no data to report.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments[:1] == ["report"]:
        _report(arguments[1:])
        return
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
        parser_kwargs={
            "version": lightning_mp.__version__,
            "epilog": "`lightning-mp report RUN_DIR` makes the page of a run's InstabilityReport.",
        },
        # A config saved by an earlier run in the same folder gives way, as its checkpoints do.
        save_config_kwargs={"overwrite": True},
    )
    if cli.trainer.interrupted:
        # Lightning shuts down in order and returns; a script must not take that for success.
        raise SystemExit("Interrupted before the end; the last checkpoint holds what was learned.")


def _report(args: Sequence[str]) -> None:
    """Make the page of a run, and print where it is."""
    parser = argparse.ArgumentParser(
        prog="lightning-mp report",
        description="Make the page of a run from the data that the callback InstabilityReport has "
        "left in its folder, also if the run was killed.",
    )
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        help="the folder that the callback wrote to, one above it, or the .json file itself",
    )
    run_dir = parser.parse_args(args).run_dir
    from lightning_mp.callbacks.report_files import rebuild_page

    try:
        page = rebuild_page(run_dir)
    except (ValueError, OSError) as error:
        raise SystemExit(f"lightning-mp report: {error}") from None
    print(f"Report: {page.resolve()}")


if __name__ == "__main__":
    main()
