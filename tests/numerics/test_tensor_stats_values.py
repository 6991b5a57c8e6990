"""`tensor_stats` against float64, on values of all kinds that a dtype can hold."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp.numerics import row_stats as rows
from lightning_mp.numerics import tensor_stats as stats_module
from lightning_mp.numerics.tensor_stats import StatField, stored_numels, tensor_stats
from tests.reference.tensor_stats import (
    DTYPES,
    assert_stats_agree,
    dense_stats,
    planted,
    planted_tensors,
)

HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture
def _unlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the path of accelerators, which makes every pass without reading values."""
    original = rows.row_stats

    def row_stats(*args: object, may_sync: bool) -> Tensor:
        return original(*args, may_sync=False)

    monkeypatch.setattr("lightning_mp.numerics.tensor_stats.row_stats", row_stats)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("bad", [False, True])
def test_stats_equal_the_reference(seed: int, bad: bool) -> None:
    tensors = planted_tensors(seed, bad=bad)
    assert_stats_agree(tensor_stats(tensors), tensors)


@pytest.mark.slow
@pytest.mark.usefixtures("_unlooked")
@pytest.mark.parametrize("bad", [False, True])
def test_stats_equal_the_reference_without_reading_values(bad: bool) -> None:
    tensors = planted_tensors(2, bad=bad)
    assert_stats_agree(tensor_stats(tensors, scale=2.0), tensors, scale=2.0)


def test_stats_are_equal_with_and_without_reading_values(request: pytest.FixtureRequest) -> None:
    """The skipped passes would have found nothing; only the units of norms differ."""
    tensors = [torch.randn(3000), torch.rand(2048) + 1, planted_tensors(3)[-2], torch.zeros(5000)]
    looked = tensor_stats(tensors)
    request.getfixturevalue("_unlooked")
    unlooked = tensor_stats(tensors)
    exact = [field for field in StatField if field < StatField.SUM_OF_SQUARES]
    assert torch.equal(looked[:, exact], unlooked[:, exact])
    assert torch.allclose(looked, unlooked, rtol=1e-6, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "unscale"), [(1024.0, 1.0), (1.0, 2.0**-12), (2.0**16, 2.0**-9)])
