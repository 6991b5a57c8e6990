"""Tables and verdicts, from figures that are made up."""

from dataclasses import replace

import pytest

from benchmarks._common import CsvTable
from benchmarks._report import Row, table_of, verdict_of
from benchmarks.contrastive_loss import DEFAULT_CSV, ROOT

MIB = 2**20
FACTS = dict.fromkeys(("device_name", "threads", "python", "torch", "triton", "lightning_mp"), "?")
# 4 b D bytes are 64 MiB, so bf16 gradients are as much.
OURS = Row(
    date="",
    contender="ours, triton tiles",
    batch=32768,
    width=512,
    dtype="bf16",
    scale=100.0,
    device="cuda",
    repeats=7,
    ms_median=10.0,
    ms_min=9.5,
    ms_max=12.0,
    time_ratio=1.0,
    gflops=560e3,
    gemm_gflops=700e3,
    gemm_fraction=0.8,
    peak_extra_bytes=7 * 64 * MIB,
    max_relative_difference=0.0,
    **FACTS,
)
INF_CL = replace(
    OURS, contender="Inf-CL, fp32 inputs", ms_median=120.0, time_ratio=12.0, peak_extra_bytes=None
)
ROUNDED = replace(INF_CL, contender="Inf-CL, bf16-rounded inputs", time_ratio=11.0)


def test_cuda_verdict_tells_every_target_apart():
    assert verdict_of([OURS, INF_CL, ROUNDED]) == (
        "Ours, triton tiles, reach 80% of the matmul rate of 700 TFLOP/s (target: 70%): met; are "
        "11.0x as fast as Inf-CL, bf16-rounded inputs (target: 10x): met; need 8.0 x 4bD bytes "
        "beyond the inputs, gradients included (target: 8): met."
    )


@pytest.mark.parametrize(
    ("ours", "peer", "expected"),
    [
        ({"gemm_fraction": 0.69}, {}, ["missed", "met", "met"]),
        ({}, {"time_ratio": 9.9}, ["met", "missed", "met"]),
        ({"peak_extra_bytes": 7 * 64 * MIB + 10 * MIB}, {}, ["met", "met", "missed"]),
        # fp32 gradients take twice as much.
        ({"dtype": "fp32"}, {}, ["met", "met", "missed"]),
        ({"peak_extra_bytes": None}, {}, ["met", "met", "open"]),
    ],
)
def test_cuda_verdict_follows_from_the_figures(ours, peer, expected):
    said = verdict_of([replace(OURS, **ours), replace(INF_CL, **peer)])
    assert [finding.rpartition(": ")[2].rstrip(".") for finding in said.split(";")] == expected


def test_cuda_verdict_without_inf_cl_says_why():
    said = verdict_of([OURS], {"dense": "too large", "Inf-CL, fp32 inputs": "predicted 9.0 s"})
    assert "are not compared with Inf-CL (predicted 9.0 s): open" in said
    assert "are not compared with Inf-CL (it did not run): open" in verdict_of([OURS])


def test_cuda_table_has_tflops_and_memory_in_units_of_features():
    header, _, ours, peer = table_of([OURS, INF_CL]).splitlines()
    assert "TFLOP/s" in header
    assert ours.split("  ")[0] == OURS.contender
    assert ours.split()[-6:] == ["1.00", "560", "80%", "448.0", "7.0", "1.0"]
    assert peer.split()[-3:] == ["-", "-", "-"]


def test_cpu_table_stays_in_gflops():
    assert "GFLOP/s" in table_of([replace(OURS, device="cpu")])


def test_committed_figures_can_be_appended_to():
    path = ROOT / DEFAULT_CSV
    assert path.exists()
    CsvTable(path, list(Row.__annotations__))
