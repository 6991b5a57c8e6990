"""When zeros among values mean that a format is too small for them, and when they do not."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Underflow", "UnderflowJudge"]


class Underflow(NamedTuple):
    """What is wrong with a tensor.

    Args:
        name: The tensor.
        zero_share: Exact zeros as a share of its values.
        usual_share: The largest share that was seen at the start.
        threshold: The excess over it that was passed.
        is_alarm: Whether it is the higher of the two thresholds.
    """

    name: str
    zero_share: float
    usual_share: float
    threshold: float
    is_alarm: bool


@dataclass(eq=False)
class UnderflowJudge:
    """Tells values that vanish from values that are zero by nature.

    Exact zeros are usual: an embedding has them for every token that a batch lacks, and a ReLU that
    has died for its whole row. So zeros count from the largest share of the first samples on, and
    only where subnormals come with them: magnitudes spread over many powers of two, so a tensor
    that loses 5% of its values to the smallest step of a format has as many again just above it.
    A dead row has none.

    Args:
        baseline_samples: Samples that tell what is usual.
        warn_excess: The excess that warns, if it is rising.
        alarm_excess: The excess that alarms, rising or not.
    """

    baseline_samples: int
    warn_excess: float
    alarm_excess: float
    # Of each tensor: samples, largest share and its lowest at the start, newest two after it.
    _usual: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)

    def judge(self, name: str, zero_share: float, subnormal_share: float) -> Underflow | None:
        """Take a sample of a tensor in, and return what is wrong with it.

        Args:
            name: The tensor.
            zero_share: Exact zeros as a share of its values, 0 to 1.
            subnormal_share: What is not zero but below 2^-14 at the scale it is held at, likewise.
        """
        usual = self._usual.setdefault(
            name, {"samples": 0, "highest": 0.0, "lowest": 1.0, "newest": []}
        )
        usual["samples"] += 1
        if usual["samples"] <= self.baseline_samples:
            usual["highest"] = max(usual["highest"], zero_share)
            usual["lowest"] = min(usual["lowest"], zero_share)
            return None
        newest = usual["newest"] = [*usual["newest"], zero_share][-4:]
        if len(newest) < 2:
            return None
        steady = min(newest[-2:])  # one odd batch does not count
        # As far above the highest as that was above the lowest is still usual.
        excess = steady - (2 * usual["highest"] - usual["lowest"])
        is_gone = steady == 1 > usual["highest"]
        if excess <= self.warn_excess or not (is_gone or subnormal_share >= excess / 2):
            return None
        if excess > self.alarm_excess:
            return Underflow(name, zero_share, usual["highest"], self.alarm_excess, True)
        if len(newest) == 4 and sum(newest[2:]) > sum(newest[:2]):
            return Underflow(name, zero_share, usual["highest"], self.warn_excess, False)
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what is usual."""
        return {"usual": {name: dict(usual) for name, usual in self._usual.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what is usual."""
        self._usual = {name: dict(usual) for name, usual in state["usual"].items()}
