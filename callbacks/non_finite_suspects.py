"""Modules whose values came near the limit of their dtype, before others overflowed."""

from collections.abc import Iterable

from lightning_mp.callbacks.replay_trace import Call, Role, Seen, Trace

__all__ = ["name_prefix", "own_tensors", "suspects_before", "with_suspects"]

_MOST_SUSPECTS = 4


def own_tensors(named: Iterable[Seen], call: Call) -> list[Seen]:
    """Return the tensors of a module without those of the modules inside it."""
    prefix = name_prefix(call)
    return [s for s in named if s.path.startswith(prefix) and "." not in s.path[len(prefix) :]]


def suspects_before(
    trace: Trace, calls: list[Call], producer: Call | None, near_limit: float, role: Role = "output"
) -> list[tuple[str, str]]:
    """Return names of modules that came near a limit, and how near, the last ones first."""
    found: dict[str, str] = {}
    for call in reversed(calls):
        is_around = producer is not None and producer.name.startswith(name_prefix(call))
        if call is producer or is_around or any(n.startswith(name_prefix(call)) for n in found):
            continue
        words = _near(trace, call, near_limit, role)
        if words and call.name not in found:
            found[call.name] = words
    return list(found.items())[:_MOST_SUSPECTS]


def _near(trace: Trace, call: Call, near_limit: float, role: Role) -> str:
    if role == "grad_output":
        near = [s for s in trace.seen(call, role) if s.amax > near_limit * s.limit]
        return f"gradient of its output {near[0].amax:.5g}" if near else ""
    outputs = trace.seen(call, "output")
    weights = own_tensors(trace.group("parameters"), call)
    # A weight is used in the dtype that comes out, whatever dtype it is kept in.
    limit = min((s.limit for s in outputs), default=float("inf"))
    sizes = {
        "weight": [s.amax for s in weights if s.amax > near_limit * min(s.limit, limit)],
        "input": [s.amax for s in trace.seen(call, "input") if s.amax > near_limit * s.limit],
        "output": [s.amax for s in outputs if s.amax > near_limit * s.limit],
    }
    words = [f"{what} {max(near):.5g}" for what, near in sizes.items() if near]
    return ", ".join(words)


def with_suspects(sentence: str, suspects: list[tuple[str, str]]) -> str:
    """Return a sentence that also names suspects."""
    if not suspects:
        return sentence
    listed = "; ".join(f"`{name}` ({words})" for name, words in suspects)
    return f"{sentence}; near the limit before it: {listed}"


def name_prefix(call: Call) -> str:
    """Return what the names of everything inside a module start with."""
    return f"{call.name}." if call.name else ""
