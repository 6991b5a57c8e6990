"""What the precision plugins refuse of their arguments."""

__all__ = ["check_adam_epsilon", "check_choice"]


def check_choice(plugin: object, name: str, value: object, known: tuple[str, ...]) -> None:
    """Refuse an argument of a plugin that is not among those known."""
    if value not in known:
        raise ValueError(
            f"Passed `{type(plugin).__name__}({name}={value!r})`. `{name}` must be one of "
            f"{', '.join(map(repr, known))}."
        )


def check_adam_epsilon(plugin: object, value: object) -> None:
    """Refuse an `adam_epsilon` that no optimizer could take."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value not in ("auto", "keep") and not (is_number and 0 < value < float("inf")):  # type: ignore[operator]
        raise ValueError(
            f"Passed `{type(plugin).__name__}(adam_epsilon={value!r})`. `adam_epsilon` must be "
            "'auto', 'keep' or a positive number. Leave it out to have epsilon checked."
        )
