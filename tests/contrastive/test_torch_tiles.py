"""The torch tile backend: its contract on shards, its tiles' size, and the memory it takes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp import ContrastiveLoss
from lightning_mp.contrastive.infonce import InfoNCE, Plan
from lightning_mp.contrastive.ring import Ring
from lightning_mp.contrastive.torch_tiles import DEFAULT_WORKSPACE_BYTES, TorchTiles
from tests.reference.contrastive import relative_error


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
    scale = torch.tensor(1.5)
    # Both sweeps add to what is there.
    row_lse, column_lse = torch.randn(b).double(), torch.randn(m).double()
    expected_row = torch.logaddexp(row_lse, logits.logsumexp(1))
    expected_column = torch.logaddexp(column_lse, logits.logsumexp(0))
    tiles.lse_sweep(rows, columns, scale, row_lse, column_lse, diagonal)
    # Logits here reach 40, whose fp32 neighbours are 3.8e-6 apart, before D sums are rounded.
    for lse, expected in ((row_lse, expected_row), (column_lse, expected_column)):
        assert (lse - expected).abs().max() < 4e-5

    softmax = (logits - row_lse[:, None]).exp() + (logits - column_lse).exp()
    d_rows, d_columns = torch.ones(b, 24), torch.ones(m, 24)
    tiles.grad_sweep(rows, columns, scale, row_lse, column_lse, d_rows, d_columns, diagonal)
    assert relative_error(d_rows - 1, softmax @ columns.double()) < 2e-5
    assert relative_error(d_columns - 1, softmax.T @ rows.double()) < 2e-5
    only_rows = torch.ones(b, 24)
    tiles.grad_sweep(rows, columns, scale, row_lse, column_lse, only_rows, None, diagonal)
    assert torch.equal(only_rows, d_rows)


@pytest.mark.parametrize("width", [1, 72, 512, 4096])
@pytest.mark.parametrize("budget", [2**20, 2**24, 2**30])
def test_tile_size_is_the_largest_that_fits_the_budget(width: int, budget: int) -> None:
    columns = TorchTiles(budget).tile_size(width, torch.float32, torch.device("cpu"))
    needed = [4 * (4 * t * t + 5 * t * width) for t in (columns, columns + 64)]
    assert columns % 64 == 0
    assert columns == 64 or needed[0] <= budget
    assert needed[1] > budget


def _visible_loss(image: Tensor, text: Tensor, scale: Tensor, workspace: int) -> Tensor:
    """The loss outside its operator, into which dispatch modes do not see."""
    needs_grad = (x.requires_grad for x in (image, text, scale))
    plan = Plan(Ring([len(image)]), TorchTiles(workspace), *needs_grad)
    return InfoNCE.apply(image, text, scale, None, plan)


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made inside occupied at a time, each storage once."""

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
        alive = {
            key: (weak, size)
            for key, (weak, size) in self._storages.items()
            if not torch.UntypedStorage._expired(weak)
        }
        self._storages = alive
        self.peak = max(self.peak, sum(size for _, size in alive.values()))
        return result


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("b", [512, 2048])
def test_loss_takes_the_workspace_and_memory_linear_in_the_batch(
    b: int, dtype: torch.dtype
) -> None:
    width, workspace = 64, 2**20
    image, text = (torch.randn(b, width, dtype=dtype, requires_grad=True) for _ in range(2))
    with PeakBytes() as bytes_made:
        _visible_loss(image, text, torch.tensor(0.1), workspace).backward()
    # Gradients in fp32 and in the features' dtype, float64 copies of a chunk, vectors in float64.
    linear = b * width * 4 * 8 + 24 * b * 8
    assert b * b * 4 > workspace + linear or b == 512, "a b x b matrix must be what breaks this"
    assert bytes_made.peak < workspace + linear


def _addmm_flops(total: Any, left: Any, right: Any, **kwargs: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


@pytest.mark.parametrize(
    ("trained", "units"), [("image text scale", 4), ("image", 3), ("text scale", 3), ("", 1)]
)
def test_loss_takes_four_units_of_work_and_fewer_with_a_locked_tower(
    trained: str, units: int
) -> None:
    b, width = 333, 48
    inputs = {
        "image": torch.randn(b, width),
        "text": torch.randn(b, width),
        "scale": torch.ones(()),
    }
    inputs = {name: x.requires_grad_(name in trained.split()) for name, x in inputs.items()}
    counted = {torch.ops.aten.addmm_: _addmm_flops}  # torch counts only the one out of place
    for loss_function in (lambda *x: _visible_loss(*x, 2**20), ContrastiveLoss()):
        with FlopCounterMode(display=False, custom_mapping=counted) as counter:
            loss = loss_function(*inputs.values())
            if trained:
                loss.backward()
        # What is multiplied, and what the operator tells those who count.
        assert counter.get_total_flops() == units * 2 * b * b * width


def test_default_workspace_is_the_documented_one() -> None:
    assert DEFAULT_WORKSPACE_BYTES == {"cpu": 32 * 2**20, "cuda": 512 * 2**20}
    assert "`None`: 32 MiB, on CUDA 512 MiB" in (ContrastiveLoss.__doc__ or "")
