"""`Finding`: one result of the doctor."""

from typing import Literal, NamedTuple

__all__ = ["Finding"]


class Finding(NamedTuple):
    """One result of the doctor.

    Attributes:
        kind: The name of the check.
        severity: `"wrong"` where the run fails or trains something other than the configuration
            asks for; `"advice"` where it is slower, larger or less accurate than it could be.
        what: What the configuration does.
        why: What follows from it.
        change: The line to change, or to add.
    """

    kind: str
    severity: Literal["wrong", "advice"]
    what: str
    why: str
    change: str

    def lines(self) -> list[str]:
        """Return the finding as it is printed."""
        return [
            f"{self.severity.upper()}: {self.kind}",
            f"  What:   {self.what}",
            f"  Why:    {self.why}",
            f"  Change: {self.change}",
        ]
