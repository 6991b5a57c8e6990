"""The requirements that every compiled kernel must meet."""

import re
from dataclasses import dataclass

from benchmarks._launches import Launch
from benchmarks._machine_code import Compiled

__all__ = ["CHIPS", "Chip", "problems_of"]


@dataclass(frozen=True)
class Chip:
    """The resources of a multiprocessor (CUDA C++ programming guide, technical specifications).

    Args:
        shared_bytes: Shared memory for all programs.
        program_bytes: The most shared memory of one program.
        registers: Number of 32-bit registers.
    """

    shared_bytes: int
    program_bytes: int
    registers: int = 65_536

    def programs(self, compiled: Compiled) -> int:
        """Return how many programs fit on a multiprocessor."""
        if compiled.shared_bytes > self.program_bytes:
            return 0
        # Registers are allocated in eights; the system takes 1 KiB for every program.
        registers = -(-compiled.registers // 8) * 8 * compiled.threads
        programs = self.shared_bytes // (compiled.shared_bytes + 1024)
        return min(programs, self.registers // registers)


# 8.6, 8.9 and 12.0 have the least shared memory.
SMALL, LARGE = Chip(102_400, 101_376), Chip(233_472, 232_448)
CHIPS = {80: Chip(167_936, 166_912), 86: SMALL, 89: SMALL, 90: LARGE, 100: LARGE, 120: SMALL}

PRODUCTS = {80: "HMMA", 86: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
SUFFIXES = {"bf16": ".BF16", "fp16": ".F32", "fp32": ".TF32"}
# Kernels with integer atomics: maxima over programs and counters, never gradients.
COUNTING = {"prepare_kernel", "factors_kernel"}
_ATOMIC = re.compile(r"(ATOM|RED(?!UX)|UTMARED|UBLKRED)")


def problems_of(launch: Launch, compiled: Compiled) -> list[str]:
    """Return a description of each requirement that a kernel violates."""
    found: dict[str, bool] = {
        f"reads {compiled.spills} values back that registers did not hold": compiled.spills > 0,
        # An address check of ptxas 12.9 stores arguments that nothing loads, see `spills`.
        f"has {compiled.local_bytes} bytes of local memory": compiled.local_bytes > 0
        and not (launch.arch == 120 and compiled.local_bytes == 8 and not compiled.spills),
        f"ptxas warns: {compiled.complaints[:1]}": bool(compiled.complaints),
        f"{compiled.shared_bytes} bytes of shared memory fit no {launch.arch}": (
            CHIPS[launch.arch].programs(compiled) < 1
        ),
        "its launcher asks for no fused multiply-adds": (
            launch.kernel != "probe_kernel" and not launch.options["enable_fp_fusion"]
        ),
        f"is atomic: {compiled.atomics}": not _is_atomic_as_due(launch, compiled),
    }
    if launch.multiplies:
        found |= _problems_of_products(launch, compiled)
    return [words for words, is_there in found.items() if is_there]


def _is_atomic_as_due(launch: Launch, compiled: Compiled) -> bool:
    """Return whether only integers are updated atomically, and only by `COUNTING` kernels."""
    if launch.kernel in COUNTING:
        return {name.split(".")[-1] for name in compiled.atomics} <= {"s32", "u32"}
    in_cubin = [name for name in compiled.listing if _ATOMIC.match(name)]
    if launch.arch == 100:  # atomics in shared memory allocate tensor memory
        in_cubin = [name for name in in_cubin if not name.startswith("ATOMS.")]
    return not compiled.atomics and not in_cubin


def _problems_of_products(launch: Launch, compiled: Compiled) -> dict[str, bool]:
    """Return the possible problems of a kernel that multiplies tiles, and whether each occurs."""
    product, dtype = PRODUCTS[launch.arch], launch.dtype
    others = {name for name in PRODUCTS.values() if compiled.count(name)} - {product}
    named = {name for name in compiled.listing if name.startswith(product)}
    has_guides, is_softmax = launch.has("row_guides"), launch.kernel == "softmax_kernel"
    # On 10.0 the dtype is in a descriptor, not in the name; guides have another dtype.
    is_named = launch.arch == 100 or has_guides or all(x.endswith(SUFFIXES[dtype]) for x in named)
    return {
        f"multiplies by {others or named or 'no tensor core'}": (
            bool(others) or not named or not is_named
        ),
        "copies operands as it should not": not _is_copied(launch, compiled),
        f"takes {compiled.count('MUFU.EX2')} exponentials": not (
            # Thresholds change the number of exponentials slightly.
            launch.has("row_thresholds") or _exponentials(launch, compiled, is_softmax)
        ),
    }


def _is_copied(launch: Launch, compiled: Compiled) -> bool:
    """Return whether operands are loaded, and tiles stored, by asynchronous copies."""
    copies = {name: compiled.count(name) for name in ("UTMALDG", "UTMASTG", "LDGSTS")}
    halves = 1 + launch.has("weights_low") if "weights" in launch.source.fn.arg_names else 0
    if launch.constants["TMA"]:
        stores = copies["UTMASTG"] >= halves and (copies["UTMASTG"] > 0) == (halves > 0)
        return copies["UTMALDG"] >= 2 and stores and not copies["LDGSTS"]
    wide = all(".128" in name for name in compiled.listing if name.startswith("LDGSTS"))
    return copies["LDGSTS"] >= 2 and wide and not copies["UTMALDG"] and not copies["UTMASTG"]


def _exponentials(launch: Launch, compiled: Compiled, is_softmax: bool) -> bool:
    rows, columns, _ = launch.tile or (0, 0, 0)
    elements = rows * columns // compiled.threads
    # The second pass over a tile has one exponential for its rows and one for its columns.
    of_each = {"lse_kernel": 3, "sigmoid_kernel": 1}.get(launch.kernel, 1)
    if is_softmax and launch.constants["WIDE"]:
        of_each = 2
    return of_each * elements <= compiled.count("MUFU.EX2") < of_each * elements + 4
