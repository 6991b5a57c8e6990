"""The complete demo: train, test, report, picture. `make demo` runs it.

Training and test are separate processes that run the same commands as a user. `--fast` takes a
third of the time and trains the model less.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a script can import only from its own folder

from examples.glyph_clip.data import GlyphData
from examples.glyph_clip.model import GlyphCLIP
from examples.glyph_clip.picture import draw_retrieval
from examples.glyph_clip.report import (
    encode,
    instability_line,
    memory_lines,
    novelty_line,
    recall_lines,
)

CONFIG = Path("examples/glyph_clip/config.yaml")
OUTPUT = ROOT / "examples" / "glyph_clip" / "output"
CHECKPOINT = OUTPUT / "checkpoints" / "glyph_clip.ckpt"
PICTURE = OUTPUT / "retrieval.png"
INSTABILITY = OUTPUT / "instability.html"  # written by the InstabilityReport in the config
FAST_BATCH = 1024
FAST = ("--trainer.max_epochs", "4", "--data.batch_size", str(FAST_BATCH))
LARGE_BATCH = 65536  # b x b logits do not fit in memory


def lightning_mp(*arguments: str) -> None:
    """Run `lightning-mp` in the repository's root; exit with its status if it fails."""
    script = Path(sysconfig.get_path("scripts")) / "lightning-mp"
    print(f"\n$ lightning-mp {' '.join(arguments)}", flush=True)
    # Lightning 2.6 calls a function that torch 2.13 deprecates.
    quiet = {"PYTHONWARNINGS": "ignore::FutureWarning:lightning.pytorch.utilities._pytree"}
    status = subprocess.run([script, *arguments], cwd=ROOT, env={**os.environ, **quiet}).returncode
    if status:
        print(f"`lightning-mp {arguments[0]}` failed with status {status}.")
        raise SystemExit(status)


def trained(*arguments: str) -> GlyphCLIP:
    """Train with the command line; return the model."""
    # If an old checkpoint existed, Lightning would write `-v1` and the old one would be tested.
    shutil.rmtree(OUTPUT, ignore_errors=True)
    lightning_mp("fit", "--config", str(CONFIG), *arguments)
    return GlyphCLIP.load_from_checkpoint(CHECKPOINT, map_location="cpu")


def main() -> None:
    """Run all steps; exit with the status of the first failing step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="train for two minutes instead of six")
    is_fast = parser.parse_args().fast
    start = time.monotonic()
    model = trained(*(FAST if is_fast else ()))
    after_training = time.monotonic()
    # Before the test, which is another child process.
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    checkpoint = str(CHECKPOINT.relative_to(ROOT))
    lightning_mp("test", "--config", str(CONFIG), "--ckpt_path", checkpoint)

    data = GlyphData(batch_size=FAST_BATCH) if is_fast else GlyphData()
    data.setup()
    train, test = data.tables["train"], data.tables["test"]
    image_ND, text_ND = encode(model, test)
    model.recall.update(image_ND, text_ND)
    scores = {name: float(value) for name, value in model.recall.compute().items()}
    draw_retrieval(PICTURE, test, image_ND, text_ND)
    lines = ["", novelty_line(train, test), "", *recall_lines(scores, test), ""]
    # KiB on Linux, bytes on macOS.
    peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    lines += [*memory_lines(model, train, (data.batch_size, LARGE_BATCH), peak_bytes), ""]
    lines.append(f"Picture: {PICTURE}")
    lines.append(instability_line(INSTABILITY))
    lines.append(
        f"Rendering and training {after_training - start:.0f} s "
        f"({usage.ru_utime + usage.ru_stime:.0f} s of CPU), "
        f"with test and picture {time.monotonic() - start:.0f} s."
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
