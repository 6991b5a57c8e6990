"""InfoNCE and SigLIP on the same towers and data: `python examples/glyph_clip/compare.py --fast`.

Both are trained with the same command except for two arguments, which are two lines of the config.
Prints the recall of both on the test font.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # a script can import only from its own folder

from examples.glyph_clip.data import GlyphData
from examples.glyph_clip.report import encode, recall_table
from examples.glyph_clip.run import FAST, trained

LOSSES: dict[str, tuple[str, ...]] = {
    "InfoNCE": (),
    "SigLIP": ("--model.loss=SigmoidContrastiveLoss", "--model.logit_bias=-10"),
}


def main() -> None:
    """Train with each loss; print its recall on the test font."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--fast", action="store_true", help="train for two minutes each instead of six"
    )
    fast = FAST if parser.parse_args().fast else ()
    scores = {}
    for name, lines in LOSSES.items():
        model, data = trained(*lines, *fast), GlyphData(progress=False)
        data.setup()
        model.recall.update(*encode(model, data.tables["test"]))
        scores[name] = {key: float(value) for key, value in model.recall.compute().items()}
    print("", *recall_table(scores), sep="\n")


if __name__ == "__main__":
    main()
