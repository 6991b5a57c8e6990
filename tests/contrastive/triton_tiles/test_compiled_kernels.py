"""The rows of the table, compiled for their architectures without a GPU.

A spilled register, a product beside the tensor cores or a program too many for a multiprocessor
shows in no test of numbers. `make test` compiles what `gate_of` chooses, `make sweep` the rest,
with the pinned Triton.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import get_args

import pytest
import torch

from lightning_mp.contrastive._tiles.triton_tiles.configs import (
    Kernel,
    TileConfig,
    all_configs,
    find_configs,
    find_kept_configs,
)
from lightning_mp.contrastive._tiles.triton_tiles.operands import Precision
from lightning_mp.contrastive._tiles.words import TileDtype
from tests.contrastive.triton_tiles.compiling import Chip, Compiled, Request, compiler

pytestmark = pytest.mark.slow

Compile = Callable[[Request], Compiled]

# Rows for 80 serve all chips without rows of their own; 8.6, 8.9 and 12.0 have the least memory.
SMALL, LARGE = Chip(102_400, 101_376), Chip(233_472, 232_448)
CHIPS = {
    80: {"8.0": Chip(167_936, 166_912), "8.6 and 8.9": SMALL},
    90: {"9.0": LARGE},
    100: {"10.0": LARGE},
    120: {"12.0": SMALL},
}
WIDTHS = (64, 1024)  # one on each side of every `max_width`
FEATURES = (torch.bfloat16, torch.float16, torch.float32)
PRECISIONS = dict.fromkeys(
    Precision.of(features, tile_dtype)
    for features, tile_dtype in product(FEATURES, get_args(TileDtype))
)
BF16, BF16_LOW = (Precision.of(torch.bfloat16, name) for name in ("auto", "fp32"))


def rows_of(kernel: str, arch: int, dtype: torch.dtype) -> list[TileConfig]:
    """Return the rows that are used unless they are timed against others."""
    return [find_configs(kernel, arch, dtype, width)[0] for width in WIDTHS]


def bare(row: TileConfig) -> TileConfig:
    """Return a row without what no kernel sees: rows that differ in nothing else are one."""
    return dataclasses.replace(row, max_width=None, reason="")


def requests_of(row: TileConfig) -> list[Request]:
    """Return what is compiled of the kernels that a row is for.

    Kernels for fp16 differ from those for bf16 in the names of instructions and in how they round.
    So fp16 is left out where a row is only an alternative, unless the scale is split, and so it is
    where the number of columns is no multiple of 16. That is a specialisation of the softmax alone
    and is tried where most has to be kept in registers: for two halves or for four bytes a value.
    """
    dtypes = [getattr(torch, name) for name in row.dtypes]
    precisions = [p for p in PRECISIONS if p.operand in dtypes]
    telling = [p for p in precisions if p.operand != torch.float16 or p.is_split]
    large = [p for p in telling if p.keeps_low or p.operand == torch.float32]
    is_alternative = not any(row in rows_of(row.kernel, row.arch, dtype) for dtype in dtypes)
    config = bare(row)
    if row.kernel != "lse":
        whole = [p for p in telling if p not in large] if is_alternative else precisions
        return [Request("softmax_kernel", config, p) for p in whole] + [
            Request("softmax_kernel", config, p, ragged=True) for p in large
        ]
    if is_alternative:
        precisions = telling
    # How the softmax is kept does not matter here; tiles are always redone with a split scale.
    by_scale = dict.fromkeys(Precision(p.operand, p.operand, False, p.is_split) for p in precisions)
    return [
        Request("lse_kernel", config, p, maxima=maxima)
        # With maxima or ids nothing is timed against the rows that are used.
        for maxima in ((False,) if is_alternative else (False, True))
        for p in by_scale
    ]


def gate_of(requests: Sequence[Request]) -> list[Request]:
    """Return what `make test` compiles: a few requests in which every single change shows.

    A row of the table breaks alone, and first where most has to be kept: each that is used is
    compiled for each of its kernels in that variant. What is done with a dtype, a split scale, a
    second half or a ragged edge breaks for all rows alike: each kernel is compiled with each of
    these on each architecture. What takes two of them to break is left to `make sweep`, and so are
    the rows that are only timed against others.
    """
    by_effort = sorted(requests, key=lambda r: (r.ragged, r.precision.is_split, r.maxima))
    chosen = list({(r.kernel, r.config): r for r in by_effort}.values())  # the last ones
    missing = set().union(*map(_features, requests)).difference(*map(_features, chosen))
    while missing:
        chosen.append(max(requests, key=lambda r: len(_features(r) & missing)))
        missing -= _features(chosen[-1])
    return [r for r in requests if r in chosen]


def _features(request: Request) -> set[tuple[object, ...]]:
    """Return each property of a request, with its kernel and architecture."""
    kernel = (request.kernel, request.config.kernel, request.config.arch)
    properties = {**dataclasses.asdict(request.precision), "ragged": request.ragged}
    properties["maxima"] = request.maxima
    return {(*kernel, *item) for item in properties.items()}


def is_lse(request: Request) -> bool:
    return request.kernel == "lse_kernel"


def changed(kernel: str, arch: int, precision: Precision, **changes: object) -> Request:
    """Return a request for a row of the table after changes."""
    row = dataclasses.replace(rows_of(kernel, arch, precision.operand)[1], **changes)
    return Request("lse_kernel" if kernel == "lse" else "softmax_kernel", row, precision)


ROWS = all_configs()
TILES = list(dict.fromkeys(request for row in ROWS for request in requests_of(row)))
MERGES = [
    Request("merge_kernel", rows_of("lse", arch, torch.bfloat16)[1], BF16, maxima=maxima)
    for arch, maxima in product(CHIPS, (False, True))
]
# The sigmoid takes the rows of the softmax with two exponentials: it keeps as much in registers.
SIGMOIDS = [
    Request(
        "sigmoid_kernel",
        bare(row),
        precision,
        ragged=precision.keeps_low,
        maxima=precision.keeps_low,
    )
    for row in ROWS
    if row.kernel == "softmax_wide"
    for precision in PRECISIONS
    if str(precision.operand).removeprefix("torch.") in row.dtypes
]
# The reasons say that nothing larger than their rows goes without spilling: these do.
SPILLING = [
    changed("lse", 90, BF16, tile=(256, 256, 16), stages=2),
    changed("softmax_wide", 90, BF16, tile=(128, 256, 64)),
    changed("softmax", 80, BF16_LOW, tile=(128, 256, 32), stages=3),
]
# What is used on chips that share the rows of 80, or of which few people have one yet.
FIRST = [
    bare(rows_of(kernel, arch, torch.bfloat16)[1]) for kernel in get_args(Kernel) for arch in CHIPS
]
USED = [r for r in TILES if r.config in FIRST and r.precision == BF16 and not r.ragged]
RELATED = [
    dataclasses.replace(request, arch=arch)
    for arch in (86, 89)
    for request in USED
    if request.config.arch == 80
]
DEFAULTS = [
    bare(row)
    for kernel, arch, dtype in product(get_args(Kernel), CHIPS, FEATURES)
    for row in rows_of(kernel, arch, dtype)
]
# The codes of ids take registers beside all that a tile has without them.
IDS = [
    dataclasses.replace(request, ids=True)
    for request in TILES + SIGMOIDS
    if request.config.kernel != "lse" or request.config in DEFAULTS
]
GUIDED = [
    bare(find_configs("softmax_wide", arch, dtype, WIDTHS[1])[-1])
    for arch, dtype in product(CHIPS, FEATURES)
]
# With limits both sweeps take the rows of the softmax with two exponentials.
LIMITS = [
    Request(kernel, bare(row), precision, limits=True)
    for row in ROWS
    if row.kernel == "softmax_wide"
    for precision in PRECISIONS
    if str(precision.operand).removeprefix("torch.") in row.dtypes
    for kernel in ("lse_kernel", "softmax_kernel")
    if kernel == "softmax_kernel" or precision.is_split or not precision.keeps_low
]
# Guides are multiplied as they are, or those of fp32 in halves of fp16; they take the last row.
GUIDES = [
    dataclasses.replace(request, guides=guides)
    for request in LIMITS
    for guides in (torch.bfloat16, torch.float16)
    if request.config in (GUIDED if is_lse(request) else DEFAULTS)
]
BF16_GUIDES = [r for r in GUIDES if r.precision == BF16 and r.guides == torch.bfloat16]
SPLIT = Precision.of(torch.float32, "auto")  # whose products are kept
KEPT = [
    Request(kernel, bare(row), SPLIT, kept=True, arch=arch, ids=ids, **{more: has_more})
    for arch, width in ((80, 64), (86, 64), (89, 64), *product((90, 100, 120), WIDTHS))
    for kernel, more, row in zip(
        ("lse_kernel", "softmax_kernel"),
        ("maxima", "ragged"),
        find_kept_configs(arch if arch in CHIPS else 80, SPLIT.operand, width),
        strict=True,
    )
    for ids, has_more in product((False, True), repeat=2)
]
# What keeps the most in registers stands for what keeps less; 8.6 is left to the sweep.
FULLEST = [r for r in USED if r.maxima or r.kernel != "lse_kernel"]
FULLEST_WITH_IDS = [
    *(r for r in IDS if r.config in FIRST and r.precision == BF16 and r.maxima),
    *(r for r in IDS if r.config in FIRST and r.precision == BF16_LOW and r.ragged),
]
GATE = [
    *gate_of([r for r in TILES if r.config.arch in (80, 90) and r.config in DEFAULTS]),
    *(r for r in FULLEST if r.config.arch in (100, 120)),
    *(r for r in RELATED if r.arch == 89 and dataclasses.replace(r, arch=None) in FULLEST),
    MERGES[3],
    *(r for r in SIGMOIDS if r.precision == BF16_LOW and r.config.arch == 80),
    # Ids of the log-sum-exps are compiled where products are kept as well, limits with guides.
    *(r for r in FULLEST_WITH_IDS if r.config.arch == 90 and not is_lse(r)),
    *(r for r in BF16_GUIDES if r.config.arch in (80, 90)),
    *(r for r in KEPT if r.ids and r.maxima and r.config.warps == 8 and r.arch in (80, 90)),
    SPILLING[1],
]


def requests(cases: Sequence[Request]) -> pytest.MarkDecorator:
    """Return a parametrization; what is not of the gate waits for the sweep."""
    marks = {True: (), False: pytest.mark.sweep}
    params = [pytest.param(case, marks=marks[case in GATE]) for case in cases]
    # The scope puts the tests of one request together, so that one process compiles it.
    return pytest.mark.parametrize("request_", params, ids=str, scope="module")


tiles, kernels = (
    requests(TILES),
    requests(TILES + MERGES + RELATED + SIGMOIDS + IDS + LIMITS + GUIDES + [*dict.fromkeys(KEPT)]),
)


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config) -> Iterator[Compile]:
    with compiler(pytestconfig) as compile_:
        yield compile_


@kernels
def test_kernel_keeps_everything_in_registers(compiled: Compile, request_: Request) -> None:
    kernel = compiled(request_)
    assert not kernel.is_spilled
    assert kernel.complaints == ()


@kernels
def test_kernel_fits_every_chip_it_is_for(compiled: Compile, request_: Request) -> None:
    for name, chip in CHIPS[request_.config.arch].items():
        assert chip.programs(compiled(request_)) >= 1, name


@tiles
def test_product_runs_on_tensor_cores(compiled: Compile, request_: Request) -> None:
    kernel, dtype = compiled(request_), request_.precision.operand
    names = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
    name = names[request_.config.arch]
    assert {other for other in names.values() if kernel.count(other)} == {name}
    if request_.config.arch == 100:
        return  # the dtype stands in a descriptor, not in the name
    products = [one for one in kernel.instructions if one.startswith(name)]
    suffix = {torch.bfloat16: ".BF16", torch.float16: ".F32", torch.float32: ".TF32"}[dtype]
    assert all(".F32" in one and one.endswith(suffix) for one in products), products


@tiles
def test_operands_are_copied_in_the_background(compiled: Compile, request_: Request) -> None:
    kernel, config = compiled(request_), request_.config
    copies = {name: kernel.count(name) for name in ("UTMALDG", "UTMASTG", "LDGSTS")}
    is_softmax = request_.kernel == "softmax_kernel"
    halves = (1 + request_.precision.keeps_low) * is_softmax
    if config.tma:
        assert copies["UTMALDG"] >= 2
        assert copies["UTMASTG"] >= halves
        assert (copies["UTMASTG"] > 0) == is_softmax
        assert copies["LDGSTS"] == 0
    else:
        assert copies["LDGSTS"] >= 2
        assert all(".128" in name for name in kernel.instructions if name.startswith("LDGSTS"))
        assert not copies["UTMALDG"]
        assert not copies["UTMASTG"]


@kernels
def test_multiply_adds_are_fused(compiled: Compile, request_: Request) -> None:
    assert compiled(request_).fuses


@tiles
def test_element_takes_the_exponentials_it_must(compiled: Compile, request_: Request) -> None:
    kernel, config = compiled(request_), request_.config
    elements = config.tile[0] * config.tile[1] // kernel.threads
    # Done once more, a tile of the log-sum-exps takes another for its row and one for its column.
    of_row = {"lse": 3, "softmax": 1, "softmax_wide": 2}[config.kernel]
    exponentials = (1 if request_.kernel == "sigmoid_kernel" else of_row) * elements
    assert exponentials <= kernel.count("MUFU.EX2") < exponentials + 4
    assert kernel.count("MUFU") < exponentials + 8


@kernels
def test_nothing_is_atomic(compiled: Compile, request_: Request) -> None:
    kernel = compiled(request_)
    atomic = re.compile(r"(ATOM|RED(?!UX)|UTMARED|UBLKRED)")
    in_cubin = [name for name in kernel.instructions.elements() if atomic.match(name)]
    if request_.config.arch == 100:  # those in shared memory give out the tensor cores' own
        in_cubin = [name for name in in_cubin if not name.startswith("ATOMS.")]
    assert list(kernel.atomics) == in_cubin == []


@tiles
def test_reason_of_its_row_is_true(compiled: Compile, request_: Request) -> None:
    """What the reasons say of shared memory and of programs at a time."""
    kernel = compiled(request_)
    programs = {chip.programs(kernel) for chip in CHIPS[request_.config.arch].values()}
    for reason in (row.reason for row in ROWS if bare(row) == request_.config):
        for kibibytes in re.findall(r"(\d+) KiB", reason):
            assert kernel.shared_bytes // 1024 == int(kibibytes)  # barriers take some bytes more
        if "two programs" in reason:
            assert min(programs) >= 2
        if "two to three programs" in reason:
            assert programs <= {2, 3}


def rows_that_say(text: str) -> pytest.MarkDecorator:
    rows = [row for row in ROWS if text in row.reason]
    return pytest.mark.parametrize("row", rows, ids=lambda row: f"{row.kernel}-{row.tile}")


@pytest.mark.sweep
@rows_that_say("two to three programs")
def test_row_of_two_to_three_programs_has_kernels_of_both(
    compiled: Compile, row: TileConfig
) -> None:
    results = [compiled(request) for request in requests_of(row)]
    assert {chip.programs(r) for r in results for chip in CHIPS[row.arch].values()} == {2, 3}


@rows_that_say("FLOP for each byte")
def test_arithmetic_intensity_is_that_of_the_reason(row: TileConfig) -> None:
    (m, n, _), size = row.tile, getattr(torch, row.dtypes[0]).itemsize
    (flop,) = re.findall(r"(\d+) FLOP for each byte", row.reason)
    assert int(2 * m * n / (m + n) / size) == int(flop)


@pytest.mark.sweep
def test_sums_over_wide_tiles_take_as_many_shuffles_as_their_row_says(compiled: Compile) -> None:
    tall = changed("lse", 90, BF16, max_width=None, reason="")
    wide = dataclasses.replace(tall, config=dataclasses.replace(tall.config, tile=(128, 256, 64)))
    (reason,) = (row.reason for row in ROWS if "the shuffles" in row.reason)
    low, high = re.findall(r"128 x 256 needs ([\d.]+) to ([\d.]+) times the shuffles", reason)[0]
    more = compiled(wide).count("SHFL") / compiled(tall).count("SHFL")
    assert float(low) <= more <= float(high)


@requests(MERGES)
def test_merge_knows_the_logarithm_of_two_in_float64(compiled: Compile, request_: Request) -> None:
    constants = re.findall(
        r"constant dense<(0\.69\d*)> : tensor<\w+xf(\d+)>", compiled(request_).ttir
    )
    assert constants
    assert {(float(value), bits) for value, bits in constants} == {(math.log(2), "64")}


@requests(MERGES)
def test_kernel_without_a_product_has_no_tensor_cores(compiled: Compile, request_: Request) -> None:
    kernel = compiled(request_)
    assert kernel.count("HMMA") + kernel.count("HGMMA") + kernel.count("UTCHMMA") == 0
    assert kernel.count("DADD") > 0


@requests(SPILLING)
def test_tile_that_is_too_large_is_seen_to_spill(compiled: Compile, request_: Request) -> None:
    assert compiled(request_).is_spilled
    assert request_ not in TILES


@pytest.mark.sweep
def test_products_that_are_serialized_are_seen(compiled: Compile) -> None:
    complaints = compiled(SPILLING[0]).complaints
    assert any("wgmma.mma_async instructions are serialized" in each for each in complaints)


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "programs"),
    [(255, 32_784, 1), (128, 115_712, 2), (129, 115_712, 1), (128, 115_713, 1), (128, 232_449, 0)],
)
def test_programs_at_a_time_are_counted(registers: int, shared_bytes: int, programs: int) -> None:
    kernel = Compiled(registers, 256, 0, shared_bytes, True, Counter(), (), (), "")
    assert CHIPS[90]["9.0"].programs(kernel) == programs
