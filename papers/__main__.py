"""The command `python -m papers`, which runs in a clone and imports packages on demand."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser

__all__ = ["main", "reproduce"]


def reproduce(
    paper: Literal["inf-cl", "meta-vit", "mixed-precision"],
    only: str | None = None,
    output: str = "reproduced",
    fast: bool = False,
) -> None:
    """Reproduce the tables and figures of a paper at a size that fits this machine.

    Every row is written to a CSV file with hardware, versions and date, and says whether it was
    measured here, computed, or printed in the paper; figures are drawn as well.

    Args:
        paper: `inf-cl` (arXiv 2410.17243) has the parts `table1`, `table2`, `figure1` (memory and
            largest batch), `table3` (accuracy by loss), `table4` (levels of tiling), `figure4`
            (cost by batch), `figure5` (accuracy by batch) and `figures_and_formulas` (every printed
            figure beside the prediction of `lightning-mp plan`). `meta-vit`, Meta's steps to a
            faster ViT, has `ladder` (each rung adds to the one before), `chips` (throughput by
            number of chips) and `gpus` (an A100 beside a V100, as printed and by their peak rates).
            `mixed-precision` has `curves` (with fp32, with master weights, without), `histogram`
            (gradients in the range of fp16), `scale` (the loss scale over time), `t5` (overflow and
            clamp), `adam` (zero gradients and the step after them) and `zeros` (the share of zero
            gradients in a run that fails).
        only: Comma-separated parts, such as `table4,figure4`; all if left out.
        output: Folder for the files, which gets a subfolder for each paper.
        fast: Use sizes that only show that everything runs.
    """
    module = f"papers.{paper.replace('-', '_')}"
    parts = importlib.import_module(module).PARTS
    chosen = list(parts) if only is None else [name.strip() for name in only.split(",")]
    unknown = [name for name in chosen if name not in parts]
    if unknown:
        raise SystemExit(
            f"python -m papers: {paper} has no part {', '.join(unknown)}. Choose among "
            f"{', '.join(parts)}."
        )
    from papers.output import Output

    try:
        out = Output(Path(output) / paper, fast=fast, title=paper)
    except OSError as error:
        raise SystemExit(f"python -m papers: {error}. Pass another folder by `--output`.") from None
    for name in out.progress(chosen, "parts"):
        try:
            parts[name](out)
        # Some parts need the packages of the demo.
        except ModuleNotFoundError as error:
            raise SystemExit(f"python -m papers: {name} needs `{error.name}`. {_HELP}") from None
    minutes = sum(os.times()[:4]) / 60  # ranks included
    print(f"Finished in {minutes:.1f} core minutes: {out.folder.resolve()}")


_HELP = "Run `pip install '.[demo]'` in the clone, or choose other parts with `--only`."


def main(args: Sequence[str] | None = None) -> None:
    """Run the command with the given arguments, by default those of the command line."""
    about = (inspect.getdoc(reproduce) or "").partition("\n\nArgs")[0]
    parser = ArgumentParser(prog="python -m papers", description=about)
    parser.add_function_arguments(reproduce, as_group=False, as_positional=True)
    for action in parser._actions:
        if action.type is bool or getattr(action, "_typehint", None) is bool:
            action.nargs, action.const = "?", True  # so that `--fast` needs no value
    reproduce(**parser.parse_args(args).as_dict())


if __name__ == "__main__":
    main()
