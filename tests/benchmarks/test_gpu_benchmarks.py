"""Every benchmark once at toy size on a GPU: what does not run here will not run at full size.

It has a minute: on a slow core imports take 6 s, kernels that nobody compiled ahead 17 s, and all
else 15 s. So fp16, which compiles as bf16 does, and AdamW as foreach kernels have no turn.
"""

import importlib

import pytest

BENCHMARKS = {
    "contrastive_loss": ("--dtype", "bf16", "fp32"),
    "optimizer_step": (),
    "precision": ("--rounds", "1", "--steps", "2", "--optimizers", "fused", "safe"),
    "monitor_overhead": ("--pairs", "1"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_runs_at_toy_size(name: str) -> None:
    main = importlib.import_module(f"benchmarks.{name}").main
    assert main(["--quick", "--device", "cuda", *BENCHMARKS[name]]) == 0
