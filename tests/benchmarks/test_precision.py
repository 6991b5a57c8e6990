"""The benchmark of precisions runs at toy size and judges its contenders correctly."""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import _common as common
from benchmarks import precision
from benchmarks.precision import (
    OPTIMIZERS,
    PRECISIONS,
    judged,
    main,
    verdict_of,
)
from papers._fit import Outcome
from tests.benchmarks.rehearsing import QUICK, read

pytestmark = pytest.mark.slow

SMALL = [*QUICK, "--rounds", "1", "--steps", "1", "--optimizers", "fused"]
TWICE = ["16-mixed", "O2-fp16"]
SCALED = "16-mixed", "O1-fp16", "O2-fp16", "pure-fp16"
OUTCOME = Outcome(
    step_seconds=(0.1, 0.2),
    losses=(2.0, 1.9, 1.8),
    updates=2,
    loss_scale=None,
    skipped_steps=0,
    peak_bytes=None,
    parameters=10,
)
FIGURES = {"precision": "16-mixed", "optimizer": "fused", "speedup": 1.0}
FIGURES |= {"device": torch.device("cuda")}
FIGURES |= {"parameters": 86_000_000, "peak_bytes": 8 * 2**30, "loss_difference": 0.001}


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> Path:
    """Return the file of runs of every precision, of two with every optimizer, and in two rounds.

    `test_gpu_suite.py` runs the suite for GPUs with all contenders.
    """
    path = tmp_path_factory.mktemp("results") / "new" / "figures.csv"
    once = [*QUICK, "--rounds", "1", "--batch", "2", "--steps", "2", "--csv", str(path)]
    assert main([*once, "--optimizers", "fused"]) == 0
    assert main([*once, "--precisions", *TWICE, "--optimizers", "foreach", "safe"]) == 0
    other = ["--precisions", "16-mixed", "--pool", "mean", "--layout", "lnd", "--csv", str(path)]
    assert main([*SMALL, "--rounds", "2", *other]) == 0
    return path


def test_rehearsal_ranks_every_contender(rehearsal):
    *rows, appended = read(rehearsal)
    fused, others = rows[: len(PRECISIONS)], rows[len(PRECISIONS) :]
    assert {row["optimizer"] for row in rows} == set(OPTIMIZERS)
    for ranked, precisions, optimizers in (
        (fused, PRECISIONS, ["fused"]),
        (others, TWICE, ["foreach", "safe"]),
    ):
        found = [(row["precision"], row["optimizer"]) for row in ranked]
        assert sorted(found) == sorted(itertools.product(precisions, optimizers))
        times = [float(row["ms_median"]) for row in ranked]
        assert times == sorted(times)
    assert (appended["pool"], appended["layout"], appended["speedup"]) == ("mean", "lnd", "1.0")
    assert appended["loss_difference"] == ""


def test_rehearsal_figures_are_consistent(rehearsal):
    for row in read(rehearsal):
        low, median, high = (float(row[f"ms_{name}"]) for name in ("min", "median", "max"))
        assert 0 < low <= median <= high
        assert math.isclose(float(row["images_per_second"]), int(row["batch"]) / median * 1e3)
        assert row["peak_bytes"] == ""
        assert 6 < float(row["final_loss"]) < 8  # ln 1000 = 6.9 at the start
        assert float(row["loss_difference"] or 0) <= 0.01  # far below the tolerance
        assert (row["loss_scale"] != "") == (row["precision"] in SCALED)
        if row["precision"] == "16-mixed":
            assert float(row["speedup"]) == 1
    by_name = {(row["precision"], row["optimizer"]): row for row in read(rehearsal)[:-1]}
    for (_, optimizer), row in by_name.items():
        base = by_name["16-mixed", optimizer]
        ratio = float(base["ms_median"]) / float(row["ms_median"])
        assert math.isclose(
            float(row["speedup"]), ratio, rel_tol=1e-9
        )  # exact, because there was one round


def test_rehearsal_rows_name_chip_and_versions_but_no_place(rehearsal):
    for row in read(rehearsal):
        assert row["device_name"]
        assert row["torch"] == str(torch.__version__)
        assert row["lightning"]
        assert not any(value.startswith("/") for value in row.values())


