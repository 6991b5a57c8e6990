"""Hands a report to loggers, each by the interface of its own `experiment`."""

from pathlib import Path
from typing import Any

from lightning_mp.callbacks._report.page import verdict

__all__ = ["log_report"]


def log_report(logger: Any, page: Path, data: dict[str, Any]) -> None:
    """Give the page to a logger that keeps files, and text to one that shows text.

    They are told apart by their methods, so that none of them has to be installed: Comet has
    `log_asset`, MLflow's client logs artifacts by `run_id`, a Weights & Biases run without it,
    TensorBoard has `add_text`. Others get nothing.

    Args:
        logger: A logger of Lightning.
        page: The page's file.
        data: What it shows.
    """
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "log_asset"):
        experiment.log_asset(str(page), file_name=page.name, overwrite=True)
    elif hasattr(experiment, "log_artifact") and hasattr(logger, "run_id"):
        experiment.log_artifact(logger.run_id, str(page))
    elif hasattr(experiment, "log_artifact"):
        name = f"{page.stem}-{getattr(experiment, 'id', 'report')}"
        experiment.log_artifact(str(page), name=name, type="report")
    elif hasattr(experiment, "add_text"):
        experiment.add_text("instability/report", _markdown(page, data), data["run"]["steps"])


def _markdown(page: Path, data: dict[str, Any]) -> str:
    lines = [verdict(data), f"All of it is in `{page.name}`."]
    lines += [
        f"- {alarm['severity']} at step {alarm['step']}: {alarm['message']} {alarm['remedy']}"
        for alarm in data["alarms"]
    ]
    return "\n".join([lines[0], "", lines[1], "", *lines[2:]])
