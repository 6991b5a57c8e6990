"""What a loss over local rows holds at its peak on one of W ranks, in units of 4 b^2 / W bytes.

    python benchmarks/peer_memory.py

The rows are those of OpenCLIP's `ClipLoss(local_loss=True, gather_with_grad=True)` and of
DisCo-CLIP. OpenCLIP's loss returns before the backward, which frees the logits; the example of
DisCo-CLIP keeps them in variables until after it, as who logs an accuracy does with OpenCLIP. A
rank's share needs no process group: it is a function of the rank's features and of those that an
all-gather brings. Counted are the tensors that forward and backward allocate, at the moment when
they are most; features are there before.

Shapes:
    b: global batch. r: batch of the rank, b / W. D: feature width.

References:
    - open_clip: https://github.com/mlfoundations/open_clip, src/open_clip/loss.py
    - DisCo-CLIP: https://arxiv.org/abs/2304.08480, https://github.com/IDEA-Research/DisCo-CLIP
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a script only this folder is importable

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from benchmarks._common import format_table  # noqa: E402
from benchmarks._inputs import unit_pairs  # noqa: E402

__all__ = ["main", "peak_units"]


def peak_units(batch: int, width: int, ranks: int, *, keeps_logits: bool) -> float:
    """Return the peak of a rank's forward and backward in units of `4 b^2 / W` bytes.

    Args:
        batch: Pairs of all ranks, a multiple of `ranks`.
        width: Width of the features.
        ranks: W.
        keeps_logits: Whether they are still there in the backward.
    """
    rows = batch // ranks
    image_bD, text_bD = unit_pairs(batch, width, torch.float32, torch.device("cpu"))
    for features_bD in (image_bD, text_bD):
        features_bD.requires_grad_()
    labels_r = torch.arange(rows)

    def run() -> None:
        image_logits_rb = 100.0 * image_bD[:rows] @ text_bD.T
        text_logits_rb = 100.0 * text_bD[:rows] @ image_bD.T
        loss = F.cross_entropy(image_logits_rb, labels_r) / 2
        loss = loss + F.cross_entropy(text_logits_rb, labels_r) / 2
        if not keeps_logits:
            del image_logits_rb, text_logits_rb
        loss.backward()

    return _peak_bytes(run) / (4 * batch**2 / ranks)


def _peak_bytes(run: Callable[[], None]) -> int:
    """Return the most bytes that tensors made by `run` take at a time."""
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        run()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def main(arguments: Sequence[str] | None = None) -> int:
    """Count both and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=24576, help="pairs of all ranks")
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--width", type=int, default=512, help="of the features")
    options = parser.parse_args(arguments)
    rows = [
        [name, f"{peak_units(**vars(options), keeps_logits=keeps_logits):.2f}"]
        for name, keeps_logits in (
            ("logits freed before the backward", False),
            ("logits kept", True),
        )
    ]
    print(format_table(["local loss", "x 4 b^2 / W bytes"], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
