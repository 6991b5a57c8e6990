"""Every benchmark once at toy size on a GPU: what does not run here will not run at full size."""

import importlib

import pytest

DTYPES = "--dtype", "bf16", "fp16", "fp32"
BENCHMARKS = {
    "contrastive_loss": DTYPES,
    "optimizer_step": (),
    "precision": ("--rounds", "1", "--steps", "2"),
    "monitor_overhead": ("--pairs", "1"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_runs_at_toy_size(name: str) -> None:
    main = importlib.import_module(f"benchmarks.{name}").main
    assert main(["--quick", "--device", "cuda", *BENCHMARKS[name]]) == 0