def test_scales_move_the_bounds_and_the_values(scale: float, unscale: float) -> None:
    tensors = planted_tensors(4)
    expected = {"scale": scale, "unscale": unscale}
    assert_stats_agree(tensor_stats(tensors, scale=scale, unscale=unscale), tensors, **expected)
    as_tensors = tensor_stats(
        tensors, scale=torch.tensor(scale), unscale=torch.tensor([unscale], dtype=torch.float64)
    )
    assert_stats_agree(as_tensors, tensors, **expected)
    # Each scale moves the bounds, so ignoring a scale would fail.
    counts = dense_stats(tensors, **expected)[:, StatField.SUBNORMALS]
    assert (counts != dense_stats(tensors)[:, StatField.SUBNORMALS]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormal_bound_is_exact_in_fp16(dtype: torch.dtype) -> None:
    values = torch.logspace(-30, -10, 4001, base=2, dtype=torch.float64).to(dtype)
    edges = torch.tensor([2.0**-14, 2.0**-24, 2.0**-25], dtype=dtype)
    values = torch.cat([values, edges, -edges])
    stats = tensor_stats([values])[0]
    is_small = values.double().abs() < 2.0**-14
    assert stats[StatField.SUBNORMALS] == ((values != 0) & is_small).sum()
    assert stats[StatField.SUBNORMALS] > 100


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_values_change_only_their_count(bad: float, dtype: torch.dtype) -> None:
    values = torch.linspace(-2, 3, 2500).to(dtype)
    spoiled = torch.cat([values, torch.tensor([bad, bad], dtype=dtype)])
    (clean_K,), (stats_K,) = tensor_stats([values]), tensor_stats([spoiled])
    assert stats_K[StatField.NON_FINITE] == 2
    stats_K[StatField.NON_FINITE] = 0
    assert torch.allclose(clean_K, stats_K, rtol=1e-6, atol=1e-4)


def test_tensors_without_finite_values_have_neutral_stats() -> None:
    tensors = [torch.zeros(0), torch.full((1500,), math.nan), torch.zeros(1500)]
    expected = torch.zeros(3, len(StatField), dtype=torch.float64)
    expected[1, StatField.NON_FINITE] = expected[2, StatField.ZEROS] = 1500
    assert torch.equal(tensor_stats(tensors), expected)
    assert torch.equal(tensor_stats([tensors[0]]), expected[:1])
    assert tensor_stats([]).shape == (0, len(StatField))


@pytest.mark.parametrize("size", [3e38, 1e30, 1e-19, 1e-22, 2e-38, 1e-44])
def test_sums_of_fp32_values_neither_overflow_nor_underflow(size: float) -> None:
    """Squares of 1e-22, as of a second moment, are 0 in fp32; sums of 3e38 are inf."""
    values = torch.rand(5000).clamp_min(0.3) * size
    assert_stats_agree(tensor_stats([values]), [values])
    assert torch.isfinite(tensor_stats([values])).all()


@pytest.mark.parametrize("size", [1e-150, 1e150])
def test_sums_of_float64_values_keep_float64s_range_and_precision(size: float) -> None:
    values = torch.randn(5000, dtype=torch.float64) * size
    stats = tensor_stats([values])[0]
    assert math.isclose(stats[StatField.SUM_OF_SQUARES], values.square().sum(), rel_tol=1e-12)
    assert stats[StatField.AMAX] == values.abs().max()


def test_layout_of_memory_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(5)
    base = planted((6, 5, 40, 30), torch.float32, generator)
    tensors = [
        base.permute(3, 1, 0, 2),
        base.to(memory_format=torch.channels_last),
        base[:, ::2, 3:],
        base[0, 0, 0, :1].expand(2000),
        base[1:2, 2, 3],
    ]
    assert_stats_agree(tensor_stats(tensors), [tensor.clone() for tensor in tensors])


def test_dense_tensors_are_not_copied_whatever_their_strides() -> None:
    base = torch.randn(6, 5, 4, 3)
    for tensor in (base, base.permute(3, 1, 0, 2), base[2:4].transpose(1, 2)):
        assert stats_module.flat_values(tensor).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(("bound", "count"), [(math.inf, 2), (math.nan, 0), (0.0, 0)])
@pytest.mark.parametrize("may_sync", [True, False])
def test_bounds_of_extreme_scales_count_all_or_nothing(
    bound: float, count: int, may_sync: bool
) -> None:
    values = torch.tensor([0.0, 1e-30, 3.0, math.nan])
    stats = rows.row_stats([values], torch.tensor(bound), may_sync=may_sync)[0]
    assert stats[StatField.SUBNORMALS] == count
    assert stats[StatField.ZEROS] == 1


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_sparse_tensors_count_stored_values() -> None:
    dense = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, -3.0]])
    rows = torch.tensor([[1.0, 0.0], [2.0, 4.0], [0.0, 8.0]])
    coo = torch.sparse_coo_tensor([[1, 1, 4]], rows, (9, 2), check_invariants=True)
    tensors = [coo, dense.to_sparse_csr(), dense]
    assert stored_numels(tensors) == (6, 2, 6)
    stored = [torch.tensor([1.0, 0, 2, 4, 0, 8]), torch.tensor([2.0, -3.0]), dense]
    assert_stats_agree(tensor_stats(tensors), stored)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_complex_numbers_are_two_values(dtype: torch.dtype) -> None:
    pairs = torch.randn(7, 5, 2).to(dtype.to_real())
    pairs[3, 2] = torch.tensor([1e-7, math.nan])
    tensor = torch.view_as_complex(pairs)
    assert stored_numels([tensor, tensor.T]) == (70, 70)
    assert_stats_agree(tensor_stats([tensor, tensor.T]), [pairs, pairs.transpose(0, 1)])
    conjugate = pairs * torch.tensor([1, -1])
    assert tensor.conj().is_conj()  # lazy: the memory is unchanged
    assert torch.equal(tensor_stats([tensor.conj()]), tensor_stats([conjugate]))


