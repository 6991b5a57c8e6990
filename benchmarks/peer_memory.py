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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from benchmarks import _common as common  # noqa: E402
from benchmarks._inputs import unit_pairs  # noqa: E402

TABLE = {"local loss, logits": "{logits}", "x 4 b^2 / W bytes": "{units:.2f}"}


def peak_units(batch: int, width: int, ranks: int, *, keeps_logits: bool) -> float:
    """Return the peak of a rank's forward and backward in units of `4 b^2 / W` bytes.

    Args:
        batch: Pairs of all ranks, a multiple of `ranks`.
        width: Width of the features.
        ranks: W.
        keeps_logits: Whether they are still there in the backward.
    """
    rows, place = batch // ranks, torch.device("cpu")
    image_bD, text_bD = (x.requires_grad_() for x in unit_pairs(batch, width, torch.float32, place))
    labels_r = torch.arange(rows)

    def run() -> None:
        image_logits_rb = 100.0 * image_bD[:rows] @ text_bD.T
        text_logits_rb = 100.0 * text_bD[:rows] @ image_bD.T
        loss = F.cross_entropy(image_logits_rb, labels_r) / 2
        loss = loss + F.cross_entropy(text_logits_rb, labels_r) / 2
        if not keeps_logits:
            del image_logits_rb, text_logits_rb
        loss.backward()

    return (common.peak_bytes(run, place) or 0) / (4 * batch**2 / ranks)


def measure(args: argparse.Namespace) -> Iterator[common.Report]:
    """Count both."""
    problem = {name: getattr(args, name) for name in ("batch", "width", "ranks")}
    rows = [
        ({"logits": name, **problem}, {"units": peak_units(**problem, keeps_logits=kept)})
        for name, kept in (("freed before the backward", False), ("kept", True))
    ]
    yield common.Report(rows, TABLE)


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of this benchmark."""
    add("--batch", type=common.positive, default=24576, help="pairs of all ranks")
    add("--ranks", type=common.positive, default=32, help="W")
    add("--width", type=common.positive, default=512, help="of the features")


QUICK = {"batch": 512, "ranks": 4, "width": 32}
BENCHMARK = common.Benchmark("peer_memory", __doc__, add_options, measure, QUICK)
main, parse = BENCHMARK.main, BENCHMARK.parse

if __name__ == "__main__":
    raise SystemExit(main())
