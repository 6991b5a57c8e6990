"""The search for the first producer: replays of the batches of a step, on all ranks together."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_mp.callbacks._locate.finding import Finding, find_source, headroom
from lightning_mp.callbacks._locate.replay import Record, can_replay, replay
from lightning_mp.callbacks._locate.sentences import SAYS
from lightning_mp.callbacks._locate.trace import Trace

__all__ = ["gather_objects", "search"]

_LOWERINGS = 6  # of a loss scale that is tried
_Seen = tuple[Finding | None, float, str]
_NEAR = 2**-6  # two roundings to bf16, where compiled code runs eagerly


def gather_objects(trainer: pl.Trainer, value: Any) -> list[Any]:
    """Return the values of all ranks; every rank must call it."""
    if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def search(
    trainer: pl.Trainer,
    records: Sequence[Record],
    scale: float | None,
    optimizer_steps: int,
    near_limit: float,
) -> tuple[int, int, Finding]:
    """Replay batches until one shows where it began; return index, rank, finding, on all alike."""
    if not can_replay(trainer):
        return 0, 0, Finding(source="failed", name="", sentence=SAYS["no_replay"])
    inexact = ""
    for index, record in enumerate(records):
        look = partial(_look, trainer, record, optimizer_steps, near_limit)
        for rank, (finding, _, difference) in enumerate(look(scale)):
            inexact = inexact or difference
            if finding is None:
                continue
            if finding.source == "backward" and scale is not None:
                rank, finding = _at_lower_scales(look, rank, finding, scale)
            return index, rank, replace(finding, sentence=finding.sentence + difference)
    nowhere = SAYS["nowhere_of" if len(records) > 1 else "nowhere"].format(count=len(records))
    return 0, 0, Finding(source="nowhere", name="", sentence=nowhere + inexact)


def _difference(trace: Trace, record: Record) -> str:
    """Return that a replay was not exact, where its loss tells."""
    if record.loss is None or len(trace.groups["loss"]) != 1:
        return ""
    (loss,) = trace.groups["loss"]
    before = abs(record.loss)
    is_same = loss.is_finite == math.isfinite(before)
    if is_same and loss.is_finite:
        is_same = abs(loss.amax - before) <= _NEAR * max(loss.amax, before)
    now = f"{loss.amax:.4g}" if loss.is_finite else loss.kind
    return "" if is_same else SAYS["not_exact"].format(now=now, before=before)


def _at_lower_scales(
    look: Callable[[float], list[_Seen]], rank: int, finding: Finding, scale: float
) -> tuple[int, Finding]:
    """Return the finding at a loss scale of 1, else that of before with a scale that fits."""
    seen = look(1.0)
    for other, (found, _, _) in enumerate(seen):
        if found is not None:
            return other, found
    room = min(room for _, room, _ in seen)
    fitting = 1.0
    while fitting * 2 <= room and fitting * 2 < scale:
        fitting *= 2
    for _ in range(_LOWERINGS):  # sums inside a kernel can overflow before their result does
        if fitting <= 1 or min(room for _, room, _ in look(fitting)) > 0:
            break
        fitting = max(fitting / 4, 1.0)
    else:
        fitting = 1.0
    sentence = finding.sentence + SAYS["fitting_scale"].format(scale=fitting)
    return rank, replace(finding, sentence=sentence, fitting_scale=fitting)


def _look(
    trainer: pl.Trainer, record: Record, steps: int, near_limit: float, scale: float | None
) -> list[_Seen]:
    """Replay a batch; return every rank's finding, `headroom`, and words for what is not exact."""
    try:
        trace = replay(trainer, record, scale, steps)
    except Exception as error:
        # Without memory for a second backward, say: no reason to end a run that goes on without.
        text = (str(error).splitlines() or [""])[0][:200]
        sentence = SAYS["failed"].format(name=type(error).__name__, text=text)
        seen: _Seen = Finding(source="failed", name="", sentence=sentence), 0.0, ""
    else:
        seen = find_source(trace, near_limit, scale), headroom(trace), _difference(trace, record)
    return gather_objects(trainer, seen)
