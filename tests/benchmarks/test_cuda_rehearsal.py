"""The CUDA branches of the benchmark, run with CPU tensors: contenders, memory, verdicts."""

import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks import _contenders
from benchmarks._contenders import Case, autocast_formula, dense_formula
from benchmarks.contrastive_loss import main
from tests.benchmarks.rehearsing import read
from tests.reference.contrastive import relative_error

CPU = torch.device("cpu")
GIB = 2**30


class _CudaTensorsOnCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = CPU
        return func(*args, **kwargs)


class FakeInfCL:
    """A dense version of Inf-CL's function that records its images."""

    def __init__(self) -> None:
        self.images: list[torch.Tensor] = []

    def cal_flash_loss(self, q, k, scale, head_dim):
        self.images.append(q.detach().clone())
        assert q.shape[1] % head_dim == 0
        logits = (scale * q) @ k.T
        return logits.logsumexp(1) - logits.diagonal()


@pytest.fixture
def inf_cl(monkeypatch) -> FakeInfCL:
    fake = FakeInfCL()
    module = SimpleNamespace(cal_flash_loss=fake.cal_flash_loss)
    monkeypatch.setitem(sys.modules, "inf_cl", module)
    return fake


@pytest.fixture
def cuda(monkeypatch) -> Counter:
    """Simulate a GPU on which every forward and backward takes 8 GiB."""
    calls: Counter = Counter()
    real_generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda *_: real_generator())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 11 * GIB)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)  # for torch's timer
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.accelerator, name, lambda *_, name=name: calls.update([name]))
    monkeypatch.setattr("triton.testing.do_bench", lambda step, **_: step() and 0.1 or 0.1)
    with _CudaTensorsOnCpu():
        yield calls


def run(tmp_path, *arguments: str) -> list[dict[str, str]]:
    path = tmp_path / "figures.csv"
    common = ["--quick", "--device", "cuda", "--repeats", "1", "--threads", "1", "--width", "32"]
    assert main([*common, "--csv", str(path), *arguments]) == 0
    return read(path)


@pytest.mark.slow
def test_all_contenders_run_in_bf16(cuda, inf_cl, tmp_path, capsys):
    rows = run(tmp_path, "--dtype", "bf16", "--batch", "128")
    names = [row["contender"] for row in rows if row["contender"] != "torch chunked"]
    assert names == [
        "ours, torch tiles",
        "dense, formula, bf16 autocast",
        "Inf-CL",
    ]
    for row in rows:
        width = 4 if row["contender"].startswith("Inf-CL") else 2
        assert int(row["peak_extra_bytes"]) == 8 * GIB - (2 * 128 * 32 * width + 4)
    said = capsys.readouterr().out
    assert "Left out: dense, formula: trains under autocast" in said
    assert "x as fast as Inf-CL" in said
    assert "x 4bD bytes with gradients (target: 8): missed" in said
    assert cuda["reset_peak_memory_stats"] == len(rows)


@pytest.mark.slow
def test_fp32_features_add_the_plain_dense_loss(cuda, inf_cl, tmp_path):
    rows = run(tmp_path, "--dtype", "fp32", "--batch", "128")
    errors = {row["contender"]: float(row["max_relative_difference"]) for row in rows}
    assert errors["dense, formula"] < 1e-4 < errors["dense, formula, bf16 autocast"]


@pytest.mark.slow
def test_inf_cl_gets_the_same_values_in_fp32(cuda, inf_cl, tmp_path):
    run(tmp_path, "--dtype", "bf16", "--batch", "64")
    assert inf_cl.images
    for image in inf_cl.images:
        assert image.dtype == torch.float32
        assert torch.equal(image, image.bfloat16().float())


@pytest.mark.parametrize(
    ("batch", "width", "reason"),
    [(128, 24, "multiple of 16"), (100, 32, "multiple of 64"), (128, 32, None)],
)
def test_inf_cl_is_left_out_where_its_kernels_are_wrong(inf_cl, batch, width, reason):
    case = Case(batch, width, "fp32", 1.0, torch.device("cuda"))
    if reason is None:
        assert _contenders._inf_cl(case)
        return
    with pytest.raises(ValueError, match=reason):
        _contenders._inf_cl(case)


def test_autocast_multiplies_in_bf16_and_keeps_the_loss_in_fp32():
    inputs = Case(96, 32, "fp32", 50.0, CPU).inputs()
    exact, gradient = inputs.run(dense_formula), inputs.image_bD.grad
    mixed = inputs.run(autocast_formula)
    assert mixed.dtype == torch.float32
    assert 1e-6 < relative_error(mixed, exact) < 1e-2
    assert 1e-4 < relative_error(inputs.image_bD.grad, gradient) < 0.1
