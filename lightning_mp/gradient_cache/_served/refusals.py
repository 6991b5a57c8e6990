"""Error messages for outputs of towers."""

from collections.abc import Sequence

__all__ = ["difference_error", "name_of", "scores_error", "shape_error"]


def name_of(path: str) -> str:
    """Return the name of an output for messages."""
    return f"`{path}`" if path else "a tensor"


def shape_error(tower: str, path: str, shape: Sequence[int], expected: str, arguments: str) -> str:
    """Return the message for an output with an unexpected shape."""
    name = repr(path or "name")
    return (
        f"The tower `{tower}` returned {name_of(path)} of shape {list(shape)} for a micro-batch, "
        f"where {expected}. Every output must have the rows of the batch, in the same shape for "
        f"every micro-batch. The arguments of the tower are {arguments}. If a role is wrong, "
        "declare the argument by name: `roles={'name': 'rows'}` or 'whole'. Otherwise compute "
        "losses and pairwise scores outside of towers, declare sequences of different lengths with "
        f"`roles={{{name}: 'rows padded with 0'}}`, and declare outputs without rows: "
        f"`roles={{{name}: 'mean'}}` for a mean over rows, 'sum' for a sum, 'whole' for a tensor "
        "that is equal in all micro-batches."
    )


def scores_error(tower: str, path: str, two: Sequence[int], three: Sequence[int]) -> str:
    """Return the message for an output whose row shape depends on the number of rows."""
    advice = f"leave it out: `roles={{{path!r}: 'left out'}}`" if path else "return the features"
    return (
        f"The tower `{tower}` returned {name_of(path)} of shape {list(two)} for 2 rows and of "
        f"{list(three)} for 3 rows. Outputs of micro-batches are concatenated, so the shape of a "
        "row must not depend on the number of rows. Compute pairwise scores outside of towers, "
        f"from the features, and {advice}."
    )


def difference_error(tower: str, difference: float, tolerance: float) -> RuntimeError:
    """Return the error for a replay with different outputs, with its likely causes in order."""
    return RuntimeError(
        f"The tower `{tower}` returned different outputs when it was replayed for its gradients: "
        f"the relative difference is {difference:.1e}, and {tolerance:.1e} is allowed. The "
        "gradients of the tower are wrong. Likely causes, in this order: an input was changed in "
        "place where torch does not count the write, such as through memory shared with numpy or "
        "`.data`; the tower draws from a generator that is not an attribute of its modules; the "
        "tower keeps state outside of buffers that changes with every call, such as a counter; "
        "weights were changed through `.data`. If only nondeterministic kernels differ, pass a "
        "larger `replay_tolerance`, or `inf` to skip the comparison."
    )
