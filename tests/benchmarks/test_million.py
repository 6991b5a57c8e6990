"""The pass over a million pairs at toy size, and that its checks see what is wrong."""

import csv
import math
from dataclasses import fields, replace

import pytest
import torch

from benchmarks import million
from benchmarks._contenders import find_ours
from benchmarks._float64 import Pass, errors_of, log_sum_exps, theory_loss
from benchmarks._inputs import Case, Inputs
from benchmarks.million import Row, main, run_once

CASE = Case(batch=97, width=24, dtype="fp32", scale=20.0, device="cpu")


@pytest.fixture(scope="module")
def toy_pass() -> Pass:
    found, _ = find_ours(CASE.width, torch.float32, CASE.place)
    return run_once(found[0], CASE)


def altered(result: Pass, **changes: object) -> Pass:
    """A copy whose inputs can be changed without the original noticing."""
    inputs = replace(result.inputs)
    inputs.image_bD, inputs.text_bD = (
        leaf.detach().clone().requires_grad_() for leaf in (inputs.image_bD, inputs.text_bD)
    )
    inputs.image_bD.grad = result.inputs.image_bD.grad.clone()
    inputs.text_bD.grad = result.inputs.text_bD.grad.clone()
    return replace(result, inputs=inputs, **changes)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_quick_run_passes_its_checks_and_writes_its_row_once(dtype, tmp_path, capsys):
    path = tmp_path / "million.csv"
    for _ in range(2):
        assert main(["--quick", "--device", "cpu", "--dtype", dtype, "--csv", str(path)]) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1
    assert list(rows[0]) == [field.name for field in fields(Row)]
    row = rows[0]
    assert row["contender"] == "ours, torch tiles"
    flop = 4 * 2 * int(row["batch"]) ** 2 * int(row["width"])
    seconds = float(row["forward_seconds"]) + float(row["backward_seconds"])
    assert math.isclose(float(row["seconds"]), seconds)
    assert math.isclose(float(row["tflops"]), flop / seconds / 1e12)
    assert row["peak_extra_bytes"] == ""
    assert 0 <= float(row["term_error"]) < 1e-5
    assert "Wrong" not in capsys.readouterr().out


@pytest.mark.parametrize("chunk_rows", [10, 97, 1000])
def test_float64_agrees_with_a_right_pass(toy_pass, chunk_rows):
    errors = errors_of(toy_pass, CASE.scale, CASE.batch, chunk_rows=chunk_rows)
    assert max(errors.term, errors.image_gradient, errors.text_gradient, errors.mean) < 5e-6


def test_float64_sees_one_wrong_gradient(toy_pass):
    wrong = altered(toy_pass)
    wrong.inputs.text_bD.grad[13] *= 1.01
    errors = errors_of(wrong, CASE.scale, CASE.batch)
    assert math.isclose(errors.text_gradient, 0.01, rel_tol=1e-3)
    assert errors.image_gradient < 5e-6


@pytest.mark.parametrize("side", ["row_lse_b", "column_lse_b"])
def test_float64_sees_one_wrong_log_sum_exp(toy_pass, side):
    vector = getattr(toy_pass, side).clone()
    vector[13] += 0.01
    errors = errors_of(altered(toy_pass, **{side: vector}), CASE.scale, CASE.batch)
    assert math.isclose(errors.term, 0.01, rel_tol=1e-3)
    assert errors.mean > 1e-6


def test_float64_sees_a_wrong_loss(toy_pass):
    wrong = altered(toy_pass, loss=1.001 * toy_pass.loss)
    assert math.isclose(errors_of(wrong, CASE.scale, 4).mean, 1e-3, rel_tol=1e-3)


def test_row_names_every_figure_that_is_off(tmp_path, monkeypatch, capsys):
    rows = []
    real = million.measure

    def measure(*args):
        rows.append(replace(real(*args), term_error=math.nan, loss=1e3, mean_error=1.0))
        return rows[0]

    monkeypatch.setattr(million, "measure", measure)
    assert main(["--quick", "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "Wrong: a sampled loss term is off by nan" in said
    assert "Wrong: the loss, from theory, is off by" in said
    assert len(rows[0].problems) == 3
    assert replace(rows[0], image_gradient_error=0.1, text_gradient_error=0.1).problems[1:3] == [
        "a sampled image gradient is off by 1.0e-01, more than 1e-02",
        "a sampled text gradient is off by 1.0e-01, more than 1e-02",
    ]


@pytest.mark.slow
def test_theory_is_the_mean_over_many_negatives():
    inputs = Inputs.make(4000, 8, torch.float64, 6.0, torch.device("cpu"))
    logits = 6.0 * inputs.image_bD.detach() @ inputs.text_bD.detach().T
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(4000))
    assert math.isclose(theory_loss(inputs, 6.0, chunk_rows=999), float(loss), rel_tol=2e-3)


def test_log_sum_exps_of_another_loss_are_refused():
    features = torch.ones(5, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="keeps 0 vectors of length 5"):
        log_sum_exps((features * 2).sum(), 5)


def test_quick_run_without_path_writes_nothing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["--quick", "--device", "cpu"]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--batch", "1"], ["--scale", "0"], ["--device", "abacus"]])
def test_unusable_argument_is_refused(arguments):
    with pytest.raises(SystemExit, match="2"):
        main(["--quick", *arguments])
