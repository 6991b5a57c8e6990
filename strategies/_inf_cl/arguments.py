"""What can be wrong with the arguments of `InfCLStrategy`."""

from collections.abc import Sequence
from typing import Any

__all__ = ["check_arguments"]


def check_arguments(
    towers: Sequence[str],
    counts: dict[str, tuple[int, int]],
    offload: str,
    ddp: dict[str, Any],
) -> None:
    """Refuse arguments of `InfCLStrategy` that cannot be used.

    Args:
        towers: Names.
        counts: Arguments that count something, with the least that they may be.
        offload: Where batches stay.
        ddp: What is for DDP.

    Raises:
        ValueError: With what is accepted.
    """
    is_list = not isinstance(towers, str) and isinstance(towers, Sequence)
    if not is_list or not towers or not all(isinstance(name, str) and name for name in towers):
        raise ValueError(
            f"Passed `InfCLStrategy(towers={towers!r})`. `towers` must be a list of at least one "
            "name. Name the submodules or methods that `training_step` calls, such as "
            "`towers=['visual', 'text']`."
        )
    if len(set(towers)) < len(towers):
        raise ValueError(
            f"Passed `InfCLStrategy(towers={list(towers)!r})`. Each tower must be named once. "
            "Leave the repeated name out."
        )
    for name, (value, least) in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(
                f"Passed `InfCLStrategy({name}={value!r})`. `{name}` must be an integer of at "
                f"least {least}. Leave it out to get the default."
            )
    if offload not in ("none", "host"):
        raise ValueError(
            f"Passed `InfCLStrategy(offload={offload!r})`. `offload` must be 'none' or 'host'. "
            "Pass 'host' to leave batches in host memory."
        )
    if ddp.get("static_graph"):
        raise ValueError(
            "Passed `InfCLStrategy(static_graph=True)`. Gradients are reduced when all are "
            "complete, not in the graph that DDP would record. Leave `static_graph` out; they are "
            "all-reduced once a step all the same."
        )
