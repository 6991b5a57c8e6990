"""fp32 weights stored in half precision, against float64."""

import pytest
import torch
from torch import Tensor

from lightning_mp.numerics.split_weights import (
    batches,
    join_weight,
    join_weights,
    parts_of,
    residual_unit,
    round_stochastically,
    split_weight,
)

HALVES = [torch.float16, torch.bfloat16]
half_dtypes = pytest.mark.parametrize("half", HALVES, ids=["fp16", "bf16"])
BITS = {torch.float16: 22, torch.bfloat16: 16}


@pytest.fixture(autouse=True)
def _fresh_values() -> None:
    torch.seed()


def values(count: int, lowest: int, highest: int) -> Tensor:
    """Return fp32 values of all magnitudes between two powers of two, and both signs."""
    exponents = torch.randint(lowest, highest, (count,))
    signs = 1 - 2 * torch.randint(2, (count,))
    return torch.ldexp((1 + torch.rand(count)) * signs, exponents)


def near_ties(half: torch.dtype, count: int) -> Tensor:
    """Return fp32 values at and near the middle between two neighboring half values."""
    lower = values(count, -24, 14).to(half)
    upper = (lower.view(torch.int16) + 1).view(half)
    middle = (lower.float() + upper.float()) / 2
    beside = middle.view(torch.int32) + torch.randint(-5, 6, (count,), dtype=torch.int32)
    return beside.view(torch.float32)


# --- weight and residual -------------------------------------------------------------------------


@half_dtypes
def test_weight_and_residual_carry_their_bits_at_every_size(half: torch.dtype) -> None:
    lowest = -13 if half == torch.float16 else -100
    m = values(200_001, lowest, 15)
    weight, residual = split_weight(m, half)
    assert torch.equal(weight, m.to(half))
    assert residual.dtype == half
    joined = join_weight(weight, residual)
    assert joined.dtype == torch.float32
    stood_for = weight.double() + residual.double() * residual_unit(half)
    assert torch.equal(joined.double(), stood_for)
    error = (stood_for - m.double()).abs() / m.double().abs()
    assert error.max() <= 2.0 ** -BITS[half]


def test_smallest_fp16_weights_resolve_2_to_the_minus_35() -> None:
    m = values(200_001, -40, -13)
    joined = join_weight(*split_weight(m, torch.float16))
    error = (joined.double() - m.double()).abs().max()
    assert 2.0**-37 < error <= 2.0**-35  # 2.9e-11


def test_residual_without_unit_would_carry_14_bits() -> None:
    """This loss of bits is the reason for the unit of residuals."""
    m = 1e-3 * (1 + torch.rand(100_001))
    plain = (m - m.half().float()).half()
    error = ((m.half().double() + plain.double() - m.double()) / m.double()).abs().max()
    assert 2.0**-16 < error < 2.0**-14


@half_dtypes
@pytest.mark.parametrize("is_near_ties", [False, True], ids=["random", "near ties"])
def test_joined_weights_split_into_the_same_pair(half: torch.dtype, is_near_ties: bool) -> None:
    """A run that resumes from fp32 weights must compute with the same half weights."""
    m = near_ties(half, 200_001) if is_near_ties else values(200_001, -30, 14)
    weight, residual = split_weight(m, half)
    again, rest = split_weight(join_weight(weight, residual), half)
    assert torch.equal(again, weight)
    assert torch.equal(rest, residual)


@half_dtypes
def test_non_finite_values_have_no_residual(half: torch.dtype) -> None:
    largest = torch.finfo(half).max
    m = torch.tensor([torch.inf, -torch.inf, torch.nan, largest, -largest, 0.0, 3e38])
    m = torch.cat([m, torch.tensor([largest * (1 + 2.0**-12)])])
    weight, residual = split_weight(m, half)
    expected = m.to(half)
    torch.testing.assert_close(weight, expected, rtol=0, atol=0, equal_nan=True)
    assert (residual[:6] == 0).all()
    assert residual.isfinite().all()
    torch.testing.assert_close(
        join_weight(weight, residual).to(half), expected, rtol=0, atol=0, equal_nan=True
    )


@half_dtypes
def test_shapes_and_strides_do_not_matter(half: torch.dtype) -> None:
    flat = torch.randn(7 * 5)
    expected = join_weight(*split_weight(flat, half))
    transposed = flat.view(5, 7).t().contiguous().t()
    assert torch.equal(join_weight(*split_weight(transposed, half)).flatten(), expected)
    for index in range(3):
        scalar = join_weight(*split_weight(flat[index], half))
        assert scalar.shape == ()
        assert torch.equal(scalar, expected[index])


@half_dtypes
def test_residual_of_another_weight_is_ignored(half: torch.dtype) -> None:
    m = torch.randn(1001) + 3
    weight, residual = split_weight(m, half)
    rest = (residual.double() * residual_unit(half)).abs()
    zeros = join_weight(torch.zeros_like(weight), residual)
    is_larger = rest > 2.0**-24  # more than half a ULP of 0 in fp16
    assert is_larger.any()
    assert (zeros[is_larger] == 0).all()
    # A residual may fit another weight of the same magnitude; the sum still rounds to the weight.
    new = (torch.randn(1001) + 3).to(half)
    assert torch.equal(join_weight(new, residual).to(half), new)


