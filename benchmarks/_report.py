"""What a run of the loss benchmark says: rows for the CSV file, a table and a verdict for the eye.

Shapes:
    b: batch. D: feature width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks._common import MIB, format_table
from benchmarks._inputs import DTYPES

__all__ = ["Row", "table_of", "verdict_of"]

# On a CPU, against the dense formula.
TARGET_SPEEDUP = 1.4
TARGET_MEMORY = 0.2
# On CUDA, against Inf-CL, the measured matmul rate, and the fp32 bytes of one side's features.
TARGET_INF_CL_SPEEDUP = 10.0
TARGET_FRACTION = 0.7
TARGET_EXTRA_FEATURES = 8.0


@dataclass(frozen=True)
class Row:
    """One line of the CSV file; `peak_extra_bytes` is empty where it was not measured."""

    date: str
    contender: str
    batch: int
    width: int
    dtype: str
    scale: float
    device: str
    repeats: int
    ms_median: float
    ms_min: float
    ms_max: float
    time_ratio: float
    gflops: float
    gemm_gflops: float
    gemm_fraction: float
    peak_extra_bytes: int | None
    max_relative_difference: float
    device_name: str
    threads: str
    python: str
    torch: str
    triton: str
    lightning_mp: str

    @property
    def on_cuda(self) -> bool:
        """Whether a GPU ran it."""
        return torch.device(self.device).type == "cuda"

    @property
    def feature_bytes(self) -> int:
        """Bytes of one side's features in fp32, `4 b D`: the unit that peers' memory is told in."""
        return 4 * self.batch * self.width

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the features' gradients."""
        return 2 * self.batch * self.width * DTYPES[self.dtype].itemsize


def table_of(rows: Sequence[Row]) -> str:
    """Return the figures of one problem for the eye."""
    unit, giga = ("TFLOP/s", 1e3) if rows[0].on_cuda else ("GFLOP/s", 1.0)
    header = "contender", "ms [range]", "x ours", unit, "of GEMM", "extra MiB", "/ 4bD", "x ours"
    lines = []
    for row in rows:
        peak, ours = row.peak_extra_bytes, rows[0].peak_extra_bytes
        lines.append(
            (
                row.contender,
                f"{row.ms_median:,.1f} [{row.ms_min:,.1f}-{row.ms_max:,.1f}]",
                f"{row.time_ratio:.2f}",
                f"{row.gflops / giga:,.0f}",
                f"{row.gemm_fraction:.0%}",
                "-" if peak is None else f"{peak / MIB:,.1f}",
                "-" if peak is None else f"{peak / row.feature_bytes:.1f}",
                f"{peak / ours:.1f}" if peak and ours else "-",
            )
        )
    return format_table(header, lines)


def verdict_of(rows: Sequence[Row], left_out: Mapping[str, str] | None = None) -> str:
    """Return what the figures say against the targets, in words.

    Args:
        rows: The figures of one problem, ours first.
        left_out: Why contenders have none.
    """
    return _cuda_verdict(rows, left_out or {}) if rows[0].on_cuda else _cpu_verdict(rows)


def _cpu_verdict(rows: Sequence[Row]) -> str:
    ours = rows[0]
    said = f"{ours.contender[0].upper()}{ours.contender[1:]}, reach {ours.gemm_fraction:.0%}"
    said += f" of the machine's GEMM rate of {ours.gemm_gflops:,.0f} GFLOP/s"
    dense = next((row for row in rows if row.contender.startswith("dense")), None)
    if dense is None:
        return said + "; the dense formula did not run."
    said += f" and are {dense.time_ratio:.2f}x as fast as the dense formula"
    met = dense.time_ratio >= TARGET_SPEEDUP
    target = f"at least {TARGET_SPEEDUP}x as fast"
    if ours.peak_extra_bytes is not None and dense.peak_extra_bytes:
        share = ours.peak_extra_bytes / dense.peak_extra_bytes
        said += (
            f", with {share:.1%} of its extra memory ({ours.peak_extra_bytes / MIB:,.0f} of "
            f"{dense.peak_extra_bytes / MIB:,.0f} MiB)"
        )
        met &= share <= TARGET_MEMORY
        target += f", at most {TARGET_MEMORY:.0%} of the memory"
    return f"{said}. Target ({target}): {'met' if met else 'missed'}."


def _cuda_verdict(rows: Sequence[Row], left_out: Mapping[str, str]) -> str:
    """Judge ours by three targets, each of which may be undecided."""
    ours = rows[0]
    findings: list[tuple[str, bool | None]] = []
    fraction = f"reach {ours.gemm_fraction:.0%} of the matmul rate of {ours.gemm_gflops / 1e3:,.0f}"
    fraction += f" TFLOP/s (target: {TARGET_FRACTION:.0%})"
    findings.append((fraction, ours.gemm_fraction >= TARGET_FRACTION))
    peers = [row for row in rows if row.contender.startswith("Inf-CL")]
    if peers:
        peer = min(peers, key=lambda row: row.time_ratio)
        speed = f"are {peer.time_ratio:.1f}x as fast as {peer.contender}"
        speed += f" (target: {TARGET_INF_CL_SPEEDUP:g}x)"
        findings.append((speed, peer.time_ratio >= TARGET_INF_CL_SPEEDUP))
    else:
        reason = next((why for name, why in left_out.items() if name.startswith("Inf-CL")), None)
        findings.append((f"are not compared with Inf-CL ({reason or 'it did not run'})", None))
    if ours.peak_extra_bytes is None:
        findings.append(("were not weighed", None))
    else:
        extra = (ours.peak_extra_bytes + ours.gradient_bytes) / ours.feature_bytes
        memory = f"need {extra:.1f} x 4bD bytes beyond the inputs, gradients included"
        memory += f" (target: {TARGET_EXTRA_FEATURES:g})"
        findings.append((memory, extra <= TARGET_EXTRA_FEATURES))
    words = {True: "met", False: "missed", None: "open"}
    said = "; ".join(f"{text}: {words[met]}" for text, met in findings)
    return f"{ours.contender[0].upper()}{ours.contender[1:]}, {said}."
