"""A plan as text, columns of figures and one sentence of advice, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_mp._files import save_new
from lightning_mp.plan.estimate import (
    METHODS,
    Machine,
    Rate,
    Seconds,
    exchanged,
    largest,
    memory,
)
from lightning_mp.plan.formulas import GIB, epoch_hours
from lightning_mp.plan.subject import PRECISIONS, Subject

__all__ = ["COLORS", "advice", "aligned", "draw_plan", "plan_lines"]

# Told apart by eyes that cannot tell red from green; ours is the darkest.
COLORS = ("#b3b3b3", "#d55e00", "#e69f00", "#56b4e9", "#00429d")

_MARK = "lightning-mp plan"  # in the pictures


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return rows, of which the first is the header, as lines of aligned columns.

    The first column is aligned to the left, and with `left=2` the last one, of words, too.
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


def _count(pairs: float) -> str:
    """Return a number of pairs as the papers write it: k is 1,024, M is 1,024 k."""
    for unit, letter in ((2**20, "M"), (2**10, "k")):
        # From ten units on, as there are no decimals: 1.5k would read 2k.
        if pairs >= 10 * unit:
            return f"{pairs / unit:,.0f}{letter}"
    return f"{pairs:,.0f}"


def plan_lines(
    subject: Subject, machine: Machine, batch: int, rate: Rate | None, pairs: int | None
) -> Iterator[str]:
    """Yield the tables of a plan; everything in them is computed.

    Without a rate there are no times, without the pairs of an epoch no hours.
    """
    towers = ", ".join(
        f"{name} {_size(tower.saved_per_pair)}" for name, tower in subject.towers.items()
    )
    trained = f"{subject.parameters / 1e6:,.1f}M trained parameters"
    yield f"{subject.name}: {trained}, feature width {subject.width}"
    yield f"Saved for the backward of a pair ({subject.found}): {towers}"
    yield (
        f"Batch {batch:,} on {machine.gpus} rank(s), {batch / machine.gpus:,.0f} each, towers in "
        f"micro-batches of {subject.micro_batch}, {subject.precision}; all below is computed"
    )
    yield ""
    yield from aligned([*_statics(subject)])
    yield ""
    yield from aligned([*_memories(subject, machine, batch)])
    yield (
        "peak = static + data + features + the larger of loss and backbone. loss: logits or the "
        "workspace of tiles, and without a cache the towers' activations. backbone: gradients of "
        "the weights, and activations of a micro-batch, or of the batch without a cache."
    )
    yield ""
    ours = memory(METHODS[-1], batch, subject, machine)
    yield (
        f"Host: {_size(ours.host)} a node of {_size(machine.host_bytes)}, for "
        f"{machine.ranks_per_node} rank(s), {machine.workers} workers each, loader batches a "
        f"step: {subject.loader_batches}, {_size(subject.pair_bytes)} a pair"
    )
    sent, flops = exchanged(METHODS[-1], batch, subject, machine)
    yield (
        f"Exchange: a rank sends {_size(sent)} a step, by ring or by slices, beside "
        f"{flops / 1e9:,.0f} GFLOP of the loss: {flops / max(sent, 1):,.0f} FLOP a byte"
    )
    if rate is not None:
        yield ""
        yield from aligned([*_times(subject, machine, batch, rate, pairs)])
        yield f"Rate: {rate.source}"
    else:
        yield "Times: pass `--pairs-per-second` of a GPU, `measure`, or `--tflops` it sustains."


# Columns, by the names of the values below them.
_BYTES = "static", "data", "features", "loss", "backbone", "peak"
_SECONDS = "towers", "loss", "exchange", "step"


def _statics(subject: Subject) -> Iterator[tuple[str, ...]]:
    yield "static memory by precision", "at rest", f"of it {subject.optimizer}", "gradients"
    for name, precision in PRECISIONS.items():
        at_rest = precision.at_rest(subject.parameters, subject.states)
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
        yield method.name, *parts, fits, _count(by_device), _count(by_host)


def _times(
    subject: Subject, machine: Machine, batch: int, rate: Rate, pairs: int | None
) -> Iterator[tuple[str, ...]]:
    yield "seconds of a step", *_SECONDS, "epoch"
    for method in METHODS:
        seconds = Seconds.of(method, batch, subject, machine, rate)
        hours = "-" if pairs is None else f"{epoch_hours(pairs, batch, seconds.step):,.2f} h"
        yield method.name, *(f"{getattr(seconds, name):,.3g}" for name in _SECONDS), hours


def advice(subject: Subject, machine: Machine, batch: int) -> str:
    """Return one sentence: whether the batch fits, and if not, all that has to change."""
    passed, changed = [], subject
    asked = needed = memory(METHODS[-1], batch, subject, machine)
    if asked.peak > machine.gpu_bytes and not subject.offload:
        changed = replace(changed, offload=True)
        passed.append('offload="host"')
        needed = memory(METHODS[-1], batch, changed, machine)
    by_device, by_host = largest(METHODS[-1], changed, machine)
    if needed.peak > machine.gpu_bytes:
        return (
            f"{batch:,} pairs need {_size(needed.peak)} a GPU of {_size(machine.gpu_bytes)}"
            f"{', with their data on the host' if changed.offload else ''}: take a batch of "
            f"{by_device:,}, a smaller micro-batch, or more GPUs."
        )
    if needed.host > machine.host_bytes:
        while changed.loader_batches < batch and needed.host > machine.host_bytes:
            changed = replace(changed, loader_batches=2 * changed.loader_batches)
            needed = memory(METHODS[-1], batch, changed, machine)
        passed.append(f"loader_batches_per_step={changed.loader_batches}")
    if needed.host > machine.host_bytes:
        return (
            f"{batch:,} pairs fit the GPUs, but not the hosts: take a batch of {by_host:,}, more "
            "nodes, or images as uint8, a quarter of fp32."
        )
    if passed:
        return (
            f"{batch:,} pairs need {_size(asked.peak)} of {_size(machine.gpu_bytes)} a GPU, "
            f"{_size(asked.data)} of it data, and {_size(asked.host)} of "
            f"{_size(machine.host_bytes)} a node: pass `InfCLStrategy({', '.join(passed)})`."
        )
    return (
        f"{batch:,} pairs fit: {_size(needed.peak)} of {_size(machine.gpu_bytes)} a GPU and "
        f"{_size(needed.host)} of {_size(machine.host_bytes)} a node; the largest batch is "
        f"{min(by_device, by_host):,}."
    )


def draw_plan(path: Path, subject: Subject, machine: Machine, batch: int) -> Path:
    """Write a log-log picture of memory against batch, all of it computed; return its path.

    A picture of an earlier plan is replaced; where another file is there, the name gets a number.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    sizes = [machine.gpus * 2**power for power in range(4, 40)]
    sizes = [size for size in sizes if size <= 16 * batch]
    for method, color in zip(METHODS, COLORS, strict=True):
        peaks = [memory(method, size, subject, machine).peak / GIB for size in sizes]
        # Inf-CL's line lies under ours where both have the same backbone.
        width = 4.5 if method.name == "Inf-CL" else 1.8
        axes.plot(sizes, peaks, "--", color=color, label=method.name, linewidth=width)
    limit = machine.gpu_bytes / GIB
    axes.axhline(limit, color="black", linewidth=1)
    axes.annotate(f"{limit:g} GiB", (sizes[0], limit), xytext=(2, 3), textcoords="offset points")
    axes.axvline(batch, color="black", linewidth=1, linestyle=":")
    low = memory(METHODS[-1], sizes[0], subject, machine).peak / GIB
    axes.set(
        xscale="log",
        yscale="log",
        ylim=(low / 2, 30 * max(limit, low)),
        xlabel="global batch, pairs",
        ylabel="memory of a rank at its peak, GiB",
        title=f"{subject.name} on {machine.gpus} ranks, {subject.precision} (computed)",
    )
    axes.set_xscale("log", base=2)
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    kind = path.suffix[1:].lower() or "png"
    mark = {"Software": _MARK} if kind == "png" else None
    return save_new(
        path, lambda file: figure.savefig(file, dpi=130, format=kind, metadata=mark), _MARK.encode()
    )
