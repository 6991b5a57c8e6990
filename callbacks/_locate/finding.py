"""Finds the source of the first non-finite value in the trace of a replayed step."""

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from lightning_mp.callbacks._locate.trace import Role, Seen, Trace, TracedCall
from lightning_mp.callbacks._rules.records import Verdict

__all__ = ["find_source"]

_MOST_SUSPECTS = 4  # named in an alarm


def find_source(trace: Trace, near_limit: float, scale: float | None) -> Verdict | None:
    """Return the first source of non-finite values, or `None` if all values are finite.

    The first tag is the kind of the source: "batch", "parameter", "forward" or "backward".
    """
    parameter = _first_bad(trace.groups["parameters"])
    if parameter is not None:
        return _found(trace, "parameter", ["parameter"], parameter.path, [parameter], parameter)
    producer, masked = _first_producer(trace, near_limit)
    if producer is not None:
        return _in_forward(trace, producer, near_limit)
    entry = _first_tainted(trace.groups["batch"])
    if entry is not None:
        return _found(trace, "batch", ["batch"], entry.path, [entry], entry)
    return _outside(trace, near_limit, masked) or _in_backward(trace, near_limit, scale)


# --- the forward ---------------------------------------------------------------------------------


def _first_producer(trace: Trace, near_limit: float) -> tuple[TracedCall | None, list[TracedCall]]:
    """Return the source in the forward, and earlier calls whose -inf outputs are masks."""
    # Masked logits are -inf beside finite values far from the limit of the dtype. A mask is not an
    # error if a softmax consumes it or the surrounding module returns finite values.
    masked: list[TracedCall] = []
    for call in trace.ended:
        bad = [s for s in call.seen["output"] if not s.is_finite]
        given = [s for s in call.seen["input"] if not s.is_finite]
        given = [s for s in given if masked or not s.is_mask]
        is_passed_on = bool(given) and not (masked and all(s.is_masked for s in given))
        if not bad or is_passed_on:
            continue
        # If other values are near the limit, -inf is more likely an overflow than a mask.
        if all(s.is_masked and s.amax <= near_limit * s.limit for s in bad):
            inner = [c for c in masked if c.name.startswith(call.inside)]
            if not given and all(_is_swallowed(c, trace) for c in inner):
                masked.append(call)
        else:
            is_softmax = "softmax" in type(call.module).__name__.lower() or not given
            return (call if is_softmax else masked[-1]), masked
    if _first_bad(trace.groups["loss"]) is None:
        return None, masked
    return next((c for c in masked if not _is_swallowed(c, trace)), None), masked


def _is_swallowed(masked: TracedCall, trace: Trace) -> bool:
    """Return whether a later module turned -inf into finite values, as a softmax does."""
    after = (c for c in trace.ended if c.ended > masked.ended)
    return any(
        _first_bad(call.seen["output"]) is None
        for call in after
        if masked.name.startswith(call.inside) or _first_bad(call.seen["input"])
    )


def _in_forward(trace: Trace, call: TracedCall, near_limit: float) -> Verdict:
    inputs, outputs = call.seen["input"], call.seen["output"]
    before = [c for c in trace.ended if c.ended < call.ended]
    inside = [c for c in before if c is not call and c.name.startswith(call.inside)]
    # A module may pass its own non-finite value to a submodule, which only returns it.
    given = next((c for c in inside if _first_tainted(c.seen["input"])), None)
    seen = given.seen["input"] if given else outputs
    bad = _first_tainted(seen) or _first_bad(seen) or seen[0]
    if given is not None:
        before = [c for c in before if c.ended < given.ended]
    suspects = _suspects_before(trace, before, call, near_limit)
    buffer = _first_bad(call.own(trace.groups["buffers"]))
    plain, masks = [s for s in inputs if not s.is_mask], [s for s in inputs if s.is_masked]
    is_narrow = any(s.limit > bad.limit for s in plain)
    is_huge = bad.dtype != torch.float16 and any(s.amax * s.amax > s.limit for s in plain)
    keys = ["forward_passed" if given else "forward_output" if bad.path else "forward"]
    if buffer is not None:
        keys.append("buffer")
    else:
        keys += ["inputs"] * bool(plain) + ["narrow"] * is_narrow + ["huge"] * is_huge
        keys += ["mask"] * bool(masks) + ["submodules"] * bool(inside)
    passed_to = "" if given is None else given.name
    found = _found(trace, "forward", keys, call.name, plain, bad, suspects, title=trace.title(call))
    found = dataclasses.replace(found, tags=(*found.tags, *["huge"] * is_huge))
    return found.given(call=passed_to, buffer=buffer, mask=next(iter(masks), None))


def _outside(trace: Trace, near_limit: float, masked: list[TracedCall]) -> Verdict | None:
    """Return a source in the code of the LightningModule between or after its submodules."""
    ended = trace.ended
    inputs = {c: [s for s in c.seen["input"] if not (s.is_masked and masked)] for c in ended}
    tainted = (c for c in ended if _first_tainted(inputs[c]))
    bad_input = next((c for c in tainted if _first_bad(c.seen["output"])), None)
    loss = _first_bad(trace.groups["loss"])
    bad = loss if bad_input is None else _first_tainted(bad_input.seen["input"])
    if bad is None:
        return None
    before = [c for c in ended if bad_input is None or c.ended < bad_input.ended]
    outputs = [s for c in before for s in c.seen["output"] if s.is_finite]
    suspects = _suspects_before(trace, before, None, near_limit)
    keys = ["outside_passed" if bad_input else "outside", *["outputs"] * bool(outputs)]
    passed_to = "" if bad_input is None else bad_input.name
    found = _found(trace, "forward", keys, "", outputs, bad, suspects, call=passed_to)
    is_half = any(s.dtype == torch.float16 for s in outputs)
    return dataclasses.replace(found, tags=(*found.tags, *["half"] * is_half))


