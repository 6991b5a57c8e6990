"""Run every benchmark once at toy size: what fails here will fail at full size.

    python benchmarks/smoke.py

The suite gives it a minute on a GPU: imports take 6 s on a slow core, kernels that were not
compiled ahead 17 s, and everything else 15 s. fp16, which compiles as bf16 does, and AdamW's
foreach kernels are left out for that reason. The loss in bf16 includes every kernel of both sweeps
and cuBLAS' product of 16-bit operands in fp32 (`torch.addmm(out_dtype=...)`). Without Lightning the
loss runs alone.
"""

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BENCHMARKS = {
    "contrastive_loss": ("--dtype", "bf16", "fp32"),
    "optimizer_step": (),
    "precision": ("--rounds", "1", "--steps", "2", "--optimizers", "fused", "safe"),
    "monitor_overhead": ("--pairs", "1"),
}
# Packages that the loss does not need.
OPTIONAL = {"lightning", "torchmetrics", "tqdm"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks; the exit status is 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N")
    device = parser.parse_args(argv).device
    failed = []
    for name, arguments in BENCHMARKS.items():
        print(f"-- {name}", flush=True)
        try:
            benchmark = importlib.import_module(f"benchmarks.{name}")
            status = benchmark.main(["--quick", "--device", device, *arguments])
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
            print(f"Left out: {name} needs the package {error.name!r}.")
            continue
        except Exception:
            traceback.print_exc()
            status = 1
        if status != 0:
            failed.append(name)
    print(f"Failed: {', '.join(failed)}." if failed else "Every benchmark that ran has passed.")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
