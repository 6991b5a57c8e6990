"""The benchmark at toy size: that it runs, agrees and writes what it says. Never how fast."""

import csv
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import contrastive_loss
from benchmarks._contenders import Contender, dense_formula, find_contenders
from benchmarks._inputs import DTYPES, Case, Inputs, unit_pairs
from benchmarks._report import Row, verdict_of
from benchmarks.contrastive_loss import check, main

CPU = torch.device("cpu")
QUICK = ["--quick", "--device", "cpu", "--repeats", "1", "--threads", "1"]
CASE = Case(batch=48, width=24, dtype="fp32", scale=20.0, device="cpu")


@pytest.fixture(scope="module", autouse=True)
def _number_of_threads_survives():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> Path:
    """Two runs into one file."""
    path = tmp_path_factory.mktemp("results") / "new" / "figures.csv"
    for _ in range(2):
        assert main([*QUICK, "--no-memory", "--csv", str(path)]) == 0
    return path


def test_second_run_takes_the_place_of_the_first(rehearsal):
    lines = rehearsal.read_text().splitlines()
    assert lines[0] == ",".join(Row.__annotations__)
    assert lines.count(lines[0]) == 1
    names = [row["contender"] for row in read(rehearsal)]
    assert len(names) == len(set(names))
    assert names[0].startswith("ours")
    assert any(name.startswith("dense") for name in names)


def test_figures_are_positive_and_consistent(rehearsal):
    for row in read(rehearsal):
        low, median, high = (float(row[f"ms_{name}"]) for name in ("min", "median", "max"))
        assert 0 < low <= median <= high
        assert float(row["time_ratio"]) > 0
        assert float(row["gemm_gflops"]) > 0
        flop = 4 * 2 * int(row["batch"]) ** 2 * int(row["width"])
        assert math.isclose(float(row["gflops"]), flop / median / 1e6, rel_tol=1e-6)
        fraction = float(row["gflops"]) / float(row["gemm_gflops"])
        assert math.isclose(float(row["gemm_fraction"]), fraction, rel_tol=1e-6)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.slow  # in a process of its own
def test_memory_is_measured_unless_refused(rehearsal, tmp_path):
    path = tmp_path / "figures.csv"
    assert main([*QUICK, "--csv", str(path)]) == 0
    assert all(0 < int(row["peak_extra_bytes"]) < 2**30 for row in read(path))
    assert [row["contender"] for row in read(path)] == [r["contender"] for r in read(rehearsal)]
    assert all(row["peak_extra_bytes"] == "" for row in read(rehearsal))


def test_rows_name_chip_and_versions_but_no_place(rehearsal):
    for row in read(rehearsal):
        assert row["device_name"]
        assert row["torch"] == str(torch.__version__)
        assert row["threads"] == "1"
        assert not any(value.startswith("/") for value in row.values())


def test_file_with_another_header_is_refused_and_left_alone(tmp_path, capsys):
    path = tmp_path / "other.csv"
    path.write_text("name,seconds\nold,1\n")
    with pytest.raises(SystemExit, match="2"):
        main([*QUICK, "--csv", str(path)])
    message = capsys.readouterr().err
    assert "'name,seconds'" in message
    assert "Pass another path" in message
    assert path.read_text() == "name,seconds\nold,1\n"


@pytest.mark.parametrize(
    "arguments", [["--batch", "0"], ["--device", "abacus"], ["--max-seconds", "inf"]]
)
def test_unusable_argument_is_refused(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*QUICK, *arguments, "--csv", str(tmp_path / "new.csv")])
    assert arguments[1] in capsys.readouterr().err