def test_rows_keep_the_order_of_the_tensors() -> None:
    """Float64 tensors are computed separately."""
    tensors = [torch.full((i + 1,), float(i + 1)) for i in range(6)]
    mixed = [t.double() if i % 2 else t for i, t in enumerate(tensors)]
    assert tensor_stats(mixed)[:, StatField.AMAX].tolist() == [1, 2, 3, 4, 5, 6]


def test_stats_of_parameters_need_no_graph_and_change_nothing() -> None:
    weight = torch.nn.Parameter(torch.randn(2100))
    before, version = weight.detach().clone(), weight._version
    stats = tensor_stats([weight, weight.sigmoid()])
    assert not stats.requires_grad
    assert torch.equal(weight, before)
    assert weight._version == version


def test_stats_are_bitwise_equal_at_any_position_in_the_list() -> None:
    tensors = [torch.randn(n) for n in (130_000, 300, 2100)]
    first = tensor_stats(tensors)
    assert torch.equal(tensor_stats(tensors), first)
    moved = tensor_stats([tensors[2], tensors[0], tensors[1]])
    assert torch.equal(moved[[1, 2, 0]], first)


def test_tensors_without_a_float_dtype_raise() -> None:
    with pytest.raises(ValueError, match=r"a tensor of torch\.int64 at position 1. .* Leave out"):
        tensor_stats([torch.zeros(3), torch.arange(3)])


def test_meta_tensors_raise() -> None:
    with pytest.raises(ValueError, match=r"meta tensor of shape \[2\] at position 0.*to_empty"):
        tensor_stats([torch.zeros(2, device="meta")])


class _Syncs(TorchDispatchMode):
    """Records operators that return a number to the host or make a shape from numbers."""

    NAMES = ("_local_scalar_dense", "is_nonzero", "item", "equal", "nonzero", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.all = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.all += 1
        self.found += [name] * (name in self.NAMES)
        return func(*args, **kwargs or {})


@pytest.mark.slow
@pytest.mark.parametrize("is_looking", [True, False])
def test_stats_never_read_a_number_from_a_tensor(
    request: pytest.FixtureRequest, is_looking: bool
) -> None:
    tensors = planted_tensors(6)
    with _Syncs() as control:
        torch.ones(1).item()
        bool(torch.ones(1) > 0)
    assert len(control.found) >= 2
    if not is_looking:
        request.getfixturevalue("_unlooked")
    with _Syncs() as syncs:
        tensor_stats(tensors, scale=torch.tensor(8.0), unscale=torch.tensor(0.5))
    assert syncs.all > 20
    assert syncs.found == []


@pytest.fixture
def _process_group() -> Iterator[None]:
    """Create a process group with one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
def test_dtensors_contribute_their_local_shards() -> None:
    mesh = init_device_mesh("cpu", (1,))
    shard = torch.randn(5, 300)
    # This rank knows only the number of another rank's rows.
    weight = DTensor.from_local(shard, mesh, [Shard(0)], shape=(10, 300), stride=(300, 1))
    assert weight.shape == (10, 300)
    assert stored_numels([weight]) == (1500,)
    assert_stats_agree(tensor_stats([torch.nn.Parameter(weight), shard[1]]), [shard, shard[1]])


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_segments_reduce_equally_with_and_without_segment_reduce(reduce: str) -> None:
    values, lengths = torch.randn(40, 3, dtype=torch.float64), (7, 0, 1, 32, 0)
    together = rows._reduce_segments(values, lengths, reduce)
    one_by_one = rows._reduce_segments_one_by_one(values, lengths, reduce)
    torch.testing.assert_close(together, one_by_one, rtol=1e-13, atol=1e-13)
    assert torch.equal(one_by_one[2], values[7])
