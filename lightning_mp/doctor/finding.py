"""`Finding`: one result of the doctor."""

from typing import Literal, NamedTuple

__all__ = ["Finding"]


class Finding(NamedTuple):
    """One result of the doctor.

    Attributes:
        kind: The name of the check.
        severity: `"wrong"` if the run fails or does not train what the configuration asks for;
            `"advice"` if it is slower, larger or less accurate than necessary.
        what: What the configuration does.
        why: The consequence.
        change: The line to change or to add.
    """

    kind: str
    severity: Literal["wrong", "advice"]
    what: str
    why: str
    change: str

    def lines(self) -> list[str]:
        """Return the lines that the doctor prints."""
        return [
            f"{self.severity.upper()}: {self.kind}",
            f"  What:   {self.what}",
            f"  Why:    {self.why}",
            f"  Change: {self.change}",
        ]
