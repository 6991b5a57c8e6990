"""The torch tile backend: sweeps of shards, tile sizes, memory and stored tiles."""

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp import ContrastiveLoss, SigmoidContrastiveLoss
from lightning_mp.contrastive._tiles.tile_backend import Derivatives, Logits, Vectors
from lightning_mp.contrastive._tiles.torch_tiles import DEFAULT_WORKSPACE_BYTES, TorchTiles
from tests.contrastive.visible import visible
from tests.reference.contrastive import HARD, hard_features, reference, relative_error

# Some scales and features here are meant to be extreme.
pytestmark = pytest.mark.filterwarnings("ignore:Passed .*(negative scale|Normalize features)")

CPU = torch.device("cpu")


def _shard(b: int, m: int, width: int, diagonal: int | None) -> tuple[Tensor, ...]:
    rows, columns = torch.randn(b, width), torch.randn(m, width)
    logits = 1.5 * rows.double() @ columns.double().T
    positives = torch.zeros(b, m, dtype=torch.bool)
    if diagonal is not None:
        index = torch.arange(b)
        inside = (index + diagonal >= 0) & (index + diagonal < m)
        positives[index[inside], index[inside] + diagonal] = True
    return rows, columns, logits.masked_fill(positives, -torch.inf)


@pytest.mark.parametrize("diagonal", [None, 0, 40, -150, 256, -192, 1000])
@pytest.mark.parametrize(("b", "m"), [(193, 257), (257, 193), (1, 300), (300, 1), (64, 64)])
def test_sweeps_of_a_shard_equal_float64(b: int, m: int, diagonal: int | None) -> None:
    tiles = TorchTiles(2**18)
    rows, columns, logits = _shard(b, m, 24, diagonal)
    swept = Logits(rows, columns, torch.tensor(1.5), diagonal)
    # Both sweeps add to the existing values.
    row_lse, column_lse = torch.randn(b).double(), torch.randn(m).double()
    expected_row = torch.logaddexp(row_lse, logits.logsumexp(1))
    expected_column = torch.logaddexp(column_lse, logits.logsumexp(0))
    tiles.lse_sweep(swept, Vectors(row_lse, column_lse))
    # fp32 logits near 40 are 3.8e-6 apart, and the D sums of each logit are rounded.
    for lse, expected in ((row_lse, expected_row), (column_lse, expected_column)):
        assert (lse - expected).abs().max() < 4e-5

    softmax = (logits - row_lse[:, None]).exp() + (logits - column_lse).exp()
    d_rows, d_columns = torch.ones(b, 24), torch.ones(m, 24)
    lses = Vectors(row_lse, column_lse)
    tiles.grad_sweep(swept, lses, Derivatives(d_rows, d_columns))
    assert relative_error(d_rows - 1, softmax @ columns.double()) < 2e-5
    assert relative_error(d_columns - 1, softmax.T @ rows.double()) < 2e-5
    only_rows = torch.ones(b, 24)
    tiles.grad_sweep(swept, lses, Derivatives(only_rows, None))
    assert torch.equal(only_rows, d_rows)


