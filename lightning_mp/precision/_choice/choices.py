"""What the precision plugins refuse of their arguments."""

__all__ = ["check_choice"]


def check_choice(plugin: object, name: str, value: object, known: tuple[str, ...]) -> None:
    """Refuse an argument of a plugin that is not among those known."""
    if value not in known:
        raise ValueError(
            f"Passed `{type(plugin).__name__}({name}={value!r})`. `{name}` must be one of "
            f"{', '.join(map(repr, known))}."
        )
