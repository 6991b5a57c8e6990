"""Draws docs/images/preflight.svg: the preflight of a GPT-2 with a norm written by hand.

python -m docs._tools.preflight_picture
"""

import re
import tempfile
from pathlib import Path

import lightning.pytorch as pl

from benchmarks.preflight import STEPS, Task
from lightning_mp import BalancedAMP, PrecisionPreflight

ROOT = Path(__file__).resolve().parents[2]
# The page's own style has colors for light and dark; a picture has one background.
STYLE = """
text { font: 12px Helvetica, Arial, sans-serif; fill: #59626d; }
.name { text-anchor: end; fill: #1b1f24; } .name.mends { fill: #b3261e; font-weight: bold; }
.grid { stroke: #e2e5e9; } .unit { stroke: #1a6b3c; stroke-dasharray: 4 3; }
.after { fill: none; stroke: #1a6b3c; stroke-width: 1.5; }
.own { fill: #0b62a8; } .own.mends { fill: #b3261e; }
.handed { fill: none; stroke: #59626d; stroke-width: 1.5; }
"""


def main() -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        callback = PrecisionPreflight(steps=STEPS, dirpath=folder, stops=True)
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_steps=STEPS, logger=False, callbacks=[callback],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            plugins=BalancedAMP(half="fp16"),
        )  # fmt: skip
        trainer.fit(Task("GPT-2", "hand-written norm"))
        assert callback.path is not None
        page = callback.path.read_text()
    (picture,) = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    head = f"<style>{STYLE}</style><rect width='100%' height='100%' fill='#fff'/>"
    picture = picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    drawn = picture.replace(">\n", f">\n{head}\n", 1)
    (ROOT / "docs" / "images" / "preflight.svg").write_text(drawn + "\n")


if __name__ == "__main__":
    main()