# --- the backward --------------------------------------------------------------------------------


def _in_backward(trace: Trace, near_limit: float, scale: float | None) -> Verdict | None:
    reached = sorted((c for c in trace.calls if c.reached), key=lambda c: c.reached)
    producers = [c for c in reached if _makes_gradient(trace, c)]
    # The input gradient of a module comes after the input gradients of all its submodules.
    producer = min(producers, key=lambda c: c.left or c.reached, default=None)
    gradients = trace.groups["gradients"]
    keys = ["backward" if scale is None else "backward_scaled"]
    if producer is None:
        outputs = (s for c in reached for s in c.seen["grad_output"])
        first_bad = _first_bad([*outputs, *gradients])
        if first_bad is None:
            return None
        bad, came, suspects = first_bad, trace.groups["loss"], []
        title = f"The loss computation in `training_step` of the root `{type(trace.root).__name__}`"
        keys.append("backward_of_loss")
    else:
        came, own = producer.seen["grad_output"], producer.own(gradients)
        leaving = [*producer.seen["grad_input"], *own]
        bad = _first_bad(leaving) or leaving[0]
        title, where = trace.title(producer), "own_gradient" if bad in own else "input_gradient"
        keys += [*["output_gradient"] * bool(came), where]
        earlier = [c for c in reached if c.reached <= producer.reached]
        suspects = _suspects_before(trace, earlier, producer, near_limit, "grad_output")
    # Autocast casts gradients of fp32 weights to fp32 after they have overflowed in fp16.
    narrow = min((*came, bad), key=lambda s: s.limit)
    name, fields = "" if producer is None else producer.name, {"title": title, "scale": scale}
    return _found(trace, "backward", keys, name, came, bad, suspects, narrow, **fields)


def _makes_gradient(trace: Trace, call: TracedCall) -> bool:
    given = call.seen["grad_output"]
    if _first_tainted(given) is None and _first_bad(call.seen["grad_input"]) is not None:
        return True
    return _first_bad(given) is None and _first_bad(call.own(trace.groups["gradients"])) is not None


# --- shared helpers ------------------------------------------------------------------------------


def _found(
    trace: Trace,
    source: str,
    keys: Sequence[str],
    name: str,
    near: Sequence[Seen],
    bad: Seen,
    suspects: Sequence[tuple[str, str]] = (),
    narrow: Seen | None = None,
    **fields: object,
) -> Verdict:
    """Return a source and the keys of its sentences; without a name, it is code of the root.

    `near` are the inputs; `narrow` has the dtype that overflowed if it is not that of `bad`.
    """
    narrow, root = narrow or bad, type(trace.root).__name__
    tags = [source, "fp16" if narrow.dtype == torch.float16 else "wide"]
    tags += ["root"] if not name else ["nan"] * (bad.nan > 0)
    tags += ["suspects"] * (source == "forward" and bool(suspects))
    amax = max((s.amax for s in near), default=0.0)
    also = (*keys, *["suspects"] * bool(suspects))
    found = Verdict(
        "non_finite", amax, narrow.limit, "error", name or root, tuple(tags), also
    ).given(bad=bad, root=root, dtype=narrow.dtype_name, **fields)
    return found.given(
        largest=max(near, key=lambda s: s.amax / s.limit, default=None),
        listed="; ".join(f"`{name}` ({words})" for name, words in suspects),
        suspects=", ".join(f"`{name}`" for name, _ in suspects),
    )


def _first_bad(seen: Iterable[Seen]) -> Seen | None:
    return next((s for s in seen if not s.is_finite), None)


def _first_tainted(seen: Iterable[Seen]) -> Seen | None:
    return next((s for s in seen if not s.is_finite and not s.is_mask), None)


def _suspects_before(
    trace: Trace,
    calls: list[TracedCall],
    producer: TracedCall | None,
    near_limit: float,
    role: Role = "output",
) -> list[tuple[str, str]]:
    """Return modules with values near the limit of their dtype and a description, latest first."""
    found: dict[str, str] = {}
    for call in reversed(calls):
        is_around = producer is not None and producer.name.startswith(call.inside)
        if call is producer or is_around or any(n.startswith(call.inside) for n in found):
            continue
        words = _near(trace, call, near_limit, role)
        if words and call.name not in found:
            found[call.name] = words
    return list(found.items())[:_MOST_SUSPECTS]


def _near(trace: Trace, call: TracedCall, near_limit: float, role: Role) -> str:
    if role == "grad_output":
        near = [s for s in call.seen[role] if s.amax > near_limit * s.limit]
        return f"gradient of its output {near[0].amax:.5g}" if near else ""
    outputs = call.seen["output"]
    weights = call.own(trace.groups["parameters"])
    # Weights are cast to the dtype of the output, whatever dtype they are stored in.
    limit = min((s.limit for s in outputs), default=float("inf"))
    sizes = {
        "weight": [s.amax for s in weights if s.amax > near_limit * min(s.limit, limit)],
        "input": [s.amax for s in call.seen["input"] if s.amax > near_limit * s.limit],
        "output": [s.amax for s in outputs if s.amax > near_limit * s.limit],
    }
    return ", ".join(f"{what} {max(near):.5g}" for what, near in sizes.items() if near)
