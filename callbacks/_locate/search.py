"""The search for the first producer: replays of the batches of a step, on all ranks together."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_mp.callbacks._locate import sentences
from lightning_mp.callbacks._locate.finding import Finding, find_source, headroom
from lightning_mp.callbacks._locate.replay import Record, can_replay, replay
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
    *,
    scale: float | None,
    optimizer_steps: int,
    near_limit: float,
) -> tuple[int, int, Finding]:
    """Replay batches one by one until one of them shows where it began.

    Args:
        trainer: The trainer.
        records: The batches to look at, as many on every rank.
        scale: The loss scale of the step.
        optimizer_steps: Where a replay ends in manual optimization, see `replay`.
        near_limit: The share of a dtype's largest number that makes a suspect.

    Returns:
        Index of the batch, rank and finding, the same on all ranks.
    """
    if not can_replay(trainer):
        return 0, 0, Finding(source="failed", name="", sentence=sentences.NO_REPLAY)
    inexact = ""
    for index, record in enumerate(records):

        def look(tried: float | None, record: Record = record) -> list[_Seen]:
            seen = _look(trainer, record, tried, optimizer_steps, near_limit)
            return gather_objects(trainer, seen)

        for rank, (finding, _, difference) in enumerate(look(scale)):
            inexact = inexact or difference
            if finding is None:
                continue
            if finding.source == "backward" and scale is not None:
                rank, finding = _at_lower_scales(look, rank, finding)
            return index, rank, replace(finding, sentence=finding.sentence + difference)
    sentence = sentences.nowhere(len(records)) + inexact
    return 0, 0, Finding(source="nowhere", name="", sentence=sentence)


def _difference(trace: Trace, record: Record) -> str:
    """Return that a replay was not exact, where its loss tells."""
    if record.loss is None or len(trace.group("loss")) != 1:
        return ""
    (loss,) = trace.group("loss")
    before = abs(record.loss)
    if loss.is_finite and math.isfinite(before):
        is_same = abs(loss.amax - before) <= _NEAR * max(loss.amax, before)
    else:
        is_same = loss.is_finite == math.isfinite(before)
    return "" if is_same else sentences.not_exact(before, loss)


def _at_lower_scales(
    look: Callable[[float], list[_Seen]], rank: int, finding: Finding
) -> tuple[int, Finding]:
    """Tell a loss scale that is too high from a gradient that is not finite at any.

    Returns:
        Rank and finding: that at a loss scale of 1 if there is one, else that of before with the
        largest power of two, or nearly so, at which gradients are finite.
    """
    seen = look(1.0)
    for other, (found, _, _) in enumerate(seen):
        if found is not None:
            return other, found
    room = min(room for _, room, _ in seen)
    fitting = 1.0
    while fitting * 2 <= room and fitting * 2 < (finding.loss_scale or 1.0):
        fitting *= 2
    for _ in range(_LOWERINGS):  # sums inside a kernel can overflow before their result does
        if fitting <= 1 or min(room for _, room, _ in look(fitting)) > 0:
            return rank, finding.at_fitting_scale(fitting)
        fitting = max(fitting / 4, 1.0)
    return rank, finding.at_fitting_scale(1.0)


def _look(
    trainer: pl.Trainer,
    record: Record,
    scale: float | None,
    optimizer_steps: int,
    near_limit: float,
) -> _Seen:
    """Replay a batch; return finding, `headroom`, and in which words the replay is not exact."""
    try:
        trace = replay(trainer, record, scale, optimizer_steps)
    except Exception as error:
        # Without memory for a second backward, say: no reason to end a run that goes on without.
        return Finding(source="failed", name="", sentence=sentences.failed(error)), 0.0, ""
    return find_source(trace, near_limit, scale), headroom(trace), _difference(trace, record)
