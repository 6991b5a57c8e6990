"""The command `python -m papers`, of a clone; it imports what it needs when it runs."""

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
    """Make the tables and figures of a paper anew, at this machine's size.

    Every row says whether it was measured here or computed, with hardware, versions and date, and
    stands in a CSV file; figures are pictures as well.

    Args:
        paper: `inf-cl` is arXiv 2410.17243: `table1`, `table2`, `figure1` (memory and largest
            batch), `table3` (accuracy by loss), `table4` (tiling by levels), `figure4` (cost by
            batch), `figure5` (accuracy by batch), `figures_and_formulas` (every printed figure
            beside what `lightning-mp plan` predicts). `meta-vit` is Meta's ladder of a faster ViT:
            `ladder` (each rung on top of the last), `chips` (throughput by their number), `gpus`
            (an A100 against a V100, printed and by their peaks).
            `mixed-precision` is `curves` (fp32, masters, none), `histogram` (gradients in fp16's
            window), `scale` (the loss scale over time), `t5` (overflow and clamp), `adam` (zero
            gradients and the step after them), `zeros` (their share in a run that fails).
        only: Parts to make, such as `table4,figure4`; all if left out.
        output: Folder for the files; each paper has its own in it.
        fast: Sizes that show that all of it runs, and nothing more.
    """
    module = f"papers.{paper.replace('-', '_')}"
    parts = importlib.import_module(module).PARTS
    chosen = list(parts) if only is None else [name.strip() for name in only.split(",")]
    unknown = [name for name in chosen if name not in parts]
    if unknown:
        raise SystemExit(
            f"python -m papers: {paper} has no {', '.join(unknown)}. Choose among "
            f"{', '.join(parts)}."
        )
    from papers.output import Output

    out = Output(Path(output) / paper, fast=fast, title=paper)
    for name in out.progress(chosen, "parts"):
        try:
            parts[name](out)
        # Some parts need the demo's packages; the others run without.
        except ModuleNotFoundError as error:
            raise SystemExit(f"python -m papers: {name} needs `{error.name}`. {_HELP}") from None
    minutes = sum(os.times()[:4]) / 60  # with those of ranks
    print(f"All of it, {minutes:.1f} minutes of a core: {out.folder.resolve()}")


_HELP = "Run `pip install '.[demo]'` in the clone, or choose other parts by `--only`."


def main(args: Sequence[str] | None = None) -> None:
    """Run the command with arguments, those of the command line if they are left out."""
    about = (inspect.getdoc(reproduce) or "").partition("\n\nArgs")[0]
    parser = ArgumentParser(prog="python -m papers", description=about)
    parser.add_function_arguments(reproduce, as_group=False, as_positional=True)
    for action in parser._actions:
        if action.type is bool or getattr(action, "_typehint", None) is bool:
            action.nargs, action.const = "?", True  # `--fast` will do
    reproduce(**parser.parse_args(args).as_dict())


if __name__ == "__main__":
    main()
