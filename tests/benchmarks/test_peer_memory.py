"""The peak of a loss over local rows: what is counted is what the formula holds."""

import pytest

from benchmarks.peer_memory import main, peak_units
from tests.benchmarks.rehearsing import QUICK


@pytest.mark.parametrize(("keeps_logits", "matrices"), [(False, 4), (True, 6)])
@pytest.mark.parametrize(("batch", "width", "ranks"), [(512, 32, 1), (1024, 16, 4)])
def test_peak_is_that_of_the_matrices_and_scaled_features(
    batch: int, width: int, ranks: int, keeps_logits: bool, matrices: int
) -> None:
    """Two log-softmaxes and their gradients, and two logits where they are kept, in fp32."""
    unit = 4 * batch**2 / ranks
    peak = peak_units(batch, width, ranks, keeps_logits=keeps_logits) * unit
    scaled_features = 2 * (batch // ranks) * width * 4
    others = peak - matrices * unit - scaled_features
    assert 0 <= others <= 64 * 8  # scalars, which torch aligns to 64 bytes


def test_table_has_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--width", "16"]) == 0
    printed = capsys.readouterr().out
    assert "freed before the backward               4.06" in printed
    assert "kept                                    6.06" in printed
