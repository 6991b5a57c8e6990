"""Prints a plan: tables of figures and one sentence of advice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from lightning_mp.plan.estimate import (
    METHODS,
    Machine,
    Seconds,
    exchanged,
    largest,
    memory,
    seconds,
)
from lightning_mp.plan.formulas import GIB, epoch_hours
from lightning_mp.plan.subject import PRECISIONS, Subject

__all__ = ["advice", "aligned", "plan_lines"]


def aligned(rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Return rows as lines of aligned columns; the first row is the header.

    The first column is aligned to the left; with `left=2`, so is the last one.
    """
    columns = list(zip(*rows, strict=True))
    padded = []
    for index, column in enumerate(columns):
        width = max(map(len, column))
        is_left = index == 0 or (left == 2 and index == len(columns) - 1)
        padded.append([text.ljust(width) if is_left else text.rjust(width) for text in column])
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def _size(bytes_: float) -> str:
    """Return bytes in GiB, MiB or KiB."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB")):
        if bytes_ >= unit:
            return f"{bytes_ / unit:,.{0 if bytes_ >= 1000 * unit else 1}f} {name}"
    return f"{bytes_ / 2**10:,.1f} KiB"


def _pairs_in_words(pairs: float) -> str:
    """Return a number of pairs as the papers write it: k is 1,024, M is 1,024 k."""
    for unit, letter in ((2**20, "M"), (2**10, "k")):
        # Not below ten units: without decimals 1.5k would read 2k.
        if pairs >= 10 * unit:
            return f"{pairs / unit:,.0f}{letter}"
    return f"{pairs:,.0f}"


def plan_lines(subject: Subject, machine: Machine, batch: int, pairs: int | None) -> Iterator[str]:
    """Yield the lines of a plan: times only with a speed, hours only with the pairs of an epoch."""
    towers = ", ".join(
        f"{name} {_size(tower.saved_per_pair)}" for name, tower in subject.towers.items()
    )
    trained = f"{subject.parameters / 1e6:,.1f}M trained parameters"
    yield f"{subject.name}: {trained}, feature width {subject.width}"
    yield f"Kept for the backward of a pair ({subject.found}): {towers}"
    yield (
        f"Batch {batch:,} on {machine.gpus} rank(s), {batch / machine.gpus:,.0f} each, towers in "
        f"micro-batches of {subject.micro_batch}, {subject.precision}; all below is computed"
    )
    yield ""
    yield from aligned(_statics(subject))
    yield ""
    yield from aligned(_memories(subject, machine, batch))
    yield (
        "peak = static + data + features + the larger of loss and backbone. The loss holds logits "
        "or a workspace of tiles; the backbone holds gradients of the weights and activations of a "
        "micro-batch. Without a gradient cache both hold the activations of the whole batch."
    )
    yield ""
    ours = memory(METHODS[-1], batch, subject, machine)
    yield (
        f"Host: {_size(ours.host)} a node of {_size(machine.host_bytes)}, for "
        f"{machine.ranks_per_node} rank(s), {subject.workers} workers each, loader batches a "
        f"step: {subject.loader_batches}, {_size(subject.host_pair_bytes)} a pair"
    )
    sent, flops = exchanged(METHODS[-1], batch, subject, machine)
    yield (
        f"Exchange: a rank sends {_size(sent)} a step, by ring or by slices, beside "
        f"{flops / 1e9:,.0f} GFLOP of the loss: {flops / max(sent, 1):,.0f} FLOP a byte"
    )
    if machine.flops_per_second:
        yield ""
        yield from aligned(_time_rows(subject, machine, batch, pairs))
        work = subject.flops_per_pair(cached=True) / 1e9
        yield (
            f"Rate: {machine.pairs_per_second:,.0f} pairs/s a rank, {work:,.0f} GFLOP a pair; "
            f"products of the loss at {machine.flops_per_second / 1e12:.3g} TFLOP/s"
        )
    else:
        yield "Times: pass `--pairs-per-second` of a GPU, or the `--tflops` that it sustains."


_BYTES = "static", "data", "features", "loss", "backbone", "peak"


def _statics(subject: Subject) -> Iterator[tuple[str, ...]]:
    yield "static memory by precision", "at rest", f"of it {subject.optimizer}", "gradients"
    for name, precision in PRECISIONS.items():
        at_rest = precision.at_rest(subject.parameters, subject.states, subject.frozen_parameters)
        gradients = precision.gradient * subject.parameters
        parts = at_rest, subject.states[precision.stepped], gradients
        yield name + (" <" if name == subject.precision else ""), *map(_size, parts)


def _memories(subject: Subject, machine: Machine, batch: int) -> Iterator[tuple[str, ...]]:
    yield "memory of a rank", *_BYTES, "fits", "largest batch", "by host"
    for method in METHODS:
        need = memory(method, batch, subject, machine)
        by_device, by_host = largest(method, subject, machine)
        parts = (_size(getattr(need, name)) for name in _BYTES)
        fits = "yes" if need.peak <= machine.gpu_bytes else "no"
        yield method.name, *parts, fits, _pairs_in_words(by_device), _pairs_in_words(by_host)


def _time_rows(
    subject: Subject, machine: Machine, batch: int, pairs: int | None
) -> Iterator[tuple[str, ...]]:
    yield "seconds of a step", *Seconds._fields, "epoch"
    for method in METHODS:
        found = seconds(method, batch, subject, machine)
        hours = "-" if pairs is None else f"{epoch_hours(pairs, batch, found.step):,.2f} h"
        yield method.name, *(f"{each:,.3g}" for each in found), hours


def advice(subject: Subject, machine: Machine, batch: int) -> str:
    """Return one sentence: whether the batch fits, and what to change if not."""
    sharded = "InfCLModelParallelStrategy"
    strategy = sharded if subject.is_sharded else "InfCLStrategy"
    more = "or more GPUs" if subject.is_sharded else f"or `{sharded}`, which shards weights"
    need = partial(memory, METHODS[-1], batch, machine=machine)
    # Micro-batches below an eighth would slow the towers down.
    choices = (
        replace(subject, offload=offload, micro_batch=max(1, subject.micro_batch >> halvings))
        for halvings in range(4)
        for offload in dict.fromkeys((subject.offload, True))
    )
    fits = (choice for choice in choices if need(choice).peak <= machine.gpu_bytes)
    changed = next(fits, replace(subject, offload=True))
    needed = need(changed)
    if needed.peak > machine.gpu_bytes:
        by_device, _ = largest(METHODS[-1], changed, machine)
        remedy = (
            f"take a batch of {by_device:,}, a smaller micro-batch, or more GPUs."
            if by_device
            else f"no batch fits beside {_size(needed.static)} of static memory. Take a smaller "
            f"micro-batch, larger GPUs, {more}."
        )
        return (
            f"{batch:,} pairs need {_size(needed.peak)} a GPU of {_size(machine.gpu_bytes)}"
            f"{', with their data on the host' if changed.offload else ''}: {remedy}"
        )
    most = batch // machine.gpus  # a loader batch has at least one pair
    while 2 * changed.loader_batches <= most and needed.host > machine.host_bytes:
        changed = replace(changed, loader_batches=2 * changed.loader_batches)
        needed = need(changed)
    by_device, by_host = largest(METHODS[-1], changed, machine)
    if needed.host > machine.host_bytes:
        smaller = f"take a batch of {by_host:,}, " if by_host else "no batch fits: take "
        return (
            f"{batch:,} pairs fit the GPUs, but not the hosts: {smaller}more nodes, fewer workers, "
            "or images as uint8, a quarter of fp32."
        )
    batches = changed.loader_batches
    changes = {
        'offload="host"': changed.offload != subject.offload,
        f"micro_batch_size={changed.micro_batch}": changed.micro_batch != subject.micro_batch,
        f"loader_batches_per_step={batches}": batches != subject.loader_batches,
    }
    passed = ", ".join(argument for argument, is_changed in changes.items() if is_changed)
    if passed:
        asked, loaded = need(subject), batch // machine.gpus // batches
        return (
            f"{batch:,} pairs need {_size(asked.peak)} of {_size(machine.gpu_bytes)} a GPU, "
            f"{_size(asked.data)} of it data, and {_size(asked.host)} of "
            f"{_size(machine.host_bytes)} a node: pass `{strategy}({passed})`, and "
            f"load {loaded:,} pairs at a time."
        )
    return (
        f"{batch:,} pairs fit: {_size(needed.peak)} of {_size(machine.gpu_bytes)} a GPU and "
        f"{_size(needed.host)} of {_size(machine.host_bytes)} a node; the largest batch is "
        f"{min(by_device, by_host):,}."
    )