@pytest.mark.slow
@half_dtypes
def test_updates_below_half_a_ulp_accumulate(half: torch.dtype) -> None:
    """Kahan's sum: 1000 updates of 1/64 of a step of the weight."""
    update = torch.finfo(half).eps / 64
    weight, residual = split_weight(torch.ones(3), half)
    for _ in range(1000):
        weight, residual = split_weight(join_weight(weight, residual) + update, half)
    expected = torch.full((3,), 1 + 1000 * update)
    torch.testing.assert_close(join_weight(weight, residual), expected, rtol=2.0**-14, atol=0)
    assert (torch.ones(3).to(half) + update == 1).all()  # half precision alone stagnates


# --- stochastic rounding --------------------------------------------------------------------------


def neighbors(m: Tensor, half: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the half values next to each value, in float64: the one towards 0 first."""
    nearest = m.to(half)
    is_beyond = nearest.double().abs() > m.double().abs()
    inner = torch.where(is_beyond, (nearest.view(torch.int16) - 1).view(half), nearest)
    outer = (inner.view(torch.int16) + 1).view(half)
    is_exact = inner.double() == m.double()
    return inner.double(), torch.where(is_exact, inner, outer).double()


CASES = {
    "fp16 normal": (torch.float16, -14, 10),
    "fp16 around the smallest normal": (torch.float16, -15, -13),
    "fp16 subnormal": (torch.float16, -24, -14),
    "fp16 below its smallest": (torch.float16, -30, -24),
    "bf16": (torch.bfloat16, -100, 100),
}
cases = pytest.mark.parametrize(("half", "lowest", "highest"), CASES.values(), ids=CASES)


@cases
def test_stochastic_rounding_is_unbiased_and_returns_neighbors_only(
    half: torch.dtype, lowest: int, highest: int
) -> None:
    draws = 4096
    m = values(301, lowest, highest)
    many = round_stochastically(m.expand(draws, -1), half)
    assert many.dtype == half
    inner, outer = neighbors(m, half)
    assert ((many.double() == outer) | (many.double() == inner)).all()
    is_outer = (many.double() == outer) & (inner != outer)
    wanted = ((m.double() - inner).abs() / (outer - inner).abs()).nan_to_num()
    # Each share is within 6 standard deviations; noise has 13 bits below fp16's smallest number.
    bound = 6 * (wanted * (1 - wanted) / draws).sqrt() + 2.0**-13 + 4 / draws
    assert ((is_outer.double().mean(0) - wanted).abs() < bound).all()
    # The mean is within 6 standard deviations, too, and would show a bias of 1/1000 ULP.
    bias = (is_outer.double().mean(0) - wanted).mean().abs()
    assert bias < 6 * 0.5 / (301 * draws) ** 0.5 + 2.0**-13


@half_dtypes
def test_representable_values_are_not_rounded(half: torch.dtype) -> None:
    m = values(10_001, -24, 14).to(half).float()
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**-24, -(2.0**-14)])
    m = torch.cat([m, special])
    for _ in range(3):
        found = round_stochastically(m, half)
        torch.testing.assert_close(found.float(), m, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.signbit()[m == 0], m.signbit()[m == 0])


@half_dtypes
def test_generator_makes_rounding_reproducible(half: torch.dtype) -> None:
    m = torch.randn(33, 31)
    runs = [
        round_stochastically(m, half, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@half_dtypes
def test_rounding_accepts_any_shape_and_stride(half: torch.dtype) -> None:
    m = torch.randn(5, 7).t()
    found = round_stochastically(m, half)
    assert ((found.double() - m.double()).abs() <= m.double().abs() * torch.finfo(half).eps).all()
    assert round_stochastically(m[0, 0], half).shape == ()
    assert round_stochastically(m[:0], half).shape == (0, 5)


def _split(masters: list[Tensor], half: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    found: dict[int, Tensor] = {}
    residuals = [torch.empty_like(master, dtype=half) for master in masters]
    for members, vector, rests in batches(masters, residuals):
        weight, rest = split_weight(vector, half)
        rests.copy_(rest)
        parts = parts_of(weight, [masters[index] for index in members])
        found.update(zip(members, parts, strict=True))
    return [(found[index], residual) for index, residual in enumerate(residuals)]


@half_dtypes
def test_batched_tensors_are_bitwise_equal_to_single_ones(half: torch.dtype) -> None:
    # Small, empty, 0-d, not contiguous, and too large to be batched.
    shapes = [(3, 5), (0,), (), (7,), (300, 300), (2, 3, 4)]
    masters = [torch.randn(shape) * 10.0 ** (index - 3) for index, shape in enumerate(shapes)]
    masters += [torch.randn(4, 6).t(), torch.tensor([torch.inf, torch.nan, 1e6])]
    together = _split(masters, half)
    alone = [split_weight(master, half) for master in masters]
    joined = join_weights([w for w, _ in together], [rest for _, rest in together])
    for found, expected, value in zip(together, alone, joined, strict=True):
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            assert torch.equal(one.view(torch.int16), other.view(torch.int16))
        assert torch.equal(value.view(torch.int32), join_weight(*expected).view(torch.int32))


@half_dtypes
def test_views_of_one_vector_are_split_like_single_tensors_in_any_order(half: torch.dtype) -> None:
    vector = torch.randn(24)
    before = vector.clone()
    views = [vector[:6].view(2, 3), vector[6:16], vector[16:]]
    for masters in (views, views[::-1], views[::2], [views[0], views[1].clone(), views[2]]):
        for found, master in zip(_split(masters, half), masters, strict=True):
            for one, other in zip(found, split_weight(master, half), strict=True):
                assert one.shape == other.shape
                assert torch.equal(one, other)
    assert torch.equal(vector, before)
