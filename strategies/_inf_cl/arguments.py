"""What can be wrong with the arguments of `InfCLStrategy` and its kin."""

from collections.abc import Mapping, Sequence

from lightning_mp._arguments import check_count

__all__ = ["check_arguments"]


def check_arguments(
    strategy: str, towers: Sequence[str], counts: Mapping[str, tuple[object, int]], offload: str
) -> None:
    """Refuse arguments that cannot be used."""
    is_list = not isinstance(towers, str) and isinstance(towers, Sequence)
    if not is_list or not towers or not all(isinstance(name, str) and name for name in towers):
        raise ValueError(
            f"Passed `{strategy}(towers={towers!r})`. `towers` must be a list of at least one "
            "name. Name the submodules or methods that `training_step` calls, such as "
            "`towers=['visual', 'text']`."
        )
    if len(set(towers)) < len(towers):
        raise ValueError(
            f"Passed `{strategy}(towers={list(towers)!r})`. Each tower must be named once. "
            "Leave the repeated name out."
        )
    for name, (value, least) in counts.items():
        other = "'auto' or " if name == "micro_batch_size" else ""
        check_count(strategy, name, value, least, other=other)
    if offload not in ("none", "host"):
        raise ValueError(
            f"Passed `{strategy}(offload={offload!r})`. `offload` must be 'none' or 'host'. "
            "Pass 'host' to leave batches in host memory."
        )
