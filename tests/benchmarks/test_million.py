"""The pass over a million pairs at toy size, and that its checks see what is wrong."""

import math

import pytest
import torch

from benchmarks import million
from benchmarks._contenders import find_ours
from benchmarks._float64 import errors_of, log_sum_exps, theory_loss
from benchmarks._inputs import Case, Inputs
from benchmarks.million import main, problems_of
from tests.benchmarks.rehearsing import QUICK, read

CASE = Case(batch=97, width=24, dtype="fp32", scale=20.0, device="cpu")

Pass = tuple[Inputs, float, list[torch.Tensor]]


@pytest.fixture
def toy_pass() -> Pass:
    """Inputs with gradients, the loss, and the log-sum-exps."""
    ours, inputs = find_ours(CASE.width, torch.float32, CASE.place)[0][0], CASE.inputs()
    loss = ours.loss(*inputs.leaves)
    lses = [lse.clone() for lse in log_sum_exps(loss, CASE.batch)]
    loss.backward()
    return inputs, float(loss.detach()), lses


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_quick_run_passes_its_checks_and_writes_its_row_once(dtype, tmp_path, capsys):
    path = tmp_path / "million.csv"
    for _ in range(2):
        assert main([*QUICK, "--dtype", dtype, "--csv", str(path)]) == 0
    (row,) = read(path)
    assert row["contender"] == "ours, torch tiles"
    flop = 4 * 2 * int(row["batch"]) ** 2 * int(row["width"])
    assert math.isclose(float(row["tflops"]), flop / float(row["seconds"]) / 1e12)
    assert 0 < float(row["backward_seconds"]) < float(row["seconds"])
    assert row["peak_extra_bytes"] == ""
    assert 0 <= float(row["term_error"]) < 1e-5
    assert "Wrong" not in capsys.readouterr().out


@pytest.mark.parametrize("chunk_rows", [10, 97, 1000])
def test_float64_agrees_with_a_right_pass(toy_pass, chunk_rows):
    assert max(errors_of(*toy_pass, CASE.batch, chunk_rows).values()) < 5e-6


def test_float64_sees_one_wrong_gradient(toy_pass):
    toy_pass[0].text_bD.grad[13] *= 1.01
    errors = errors_of(*toy_pass, CASE.batch)
    assert math.isclose(errors["text_gradient_error"], 0.01, rel_tol=1e-3)
    assert errors["image_gradient_error"] < 5e-6


@pytest.mark.parametrize("side", [0, 1])
def test_float64_sees_one_wrong_log_sum_exp(toy_pass, side):
    toy_pass[2][side][13] += 0.01
    errors = errors_of(*toy_pass, CASE.batch)
    assert math.isclose(errors["term_error"], 0.01, rel_tol=1e-3)
    assert errors["mean_error"] > 1e-6


def test_float64_sees_a_wrong_loss(toy_pass):
    inputs, loss, lses = toy_pass
    errors = errors_of(inputs, 1.001 * loss, lses, 4)
    assert math.isclose(errors["mean_error"], 1e-3, rel_tol=1e-3)


def test_every_figure_that_is_off_is_named_and_fails_the_run(monkeypatch, capsys):
    real = million.run_once

    def run_once(*args):
        return real(*args) | {"term_error": math.nan, "theory_error": 1.0, "mean_error": 1.0}

    monkeypatch.setattr(million, "run_once", run_once)
    assert main(QUICK) == 1
    said = capsys.readouterr().out
    assert "Wrong: term error is nan, more than 5e-04." in said
    assert said.count("Wrong: ") == 3
    found = dict.fromkeys(("term_error", "mean_error", "theory_error"), 0.0)
    found |= {"image_gradient_error": 0.005, "text_gradient_error": 0.005}
    assert problems_of(found, "bf16") == []
    assert len(problems_of(found, "fp16")) == 2


@pytest.mark.slow
def test_theory_is_the_mean_over_many_negatives():
    inputs = Inputs.make(4000, 8, torch.float64, 6.0, torch.device("cpu"))
    logits = 6.0 * inputs.image_bD.detach() @ inputs.text_bD.detach().T
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(4000))
    assert math.isclose(theory_loss(inputs, chunk_rows=999), float(loss), rel_tol=2e-3)


def test_log_sum_exps_of_another_loss_are_refused():
    features = torch.ones(5, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="keeps 0 vectors of length 5"):
        log_sum_exps((features * 2).sum(), 5)


@pytest.mark.parametrize("arguments", [["--batch", "1"], ["--scale", "0"]])
def test_unusable_argument_is_refused(arguments):
    with pytest.raises(SystemExit, match="2 or more, --scale positive"):
        main([*QUICK, *arguments])
