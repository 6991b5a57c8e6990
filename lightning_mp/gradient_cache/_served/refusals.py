"""What is said where a tower's outputs cannot be used."""

from collections.abc import Sequence

__all__ = ["difference_error", "name_of", "scores_error", "shape_error"]


def name_of(path: str) -> str:
    """Return an output as messages name it."""
    return f"`{path}`" if path else "a tensor"


def shape_error(tower: str, path: str, shape: Sequence[int], expected: str, arguments: str) -> str:
    """Return what is wrong with an output for a micro-batch, and how to declare what it is."""
    name = repr(path or "name")
    return (
        f"The tower `{tower}` returned {name_of(path)} of shape {list(shape)} for a micro-batch, "
        f"where {expected}. Every tensor that a tower returns must have rows for each row of its "
        "batch and the same shape in every micro-batch. Of its arguments, "
        f"{arguments}. If that is wrong, declare an argument by name: `roles={{'name': 'rows'}}` "
        "or 'whole'; else compute losses and pairwise scores outside of towers, and declare "
        f"sequences with `roles={{{name}: 'rows padded with 0'}}`. What has no rows is declared, "
        f"too: `roles={{{name}: 'mean'}}` for a mean over rows, 'sum' for a sum, 'whole' for what "
        "is the same for all."
    )


def scores_error(tower: str, path: str, two: Sequence[int], three: Sequence[int]) -> str:
    """Return what is wrong with an output whose shape follows the number of rows."""
    advice = f"leave it out: `roles={{{path!r}: 'left out'}}`" if path else "return the features"
    return (
        f"The tower `{tower}` returned {name_of(path)} of shape {list(two)} for 2 rows and of "
        f"{list(three)} for 3 rows. Rows are put together from micro-batches, so the shape of one "
        "must not follow how many there are. Compute scores of rows against each other outside of "
        f"towers, from the features, and {advice}."
    )


def difference_error(tower: str, difference: float, tolerance: float) -> RuntimeError:
    """Return the error for a replay that differs, with its likely causes in order."""
    return RuntimeError(
        f"The tower `{tower}` gave other outputs when it was replayed for its gradients: they "
        f"differ by {difference:.1e} of their norm, where {tolerance:.1e} is allowed. Its "
        "gradients are wrong. Likely causes, in this order: its input was changed in place unseen, "
        "as through memory shared with numpy or `.data`; it draws from a generator that is no "
        "attribute of its modules; it keeps state outside of buffers that moves with every call, "
        "such as a counter; its weights were changed through `.data`. If its kernels are just not "
        "deterministic, pass a larger `replay_tolerance`, or `inf` to compare nothing."
    )
