"""InfoNCE and SigLIP on the same towers and data: `python examples/glyph_clip/compare.py --fast`.

Each is trained by the command that a user would type; two arguments, which are two lines of the
config, make the one the other. Recall on the test font is printed side by side.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as a script only this folder is

from examples.glyph_clip.data import GlyphData
from examples.glyph_clip.model import GlyphCLIP
from examples.glyph_clip.report import encode, recall_table
from examples.glyph_clip.run import CHECKPOINT, CONFIG, FAST, OUTPUT, lightning_mp

LOSSES: dict[str, tuple[str, ...]] = {
    "InfoNCE": (),
    "SigLIP": ("--model.loss=SigmoidContrastiveLoss", "--model.logit_bias=-10"),
}


def train_and_score(arguments: Sequence[str]) -> dict[str, float]:
    """Train by the command line, and return recall on the test font."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    lightning_mp("fit", "--config", str(CONFIG), *arguments)
    data = GlyphData(progress=False)
    data.setup()
    model = GlyphCLIP.load_from_checkpoint(CHECKPOINT, map_location="cpu")
    model.recall.update(*encode(model, data.tables["test"]))
    return {name: float(value) for name, value in model.recall.compute().items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with each loss; the exit status is that of the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="train for two minutes each, not six")
    fast = FAST if parser.parse_args(arguments).fast else ()
    try:
        scores = {name: train_and_score((*lines, *fast)) for name, lines in LOSSES.items()}
    except subprocess.CalledProcessError as error:
        print(f"`lightning-mp {error.cmd[1]}` failed with status {error.returncode}.")
        return error.returncode or 1
    print("\n".join(["", *recall_table(scores)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
