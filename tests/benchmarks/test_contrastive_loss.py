"""The benchmark of losses runs at toy size, checks its results and writes its figures."""

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import _common as common
from benchmarks._contenders import (
    Case,
    Contender,
    dense_formula,
    find_contenders,
    sigmoid_formula,
)
from benchmarks.contrastive_loss import check, extra_bytes, main, too_slow, verdict_of
from tests.benchmarks.rehearsing import QUICK, read
from tests.reference.contrastive import dense_sigmoid_loss, relative_error

CPU = torch.device("cpu")
ONCE = [*QUICK, "--repeats", "1"]
CASE = Case(batch=48, width=24, dtype="fp32", scale=20.0, device=CPU)
DENSE = Contender("dense", dense_formula)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> Path:
    """Return the CSV file of two runs."""
    path = tmp_path_factory.mktemp("results") / "new" / "figures.csv"
    for _ in range(2):
        assert main([*ONCE, "--workspace", "2", "--csv", str(path)]) == 0
    return path


@pytest.mark.slow
def test_second_run_replaces_the_first(rehearsal):
    names = [row["contender"] for row in read(rehearsal)]
    assert len(names) == len(set(names))
    assert names[:3] == ["ours, torch tiles", "ours, torch tiles, 2 MiB", "dense, formula"]


@pytest.mark.slow
def test_figures_are_positive_and_consistent(rehearsal):
    for row in read(rehearsal):
        low, median, high = (float(row[f"ms_{name}"]) for name in ("min", "median", "max"))
        assert 0 < low <= median <= high
        assert float(row["time_ratio"]) > 0
        flop = 4 * 2 * int(row["batch"]) ** 2 * int(row["width"])
        assert math.isclose(float(row["gflops"]), flop / median / 1e6, rel_tol=1e-6)
        fraction = float(row["gflops"]) / float(row["gemm_gflops"])
        assert math.isclose(float(row["gemm_fraction"]), fraction, rel_tol=1e-6)
        features = float(row["peak_features"]) * 4 * int(row["batch"]) * int(row["width"])
        assert math.isclose(features, int(row["peak_extra_bytes"]))


@pytest.mark.slow
def test_rows_name_chip_and_versions_but_no_place(rehearsal):
    for row in read(rehearsal):
        assert row["device_name"]
        assert row["torch"].partition("+")[0] == str(torch.__version__).partition("+")[0]
        assert row["threads"] == "1"
        assert not any(value.startswith("/") for value in row.values())


def test_dense_holds_four_matrices_of_logits():
    """These are two matrices of logits and two log-softmaxes; gradients reuse freed memory."""
    case = replace(CASE, batch=512, width=8)
    matrices = (extra_bytes(DENSE, case) or 0) / (4 * case.batch**2)
    assert 4 <= matrices < 4.1


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--device", "abacus"]])
def test_unusable_argument_is_refused(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*ONCE, *arguments, "--csv", str(tmp_path / "new.csv")])
    assert arguments[1] in capsys.readouterr().err


