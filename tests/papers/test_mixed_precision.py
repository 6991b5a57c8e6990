"""The statements of the mixed-precision figures hold at their smallest size."""

import math
from typing import Any

import pytest

from papers import mixed_precision
from papers.output import Output
from tests.benchmarks.rehearsing import read


def rows_of(out: Output, part: str) -> list[dict[str, Any]]:
    """Reproduce a part; return the rows of its file."""
    pytest.importorskip("matplotlib")
    mixed_precision.PARTS[part](out)
    assert (out.folder / f"{part}.png").stat().st_size > 0
    return read(out.folder / f"{part}.csv")


@pytest.mark.sweep
def test_masters_and_residuals_follow_fp32_and_fp16_alone_does_not(out: Output) -> None:
    off = [abs(float(row["of_fp32"])) for row in rows_of(out, "curves")]
    # Only fp16 without master weights loses updates below half a ULP.
    assert max(off[1:3]) < 0.1 * off[3]


@pytest.mark.sweep
def test_suggested_scale_moves_gradients_into_the_window(out: Output) -> None:
    before, after = rows_of(out, "histogram")
    assert float(after["overflowing"]) == 0
    assert float(after["scale"]) > 1
    assert math.log2(float(after["scale"])).is_integer()
    for column in ("zero_in_fp16", "subnormal"):
        assert float(after[column]) < 0.1 * float(before[column])


@pytest.mark.sweep
def test_loss_scale_falls_at_overflows_and_grows_after_good_steps(out: Output) -> None:
    (row,) = rows_of(out, "scale")
    assert float(row["lowest"]) < float(row["first"]) == 2.0**24
    assert int(row["steps"]) == 60 + int(row["skipped"])  # skipped steps do not count


@pytest.mark.slow
def test_clamp_keeps_tokens_that_overflow_in_half_and_under_autocast(out: Output) -> None:
    rows = rows_of(out, "t5")
    for row in rows:
        is_lost = row["wo_times"] == str(2.0**18) and row["clamp"] == "False"
        assert (float(row["tokens_lost"]) > 0) == is_lost
    assert len({row["mode"] for row in rows}) == 2


def test_clipped_step_after_zeros_is_no_longer_than_before(out: Output) -> None:
    rows = rows_of(out, "adam")
    updates = {(row["optimizer"], int(row["zeros"])): float(row["update"]) for row in rows}
    for (optimizer, pause), update in updates.items():
        if optimizer.startswith("torch"):
            assert update == pytest.approx(updates["formula", pause], rel=1e-3)
        elif optimizer.startswith("Safe"):
            assert update <= 1.001 * updates["formula", 0]


@pytest.mark.sweep
def test_gradients_are_zero_without_a_loss_scale_and_not_with_one(out: Output) -> None:
    without, dynamic = rows_of(out, "zeros")
    assert float(without["last_zero_share"]) > 0.5
    assert float(dynamic["last_zero_share"]) < 0.05
    assert float(dynamic["last_loss"]) < float(without["last_loss"])