def test_cpu_gives_no_verdict_on_speed(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--precisions", "32-true"]) == 0
    said = capsys.readouterr().out
    assert "Speed and memory are not judged on a CPU, which is slow at" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fits", "why"),
    [
        ([OUTCOME], None),
        ([replace(OUTCOME, losses=(2.0, 1.9, 1.83))], None),
        # One step was skipped, so 1.91 is close to what one update leads to, not two.
        ([replace(OUTCOME, losses=(2.0, 2.0, 1.91), updates=1)], None),
        (
            [OUTCOME, replace(OUTCOME, losses=(2.0, 1.9, 1.7))],
            "diverged: its final loss differs by 6% from 32-true",
        ),
        (
            [OUTCOME, replace(OUTCOME, losses=(2.0, 1.9, math.nan))],
            "diverged: its final losses are 1.8, nan",
        ),
        (
            [replace(OUTCOME, step_seconds=())],
            "skipped all timed steps; pass a longer --warm-up",
        ),
    ],
)
def test_contender_that_diverges_from_32_true_is_left_out(fits, why):
    if why is None:
        assert judged(fits, OUTCOME.losses) < 0.05
        assert judged(fits, None) is None
        return
    with pytest.raises(common.LeftOut, match=re.escape(why)):
        judged(fits, OUTCOME.losses)


def test_diverged_contender_of_this_package_fails_the_run(monkeypatch, capsys, tmp_path):
    real = precision.fit

    def fit(*args, plugin, **kwargs):
        outcome = real(*args, plugin=plugin, **kwargs)
        is_ours = type(plugin).__name__ == "BalancedAMP"
        return replace(outcome, losses=(math.inf,) * len(outcome.losses)) if is_ours else outcome

    monkeypatch.setattr(precision, "fit", fit)
    path = tmp_path / "figures.csv"
    assert main([*SMALL, "--precisions", "32-true", "O2-bf16", "--csv", str(path)]) == 1
    assert [row["precision"] for row in read(path)] == ["32-true"]
    expected = "Left out: O2-bf16, fused: diverged: its final losses are inf."
    assert expected in capsys.readouterr().out


def test_contender_without_enough_memory_is_left_out_with_the_reason(monkeypatch, capsys, tmp_path):
    def fit(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")

    monkeypatch.setattr(precision, "fit", fit)
    arguments = ["--precisions", "16-mixed", "O2-fp16", "--csv", str(tmp_path / "figures.csv")]
    assert main([*SMALL, *arguments]) == 0
    said = capsys.readouterr().out
    assert "Left out: O2-fp16, fused: ran out of memory.\n" in said


def test_slow_contender_skips_the_last_rounds(tmp_path):
    path = tmp_path / "figures.csv"
    arguments = ["--rounds", "2", "--precisions", "32-true", "--max-seconds", "1e-9"]
    assert main([*SMALL, *arguments, "--csv", str(path)]) == 0
    assert [row["rounds"] for row in read(path)] == ["1"]


@pytest.mark.parametrize(
    ("parameters", "speedup", "gib", "said"),
    [
        (86_000_000, 1.0, 8, ["1.00x as fast as 16-mixed (target: 1x): met",
                              "100.0% of its peak memory (target: 100%): met"]),
        (86_000_000, 0.9, 7, ["0.90x as fast as 16-mixed (target: 1x): missed",
                              "87.5% of its peak memory (target: 100%): met"]),
        (632_000_000, 1.1, 9, ["1.10x as fast as 16-mixed (target: 1.15x): missed",
                               "112.5% of its peak memory (target: 100%): missed"]),
    ],
)  # fmt: skip
def test_verdict_on_cuda_compares_ours_with_16_mixed(parameters, speedup, gib, said):
    ours = FIGURES | {"precision": "O2-fp16", "parameters": parameters, "speedup": speedup}
    rows = [ours | {"peak_bytes": gib * 2**30}, FIGURES | {"parameters": parameters}]
    losses, *verdicts = verdict_of(rows)
    assert losses == "Final losses are within 0.10% of those of 32-true."
    assert verdicts == [f"O2-fp16, fused: {each}." for each in said]


def test_verdict_without_base_or_rows_is_none():
    ours = FIGURES | {"precision": "O2-fp16", "speedup": None, "loss_difference": None}
    assert [*verdict_of([ours])] == [*verdict_of([])] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--size", "XXL"], "invalid choice: 'XXL'"),
        (["--batch", "0"], "0 is not a positive integer"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_unusable_argument_is_refused(arguments, said, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*QUICK, *arguments, "--csv", str(tmp_path / "new.csv")])
    assert said in capsys.readouterr().err
