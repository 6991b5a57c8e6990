"""The benchmark of optimizer steps runs at toy size and judges its contenders correctly."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from benchmarks import _common
from benchmarks.optimizer_step import (
    BASE,
    CONTENDERS,
    error_against_float64,
    main,
    shapes_of,
    verdict_of,
)
from tests.benchmarks.rehearsing import QUICK, read

ON_CPU = [
    name
    for name, contender in CONTENDERS.items()
    if not contender.needs_gpu
    and (not name.startswith("optimi") or importlib.util.find_spec("optimi") is not None)
]


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> Path:
    """Return the CSV file of a run of all contenders in one round, and of a run that appends."""
    path = tmp_path_factory.mktemp("results") / "new" / "figures.csv"
    assert main([*QUICK, "--rounds", "1", "--csv", str(path)]) == 0
    other = ["--contenders", "SafeAdamW foreach fp16", "--rounds", "2", "--csv", str(path)]
    assert main([*QUICK, *other, "--threads", "2"]) == 0
    return path


def test_rehearsal_ranks_every_contender_that_a_cpu_can_run(rehearsal):
    *rows, appended = read(rehearsal)
    assert sorted(row["contender"] for row in rows) == sorted(ON_CPU)
    times = [float(row["ms_median"]) for row in rows]
    assert times == sorted(times)
    assert (appended["contender"], appended["rounds"]) == ("SafeAdamW foreach fp16", "2")
    assert appended["speedup"] == ""  # the run has no `BASE`


def test_rehearsal_figures_are_consistent(rehearsal):
    rows = read(rehearsal)[:-1]
    by_name = {row["contender"]: row for row in rows}
    for row in rows:
        low, median, high = (float(row[f"ms_{name}"]) for name in ("min", "median", "max"))
        assert 0 < low <= median <= high
        moved = int(row["bytes_per_element"]) * int(row["parameters"])
        assert math.isclose(float(row["gb_per_second"]), moved / median / 1e6)
        fraction = float(row["gb_per_second"]) / float(row["copy_gb_per_second"])
        assert math.isclose(
            float(row["copy_fraction"]), fraction
        )  # exact, because there was one round
        ratio = float(by_name[BASE]["ms_median"]) / median
        assert math.isclose(float(row["speedup"]), ratio)
        assert int(row["tensors"]) == len(shapes_of("tiny"))
        assert not any(value.startswith("/") for value in row.values())


def test_bytes_are_those_of_all_tensors_read_and_written_once():
    bytes_of = {name: contender.bytes_per_element for name, contender in CONTENDERS.items()}
    # Weight, gradient and moments of 4 bytes: 4 read and 3 written.
    assert bytes_of[BASE] == bytes_of["SafeAdamW fused fp32"] == 7 * 4
    # Weight, residual and gradient of 2 bytes; moments of 4.
    assert bytes_of["SafeAdamW foreach fp16"] == bytes_of["SafeAdamW fused fp16"] == 5 * 2 + 4 * 4
    assert bytes_of["SafeAdamW fused fp32 clip"] == 9 * 4
    assert bytes_of["SafeAdamW fused fp16 clip"] == 6 * 2 + 5 * 4
    assert bytes_of["optimi fp32"] == 7 * 4
    assert bytes_of["optimi fp16"] == 9 * 2


@pytest.mark.parametrize("name", ON_CPU)
def test_contenders_compute_the_same_steps(name):
    assert error_against_float64(CONTENDERS[name], torch.device("cpu")) < 1e-3


def test_error_detects_another_learning_rate():
    wrong = CONTENDERS[BASE]._replace(make=lambda params: torch.optim.AdamW(params, lr=0.011))
    assert error_against_float64(wrong, torch.device("cpu")) > 0.05


def test_run_on_a_cpu_has_no_verdict_and_lists_missing_contenders(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = ["SafeAdamW fused fp32", "torch fused fp32"]
    assert main([*QUICK, "--contenders", *names, "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    assert "Left out: SafeAdamW fused fp32: needs a GPU." in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (
            lambda params: torch.optim.SGD(params, lr=1.0),
            1,
            "failed: ValueError: differs from float64 by",
        ),
        (lambda params: params[0].no_such_thing, 1, "failed: AttributeError"),
    ],
)
def test_wrong_contender_of_this_package_fails_the_run(
    change, status, said, monkeypatch, capsys, tmp_path
):
    name, path = "SafeAdamW foreach fp32", tmp_path / "figures.csv"
    monkeypatch.setitem(CONTENDERS, name, CONTENDERS[name]._replace(make=change))
    names = ["--contenders", name, "torch fused fp32"]
    assert main([*QUICK, *names, "--rounds", "1", "--csv", str(path)]) == status
    assert [row["contender"] for row in read(path)] == ["torch fused fp32"]
    assert f"Left out: {name}: {said}" in capsys.readouterr().out


def test_contender_without_room_is_skipped_with_its_reason(monkeypatch, capsys):
    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")

    name = "SafeAdamW foreach fp32"
    monkeypatch.setitem(CONTENDERS, name, CONTENDERS[name]._replace(make=no_room))
    assert main([*QUICK, "--contenders", name, "--rounds", "1"]) == 0
    assert f"Left out: {name}: {_common.OUT_OF_MEMORY}." in capsys.readouterr().out


def test_fused_steps_on_cuda_are_held_against_a_copy():
    name = "SafeAdamW fused fp16"
    assert verdict_of(name, 0.894) == f"{name}: 89% of a copy (target: 85%): met."
    assert verdict_of(name, 0.849).endswith("missed.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--size", "XXL"], "invalid choice: 'XXL'"),
        (["--contenders", "SGD"], "invalid choice: 'SGD'"),
        (["--rounds", "0"], "0 is not a positive integer"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_unusable_argument_is_refused(arguments, said, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*QUICK, *arguments, "--csv", str(tmp_path / "new.csv")])
    assert said in capsys.readouterr().err