@pytest.mark.parametrize("width", [1, 72, 512, 4096])
@pytest.mark.parametrize("budget", [2**20, 2**24, 2**30])
def test_tile_size_is_the_largest_that_fits_the_budget(width: int, budget: int) -> None:
    columns = TorchTiles(budget).tile_size(width, torch.float32, CPU)
    budget = min(budget // 2, DEFAULT_WORKSPACE_BYTES["cpu"])  # the rest is for stored tiles
    needed = [4 * (4 * t * t + 5 * t * width) for t in (columns, columns + 64)]
    assert columns % 64 == 0
    assert columns == 64 or needed[0] <= budget
    assert needed[1] > budget


class PeakBytes(TorchDispatchMode):
    """Records the peak bytes of tensors created inside; each storage counts once."""

    def __enter__(self) -> "PeakBytes":
        self._storages: dict[int, tuple[object, int]] = {}
        self.peak = 0
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: ANN001
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (storage._weak_ref(), storage.nbytes())
        self.peak = max(self.peak, self.alive())
        return result

    def alive(self) -> int:
        """Return the bytes of live tensors."""
        self._storages = {
            key: (weak, size)
            for key, (weak, size) in self._storages.items()
            if not torch.UntypedStorage._expired(weak)
        }
        return sum(size for _, size in self._storages.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("b", [512, 2048])
def test_memory_is_the_workspace_plus_a_linear_part(b: int, dtype: torch.dtype) -> None:
    width, workspace = 64, 2**20
    image, text = (torch.randn(b, width, dtype=dtype, requires_grad=True) for _ in range(2))
    with visible(), PeakBytes() as bytes_made:
        ContrastiveLoss(workspace_bytes=workspace)(image, text, torch.tensor(0.1)).backward()
    # Gradients in fp32 and in the dtype of the features, float64 copies of a chunk and vectors.
    linear = b * width * 4 * 8 + 24 * b * 8
    assert b * b * 4 > workspace + linear or b == 512, "a b x b matrix must be what breaks this"
    assert bytes_made.peak < workspace + linear


@pytest.mark.parametrize("loss", [ContrastiveLoss, SigmoidContrastiveLoss])
def test_operator_saves_only_two_gradients_for_the_backward(loss: type[ContrastiveLoss]) -> None:
    """Autograd would create zeros for every output, even without a gradient."""
    b, width = 1024, 16
    image, text = (torch.randn(b, width, requires_grad=True) for _ in range(2))
    with PeakBytes() as bytes_made:
        value = loss()(image, text, torch.tensor(0.1))
        # In addition to the features, which are counted as well.
        assert 0 <= bytes_made.alive() - 4 * b * width * 4 < 256
        value.backward()
    # The two gradients before and after the cotangent is applied, and vectors of the input checks.
    assert bytes_made.peak < 6 * b * width * 4 + 24 * b


def _addmm_flops(total: Any, left: Any, right: Any, **kwargs: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


@pytest.mark.parametrize(
    ("trained", "units"), [("image text scale", 4), ("image", 3), ("text scale", 3), ("", 1)]
)
@pytest.mark.parametrize("keeps", [None, "some", "all"])
def test_loss_takes_four_units_of_work_and_fewer_with_stored_tiles_or_a_locked_tower(
    trained: str, units: int, keeps: str | None
) -> None:
    b, width = 333, 48
    # 31 tiles of at most 64 x 112 take 444 kB; a workspace of 1 MiB stores up to half a MiB.
    workspace_bytes = {None: 1, "some": 400_000, "all": 2**20}[keeps]
    tiles = TorchTiles(workspace_bytes)
    size = tiles.stored_values(b, b, torch.float32, CPU)
    again = tiles.multiplied_twice(b, b, width, torch.float32, CPU, size) / b**2
    assert (again > 0, again < 1) == {
        None: (True, False),
        "some": (True, True),
        "all": (False, True),
    }[keeps]
    units -= (1 - again) if trained else 0
    inputs = {
        "image": torch.randn(b, width),
        "text": torch.randn(b, width),
        "scale": torch.ones(()),
    }
    inputs = {name: x.requires_grad_(name in trained.split()) for name, x in inputs.items()}
    counted = {torch.ops.aten.addmm_: _addmm_flops}  # torch counts only `addmm`
    loss_fn = ContrastiveLoss()
    loss_fn.workspace_bytes = workspace_bytes
    for opened in (visible(), contextlib.nullcontext()):
        with opened, FlopCounterMode(display=False, custom_mapping=counted) as counter:
            loss = loss_fn(*inputs.values())
            if trained:
                loss.backward()
        # The counted products of the ops inside, and the count that the operator itself reports.
        assert counter.get_total_flops() == round(units * 2 * b * b * width)


def test_default_workspace_is_the_documented_one() -> None:
    assert DEFAULT_WORKSPACE_BYTES == {"cpu": 32 * 2**20, "cuda": 512 * 2**20}
    said = "`None`: 32 MiB; on CUDA 544 (Triton) or 512 (torch)."
    assert said in " ".join((ContrastiveLoss.__doc__ or "").split())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", HARD)
@pytest.mark.slow
def test_stored_tiles_give_the_gradients_of_recomputed_tiles(case: str, dtype: torch.dtype) -> None:
    image, text, scale = hard_features(333, 48, case)
    image, text = image.to(dtype), text.to(dtype)
    expected = reference(image, text, scale)
    found = {}
    for workspace_bytes in (1, 400_000, 2**22):  # stores no tile, some tiles, all tiles
        leaves = [x.clone().requires_grad_() for x in (image, text)]
        leaves.append(torch.tensor(scale, dtype=torch.float64).requires_grad_())
        loss_fn = ContrastiveLoss()
        loss_fn.workspace_bytes = workspace_bytes
        loss = loss_fn(*leaves)
        loss.backward(retain_graph=True)
        once = [x.grad.clone() for x in leaves]
        loss.backward()
        assert all(torch.equal(x.grad, 2 * g) for x, g in zip(leaves, once, strict=True))
        found[workspace_bytes] = [loss.detach(), *once]
    if case == "converged":
        assert expected.loss < 1e-10
    # The rounding error of an fp32 logit is the relative error of its exponential.
    largest = (scale * image.double() @ text.double().T).abs().amax().item()
    spacing = largest * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    bounds = 4 * max(spacing, 1e-6), torch.finfo(dtype).eps
    for values in found.values():
        for value, right in zip(values, dataclasses.astuple(expected), strict=True):
            assert relative_error(value, right) < sum(bounds)


def test_tiles_are_stored_only_if_gradients_are_needed_and_freed_before_the_backward() -> None:
    image, text = torch.randn(512, 8, requires_grad=True), torch.randn(512, 8)
    made = {}
    for trains in (True, False):
        with torch.set_grad_enabled(trains), visible(), PeakBytes() as made[trains]:
            loss = ContrastiveLoss()(image, text, 1.0)
        assert made[trains].alive() < 4 * 512**2
    assert loss.requires_grad is False
    assert made[True].peak - made[False].peak >= 4 * 512**2


def test_sigmoid_sweep_over_columns_with_some_positives_equals_float64() -> None:
    rows, columns = torch.randn(70, 5), torch.randn(90, 5)
    totals, d_rows = torch.zeros(2, dtype=torch.float64), torch.zeros(70, 5)
    scale, bias = (torch.tensor(value, dtype=torch.float64) for value in (0.5, -1.0))
    own = slice(20, 40)
    swept, gradients = Logits(rows, columns, scale, 3, own), Derivatives(d_rows, None)
    TorchTiles(1).sigmoid_sweep(swept, bias, totals, gradients)
    logits = 0.5 * rows.double() @ columns.double().T - 1
    index = torch.arange(20, 40)
    logits[index, index + 3] = -torch.inf
    right = torch.stack([F.softplus(logits).sum(), logits.sigmoid().sum()])
    assert relative_error(totals, right) < 1e-6
    assert relative_error(d_rows, logits.sigmoid() @ columns.double()) < 1e-6
