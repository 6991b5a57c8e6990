"""A step passes the files that the docs list; a step and a loss have few moves between files."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

import lightning_mp
from lightning_mp import ContrastiveLoss, InfCLStrategy
from tests.strategies.models import TinyCLIP, loader, make_trainer

ROOT = Path(__file__).parents[2]


class Traces(pl.Callback):
    """Records the files that the third step runs in, and the number of moves between files.

    Args:
        left_out: Beginnings of the files that are not counted.
    """

    def __init__(self, *left_out: str) -> None:
        self.files: list[str] = []
        self.moves, self.last, self.left_out = 0, "", left_out

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            sys.setprofile(self.see)

    def on_train_batch_end(self, *_: Any) -> None:
        sys.setprofile(None)

    def see(self, frame: Any, event: str, _: Any) -> None:
        path = os.path.realpath(frame.f_code.co_filename)
        home = str(ROOT / "strategies"), str(ROOT / "lightning_mp")
        if event not in ("call", "return") or not path.startswith(home):
            return
        name = os.path.relpath(path, ROOT).removeprefix("lightning_mp/")
        # Comprehensions and lambdas are read in place.
        if name.startswith(self.left_out) or frame.f_code.co_name.startswith("<"):
            return
        if name != self.last:
            self.moves += bool(self.last)
            self.last = name
            if name not in self.files:
                self.files.append(name)


def test_step_passes_the_files_of_the_docs_with_few_moves() -> None:
    assert Path(lightning_mp.__file__).parents[1] == ROOT
    traces = Traces("contrastive/")  # the files of the loss
    strategy = InfCLStrategy(micro_batch_size=4)
    trainer = make_trainer(strategy, max_steps=3, callbacks=[traces])
    trainer.fit(TinyCLIP(dropout=0.0), loader(48, 12))
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    listed = re.findall(r"^\| `((?:strategies|gradient_cache|numerics)/\S+\.py)` \|", page, re.M)
    assert set(traces.files) == set(listed)
    assert len(listed) <= 10
    # Two towers, three micro-batches each, run and replayed: five files each time.
    assert traces.moves <= 140


def test_loss_of_one_tile_passes_ten_files_with_few_moves() -> None:
    loss_fn, traces = ContrastiveLoss(), Traces()
    image, text = (torch.randn(64, 16, requires_grad=True) for _ in range(2))
    for profile in (None, traces.see):
        sys.setprofile(profile)
        loss = loss_fn(image, text, torch.tensor(1.0))
        loss.backward()
        sys.setprofile(None)
    assert len(traces.files) <= 10
    assert traces.moves <= 60