def test_quick_run_without_path_writes_nothing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main([*ONCE, "--batch", "64"]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_widths_dtypes_and_batches_are_all_measured(tmp_path):
    path = tmp_path / "figures.csv"
    sizes = ["--batch", "96", "64", "--width", "8", "16", "--dtype", "fp32", "fp16"]
    assert main([*ONCE, *sizes, "--csv", str(path)]) == 0
    ours = [row for row in read(path) if row["contender"] == "ours, torch tiles"]
    problems = [(int(row["width"]), row["dtype"], int(row["batch"])) for row in ours]
    assert problems == list(itertools.product([8, 16], ["fp32", "fp16"], [96, 64]))


def test_slow_contender_is_left_out_with_its_prediction(tmp_path, capsys):
    path = tmp_path / "figures.csv"
    assert main([*ONCE, "--max-seconds", "1e-9", "--csv", str(path)]) == 0
    (row,) = read(path)
    assert row["contender"] == "ours, torch tiles"
    assert "Left out: dense, formula: predicted " in capsys.readouterr().out


def test_time_is_predicted_by_the_square_of_the_batch(monkeypatch):
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(
        common, "time_in_turn", lambda steps, *_: asked.append(steps) or ({"": [0.5]}, {})
    )
    case = replace(CASE, batch=4096)
    assert too_slow(DENSE, case, 32.1) is None
    assert too_slow(DENSE, case, 31.9) == "predicted 32.0 s a call, more than 31.9 s"
    assert too_slow(DENSE, case, None) is None
    assert len(asked[0][""].func.__self__.image_bD) == 512  # an eighth of the batch


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_contenders_agree_at_odd_sizes(dtype, objective):
    case = Case(67, 40, dtype, 10.0 if objective == "sigmoid" else 100.0, CPU, objective)
    contenders, _ = find_contenders(case)
    assert {contender.is_ours for contender in contenders} == {True, False}
    differences, failures = check(contenders, case)
    assert failures == {}
    assert set(differences) == {contender.name for contender in contenders}


def test_dense_formula_equals_float64_by_hand():
    inputs = Case(31, 16, "fp32", 50.0, CPU).inputs(torch.float64)
    loss = inputs.run(dense_formula)
    logits = 50.0 * inputs.image_bD.detach() @ inputs.text_bD.detach().T
    by_hand = (logits.logsumexp(0) + logits.logsumexp(1)).mean() / 2 - logits.diagonal().mean()
    torch.testing.assert_close(loss, by_hand, rtol=1e-12, atol=0)


def test_wrong_contender_is_named_and_left_out():
    contenders, _ = find_contenders(CASE)
    half = Contender("half a loss", lambda image, text, s: 0.5 * dense_formula(image, text, s))
    # Only the gradient of the texts is wrong, not the loss.
    spoilt = Contender("spoilt", lambda i, t, s: dense_formula(i, t, s) + _nan_gradient(t))
    differences, failures = check([contenders[0], half, spoilt], CASE)
    assert list(differences) == [contenders[0].name]
    assert "differs from ours by 5.0e-01" in failures["half a loss"]
    assert "differs from ours by nan" in failures["spoilt"]


def _nan_gradient(text: torch.Tensor) -> torch.Tensor:
    return (text - text.detach()).abs().sqrt().sum()


def test_failing_loss_of_this_package_is_replaced_by_one_that_runs():
    def fail(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel for this. Details follow.")

    contenders, _ = find_contenders(CASE)
    broken = Contender("ours, broken", fail, is_ours=True)
    differences, failures = check([broken, *contenders], CASE)
    assert next(iter(differences)) == contenders[0].name
    assert failures == {"ours, broken": "failed: RuntimeError: no kernel for this"}
    with pytest.raises(RuntimeError, match="None of this package's losses ran"):
        check([broken, DENSE], CASE)


def test_features_are_units_with_their_cosine():
    image, text, _ = Case(1000, 256, "fp32", 1.0, CPU).inputs().leaves
    for features in (image, text):
        torch.testing.assert_close(features.norm(dim=1), torch.ones(1000))
        assert len(features.unique(dim=0)) == 1000
    assert abs((image * text).sum(1).mean() - 0.2) < 0.01


def test_dense_without_room_is_skipped_with_its_need():
    contenders, skipped = find_contenders(replace(CASE, batch=2**20))
    assert not any(contender.name.startswith("dense") for contender in contenders)
    assert skipped["dense, formula"].startswith("needs 20,480.0 of ")


@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_sigmoid_formula_equals_that_of_open_clip(blocks):
    image, text = (torch.randn(23, 6, dtype=torch.float64) for _ in range(2))
    scale, bias = torch.tensor(2.0).double(), torch.tensor(-3.0).double()
    right = dense_sigmoid_loss(image, text, scale, bias)
    # The formula sums blocks in fp32.
    assert relative_error(sigmoid_formula(image, text, scale, bias, blocks), right) < 1e-6


def test_sigmoid_contenders_train_their_bias_and_are_written_to_the_file(tmp_path, capsys):
    path = tmp_path / "figures.csv"
    assert main([*ONCE, "--objective", "sigmoid", "--scale", "10", "--csv", str(path)]) == 0
    rows = read(path)
    names = ["ours, torch tiles", "open_clip's formula", "the same in 8 blocks"]
    assert [row["contender"] for row in rows] == names
    assert {row["objective"] for row in rows} == {"sigmoid"}
    assert all(int(row["peak_extra_bytes"]) > 0 for row in rows)
    assert "siglip-kernel: is for CUDA only" in capsys.readouterr().out
    case = replace(CASE, objective="sigmoid")
    for contender in find_contenders(case)[0]:
        cells = [cell.cell_contents for cell in contender.loss.__closure__]
        (bias,) = (value for value in cells if isinstance(value, torch.Tensor))
        bias.grad = None
        case.inputs().run(contender.loss)
        assert bias.grad != 0


def test_loss_that_is_off_float64_fails_the_run(monkeypatch, capsys):
    wrong = {"term_error": 0.0, "mean_error": 0.1, "gradient_error": 0.0}
    monkeypatch.setattr("benchmarks.contrastive_loss.sampled_errors", lambda *_: wrong)
    assert main([*ONCE, "--batch", "64"]) == 1
    assert "Wrong: mean error is 1.0e-01, more than 1e-05." in capsys.readouterr().out


OURS = {"contender": "ours", "dtype": "bf16", "device": torch.device("cuda"), "time_ratio": 1.0}
OURS |= {"gemm_fraction": 0.75, "peak_features": 6.5, "objective": "softmax"}


def test_verdict_on_cuda_has_three_targets():
    assert list(verdict_of([OURS, OURS | {"contender": "Inf-CL", "time_ratio": 9.0}])) == [
        "9.00x as fast as Inf-CL (target: 10x): missed.",
        "75% of GEMM (target: 70%): met.",
        "7.5 x 4bD bytes with gradients (target: 8): met.",
    ]
    assert len([*verdict_of([OURS])]) == 2


def test_verdict_on_a_cpu_is_against_the_dense_formula():
    ours = OURS | {"device": CPU}
    dense = ours | {"contender": "dense, formula", "time_ratio": 1.5}
    assert [*verdict_of([ours, dense])] == ["1.50x as fast as dense (target: 1.4x): met."]


@pytest.mark.slow
def test_torch_and_triton_are_all_that_it_needs(tmp_path: Path) -> None:
    code = (
        "import sys, runpy\n"
        "for name in ('lightning', 'torchmetrics', 'tqdm', 'yaml', 'jsonargparse'):\n"
        "    sys.modules[name] = None\n"  # makes an import raise ImportError
        f"sys.argv = ['x', '--quick', '--device', 'cpu', '--csv', {str(tmp_path / 'rows.csv')!r}]\n"
        "runpy.run_path('benchmarks/contrastive_loss.py', run_name='__main__')\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert "ours, torch tiles" in done.stdout, done.stderr
    assert (tmp_path / "rows.csv").exists()