def test_quick_run_without_path_writes_nothing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main([*QUICK, "--no-memory"]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_widths_dtypes_and_batches_are_all_measured(tmp_path):
    path = tmp_path / "figures.csv"
    sizes = ["--batch", "96", "64", "--width", "8", "16", "--dtype", "fp32", "fp16"]
    assert main([*QUICK, "--no-memory", "--only", "nobody", *sizes, "--csv", str(path)]) == 0
    problems = [(int(row["width"]), row["dtype"], int(row["batch"])) for row in read(path)]
    assert problems == list(itertools.product([8, 16], ["fp32", "fp16"], [64, 96]))
    assert {row["contender"] for row in read(path)} == {"ours, torch tiles"}


def test_slow_contender_is_left_out_with_its_prediction(tmp_path, capsys):
    path = tmp_path / "figures.csv"
    arguments = ["--no-memory", "--only", "dense", "--max-seconds", "1e-9", "--csv", str(path)]
    assert main([*QUICK, *arguments]) == 0
    assert [row["contender"].partition(",")[0] for row in read(path)] == ["ours"]
    assert "left out: dense, formula: predicted " in capsys.readouterr().out
    assert [row["repeats"] for row in read(path)] == ["1"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_contenders_agree_at_odd_sizes(dtype):
    case = replace(CASE, batch=67, width=40, dtype=dtype, scale=100.0)
    contenders, _ = find_contenders(67, 40, DTYPES[dtype], CPU)
    differences, failures = check(contenders, case)
    assert failures == {}
    assert set(differences) == {contender.name for contender in contenders}


def test_dense_formula_equals_float64_by_hand():
    inputs = Inputs.make(31, 16, torch.float64, 50.0, CPU)
    loss = inputs.run(dense_formula)
    logits = 50.0 * inputs.image_bD.detach() @ inputs.text_bD.detach().T
    by_hand = (logits.logsumexp(0) + logits.logsumexp(1)).mean() / 2 - logits.diagonal().mean()
    torch.testing.assert_close(loss, by_hand, rtol=1e-12, atol=0)


def test_wrong_contender_is_named_and_left_out():
    contenders, _ = find_contenders(48, 24, torch.float32, CPU)
    half = Contender("half a loss", lambda image, text, s: 0.5 * dense_formula(image, text, s))
    differences, failures = check([contenders[0], half], CASE)
    assert list(differences) == [contenders[0].name]
    assert "differs from ours by 5.0e-01" in failures["half a loss"]


def test_contender_that_fails_is_named_and_left_out():
    def fail(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel for this. Details follow.")

    contenders, _ = find_contenders(48, 24, torch.float32, CPU)
    _, failures = check([contenders[0], Contender("broken", fail)], CASE)
    assert failures == {"broken": "RuntimeError: no kernel for this"}


def test_ours_that_fails_makes_way_for_ours_that_runs():
    def fail(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel for this. Details follow.")

    contenders, _ = find_contenders(48, 24, torch.float32, CPU)
    broken = Contender("ours, broken", fail, is_ours=True)
    differences, failures = check([broken, *contenders], CASE)
    assert next(iter(differences)) == contenders[0].name
    assert failures == {"ours, broken": "RuntimeError: no kernel for this"}
    with pytest.raises(RuntimeError, match="None of this package's losses ran"):
        check([broken, Contender("dense", dense_formula)], CASE)


def test_nan_does_not_agree():
    contenders, _ = find_contenders(48, 24, torch.float32, CPU)
    # The loss is right; only the gradient of the texts is not.
    spoilt = Contender("spoilt", lambda i, t, s: dense_formula(i, t, s) + _nan_gradient(t))
    _, failures = check([contenders[0], spoilt], CASE)
    assert "differs from ours by nan" in failures["spoilt"]


def _nan_gradient(text: torch.Tensor) -> torch.Tensor:
    return (text - text.detach()).abs().sqrt().sum()


def test_features_of_many_chunks_are_units_with_their_cosine():
    chunked = unit_pairs(1000, 256, torch.float32, CPU, chunk_rows=300)
    for features in chunked:
        torch.testing.assert_close(features.norm(dim=1), torch.ones(1000))
        assert len(features.unique(dim=0)) == 1000
    assert abs((chunked[0] * chunked[1]).sum(1).mean() - 0.2) < 0.01


def test_dense_without_room_is_skipped_with_its_need(monkeypatch):
    monkeypatch.setattr("benchmarks._contenders._free_bytes", lambda device: 2**30)
    contenders, skipped = find_contenders(2**20, 32, torch.float32, CPU)
    assert not any(contender.name.startswith("dense") for contender in contenders)
    assert skipped["dense"] == "would need 20,480.0 GiB; 1.0 GiB are free"


def test_verdict_follows_from_the_figures(rehearsal):
    kinds = Row.__annotations__
    ours, dense = (
        Row(**{key: _parse(kinds[key], value) for key, value in row.items()})
        for row in read(rehearsal)[:2]
    )
    ours = replace(ours, peak_extra_bytes=10 * 2**20)
    dense = replace(dense, time_ratio=1.5, peak_extra_bytes=100 * 2**20)
    said = verdict_of([ours, dense])
    assert "1.50x as fast as the dense formula, with 10.0% of its extra memory" in said
    assert said.endswith(": met.")
    assert verdict_of([ours, replace(dense, time_ratio=1.3)]).endswith(": missed.")
    assert verdict_of([ours]).endswith("the dense formula did not run.")


def _parse(kind: str, value: str) -> object:
    return {"str": str, "int": int, "float": float}.get(kind, lambda text: text or None)(value)


def test_every_option_has_its_default_in_the_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "(default: [8192])" in said
    assert str(contrastive_loss.DEFAULT_CSV) in said
