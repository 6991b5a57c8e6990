"""Every benchmark once at toy size, in one process and in less than a minute.

    python benchmarks/smoke.py --device cuda

What does not run here will not run at full size, and is found before an hour is spent.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

DTYPES = "--dtype", "bf16", "fp16", "fp32"
BENCHMARKS = {
    "contrastive_loss": ("--no-memory", *DTYPES),
    "million": (),
    "optimizer_step": (),
    "precision": ("--rounds", "1", "--steps", "2"),
    "monitor_overhead": ("--pairs", "1"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run them all; the exit status is 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--only", choices=BENCHMARKS, nargs="+", default=[*BENCHMARKS])
    args = parser.parse_args(argv)
    if torch.cuda.is_available():
        print(torch.cuda.get_device_properties(0), flush=True)
    failed = []
    for name in args.only:
        start = time.perf_counter()
        print(f"\n== {name}", flush=True)
        try:
            module = importlib.import_module(f"benchmarks.{name}")
            status = module.main(["--quick", "--device", args.device, *BENCHMARKS[name]])
        except Exception:
            traceback.print_exc()
            status = 1
        if status:
            failed.append(name)
        word = "failed" if status else "passed"
        print(f"{name} {word} in {time.perf_counter() - start:.1f} s", flush=True)
    print(f"\nFailed: {', '.join(failed)}." if failed else f"\nAll {len(args.only)} passed.")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
