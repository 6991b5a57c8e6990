"""The comparison of a loss with float64 detects errors."""

import math

import pytest
import torch

from benchmarks._contenders import Case, Inputs, find_contenders
from benchmarks.contrastive_loss import errors_of, log_sum_exps, problems_of, sampled_errors

CASE = Case(batch=97, width=24, dtype="fp32", scale=20.0, device=torch.device("cpu"))

Pass = tuple[Inputs, float, list[torch.Tensor]]


@pytest.fixture
def toy_pass() -> Pass:
    """Return inputs with gradients, the loss, and the log-sum-exps."""
    ours, inputs = find_contenders(CASE)[0][0], CASE.inputs()
    loss = inputs.run(ours.loss)
    return inputs, float(loss), log_sum_exps(ours.loss, inputs)


def test_float64_reference_accepts_a_correct_pass(toy_pass):
    assert max(errors_of(*toy_pass, CASE.batch).values()) < 5e-6
    again = sampled_errors(CASE, find_contenders(CASE)[0][0])
    assert problems_of(again, "fp32") == []


@pytest.mark.parametrize("side", ["image_bD", "text_bD"])
def test_float64_reference_detects_one_wrong_gradient(toy_pass, side):
    getattr(toy_pass[0], side).grad[13] *= 1.01
    errors = errors_of(*toy_pass, CASE.batch)
    assert math.isclose(errors["gradient_error"], 0.01, rel_tol=1e-3)


@pytest.mark.parametrize("side", [0, 1])
def test_float64_reference_detects_one_wrong_log_sum_exp(toy_pass, side):
    toy_pass[2][side][13] += 0.01
    errors = errors_of(*toy_pass, CASE.batch)
    assert math.isclose(errors["term_error"], 0.01, rel_tol=1e-3)
    assert errors["mean_error"] > 1e-6


def test_float64_reference_detects_a_wrong_loss(toy_pass):
    inputs, loss, lses = toy_pass
    errors = errors_of(inputs, 1.001 * loss, lses, 4)
    assert math.isclose(errors["mean_error"], 1e-3, rel_tol=1e-3)


def test_every_figure_that_is_off_is_named():
    errors = {"term_error": math.nan, "mean_error": 1.0, "gradient_error": 0.005}
    wrong = ["Wrong: term error is nan, more than 5e-04."]
    wrong += ["Wrong: mean error is 1.0e+00, more than 1e-05."]
    assert problems_of(errors, "bf16") == wrong
    assert len(problems_of(errors, "fp16")) == 3
