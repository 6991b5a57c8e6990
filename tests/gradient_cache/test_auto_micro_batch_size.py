"""`micro_batch_size="auto"` finds the largest size that fits, without side effects."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from lightning_mp import GradientCache
from lightning_mp.gradient_cache._served import auto_size, micro_batches
from tests.fake_memory import SmallCuda
from tests.processes import run_ranks

WIDTH, LAYERS, BATCH = 64, 10, 200
DEVICE = torch.device("cuda", 0)
# Bytes of a row when its backward begins: input, tanhs, cotangent and two gradients.
ROW_BYTES = (1 + LAYERS + 3) * WIDTH * 4


class Tower(nn.Module):
    """Layers of tanh, each of which saves its output; records the number of rows of each call."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = dropout
        self.register_buffer("calls", torch.tensor(0))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        self.calls += 1
        x = F.dropout(x, self.dropout) if self.dropout else x
        x = self.linear(x)
        for _ in range(LAYERS):
            x = x.tanh()
        return x


def gradient_of(cache: GradientCache, tower: Tower, batch: Tensor) -> Tensor:
    torch.manual_seed(1)
    cache.call(tower, batch).square().sum().backward()
    cache.check()
    gradient, tower.linear.weight.grad = tower.linear.weight.grad, None
    assert gradient is not None
    return gradient


def batch() -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2))


def test_auto_on_a_cpu_stays_within_the_budget() -> None:
    weight_bytes = WIDTH * WIDTH * 4
    for rows in (40, 104):
        # In addition, gradients of weights, independent of the rows, and a few scalars.
        budget = ROW_BYTES * rows - weight_bytes + 16
        cache, tower = GradientCache(micro_batch_size="auto", activation_bytes=budget), Tower()
        gradient_of(cache, tower, batch())
        assert cache.micro_batch_sizes == {"Tower": rows}


class Plain(nn.Linear):
    """A layer whose forward Dynamo compiles, unlike that of a class of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def test_compiled_tower_stays_compiled_after_the_search() -> None:
    cache, counter = (
        GradientCache(micro_batch_size="auto", activation_bytes=10**5),
        CompileCounter(),
    )
    tower = Plain(WIDTH, WIDTH)
    tower.compile(backend=counter, fullgraph=True)
    cache.call(tower, batch()).sum().backward()
    assert counter.frame_count > 0


def test_auto_takes_the_whole_batch_if_it_fits_and_at_least_one_row() -> None:
    for budget, rows in ((2**30, BATCH), (1, 1)):
        cache = GradientCache(micro_batch_size="auto", activation_bytes=budget)
        tower = Tower() if rows > 1 else _without_gradients(Tower())
        cache.call(tower, batch())
        assert cache.micro_batch_sizes == {"Tower": rows}


def _without_gradients(tower: Tower) -> Tower:
    return tower.requires_grad_(False)


def test_probes_have_no_side_effects() -> None:
    found = GradientCache(micro_batch_size="auto", activation_bytes=ROW_BYTES * 40)
    tower = Tower(dropout=0.5)
    gradient = gradient_of(found, tower, batch())
    rows = found.micro_batch_sizes["Tower"]
    assert 32 <= rows < BATCH
    assert tower.calls == 1  # buffers count calls, not micro-batches or probes
    given = GradientCache(micro_batch_size=rows)
    assert torch.equal(gradient, gradient_of(given, Tower(dropout=0.5), batch()))


def test_probes_in_a_checkpoint_around_the_tower_do_not_run_it_again() -> None:
    cache, tower = GradientCache(micro_batch_size="auto", activation_bytes=ROW_BYTES * 40), Tower()
    with cache.serving(nn.ModuleDict({"tower": tower}), ["tower"]):
        features = checkpoint(tower, batch(), use_reentrant=False)
    features.square().sum().backward()
    expected = torch.autograd.grad(tower(batch()).square().sum(), tower.linear.weight)[0]
    torch.testing.assert_close(tower.linear.weight.grad, expected, rtol=1e-4, atol=1e-5)


def test_auto_size_is_kept_by_later_calls_and_resumed_runs() -> None:
    cache, tower = GradientCache(micro_batch_size="auto", activation_bytes=ROW_BYTES * 40), Tower()
    gradient_of(cache, tower, batch())
    rows = cache.micro_batch_sizes["Tower"]
    resumed = GradientCache(micro_batch_size="auto", activation_bytes=1)
    resumed.load_state_dict(cache.state_dict())
    for one in (cache, resumed):
        gradient_of(one, tower, batch())
        tower.seen = []
        gradient_of(one, tower, batch()[: 2 * rows])
        assert tower.seen == [rows] * 4  # two micro-batches and their replays


def test_towers_of_one_class_have_their_own_auto_sizes() -> None:
    cache = GradientCache(micro_batch_size="auto", activation_bytes=ROW_BYTES * 40)
    small, large = nn.Sequential(nn.Linear(WIDTH, 1)), nn.Sequential(Tower())
    for _ in range(2):
        cache.call(small, batch())
        cache.call(large, batch())
    assert list(cache.micro_batch_sizes) == ["Sequential", "Sequential (2)"]
    assert cache.micro_batch_sizes["Sequential"] > cache.micro_batch_sizes["Sequential (2)"]


def test_sparse_gradients_are_left_out_of_the_measured_memory() -> None:
    cache, tower = GradientCache(micro_batch_size="auto"), nn.EmbeddingBag(5, 4, sparse=True)
    cache.call(tower, torch.zeros(8, 3, dtype=torch.long)).sum().backward()
    assert cache.micro_batch_sizes == {"EmbeddingBag": 8}
    assert tower.weight.grad.is_sparse


def test_call_without_grad_has_its_own_auto_size() -> None:
    cache, tower = GradientCache(micro_batch_size="auto", activation_bytes=ROW_BYTES * 40), Tower()
    gradient_of(cache, tower, batch())
    with torch.no_grad():
        cache.call(tower, batch())
    sizes = cache.micro_batch_sizes
    assert sizes["Tower (without grad)"] > 2 * sizes["Tower"]  # 3 tensors per row instead of 13


def _find_with_budget_of_rank(rank: int) -> dict[str, int]:
    tower, budget = Tower(), ROW_BYTES * (20 + 40 * rank)
    cache = GradientCache(micro_batch_size="auto", activation_bytes=budget)
    if dist.is_initialized():  # other ranks would wait for the size
        with pytest.raises(ValueError, match=r"an empty batch to the tower `Tower` .*\[0, 64\]"):
            cache.call(tower, batch()[:0])
    gradient_of(cache, tower, batch())
    return cache.micro_batch_sizes


@pytest.mark.distributed
def test_all_ranks_use_the_smallest_auto_size() -> None:
    alone = _find_with_budget_of_rank(0)
    assert run_ranks(_find_with_budget_of_rank, 2) == [alone, alone]
    assert _find_with_budget_of_rank(1) != alone


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    # At its real size, the loss's workspace would dominate the reserve.
    monkeypatch.setattr(auto_size, "_LOSS_BYTES", 0)
    micro_batches._copying_stream.cache_clear()
    yield SmallCuda
    micro_batches._copying_stream.cache_clear()


# Memory of a step besides activations: four copies of the weights, eight of the features.
BESIDE = 4 * WIDTH * WIDTH * 4 + 8 * BATCH * WIDTH * 4


@pytest.mark.parametrize("rows", [pytest.param(8, marks=pytest.mark.slow), 64])
def test_auto_on_cuda_doubles_rows_until_memory_runs_out(small_gpu: Any, rows: int) -> None:
    expected = gradient_of(GradientCache(micro_batch_size=BATCH), Tower(), batch())
    # Between the bytes of `rows` and of twice as many; the fake does not see backwards.
    memory = BESIDE + 3 * rows * (LAYERS + 1) * WIDTH * 4 // 2
    with small_gpu(memory) as gpu:
        cache, tower = GradientCache(micro_batch_size="auto", device=DEVICE, prefetch=0), Tower()
        gradient = gradient_of(cache, tower, batch().pin_memory())
        assert cache.micro_batch_sizes == {"Tower": rows}
        assert gpu.times_full == 1
    assert max(tower.seen) <= 2 * rows
    assert tower.seen.count(rows) == 1 + 2 * (BATCH // rows)  # a probe, the call, the replay
    assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-5)


def test_auto_on_cuda_keeps_two_rows_if_the_rest_of_a_step_does_not_fit(small_gpu: Any) -> None:
    with small_gpu(BESIDE // 2):
        cache = GradientCache(micro_batch_size="auto", device=DEVICE, prefetch=0)
        cache.call(Tower(), batch().pin_memory())
        assert cache.micro_batch_sizes == {"Tower": 2}


def test_auto_on_cuda_takes_the_whole_batch_if_it_fits(small_gpu: Any) -> None:
    with small_gpu(2**40) as gpu:
        cache, tower = GradientCache(micro_batch_size="auto", device=DEVICE), Tower()
        gradient_of(cache, tower, batch().pin_memory())
        assert (cache.micro_batch_sizes, gpu.times_full) == ({"Tower": BATCH}, 0)


def test_auto_on_cuda_stays_within_activation_bytes(small_gpu: Any) -> None:
    with small_gpu(2**40) as gpu:
        budget = 50 * LAYERS * WIDTH * 4
        cache = GradientCache(micro_batch_size="auto", activation_bytes=budget, device=DEVICE)
        gradient_of(cache, Tower(), batch().pin_memory())
        assert 25 <= cache.micro_batch_sizes["Tower"] <= 50
        assert gpu.times_full == 0


class Part:
    """A stand-in for a module that `fully_shard` was applied to."""

    def set_requires_gradient_sync(self, is_on: bool, recurse: bool) -> None:
        pass


def test_auto_of_a_sharded_tower_probes_in_step_with_other_ranks(
    small_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = "lightning_mp.gradient_cache._served.towers"
    monkeypatch.setattr(f"{home}.sharded_modules", lambda module: [Part()])
    row = LAYERS * WIDTH * 4
    # Half of the free memory is usable, because a probe may take twice its limit.
    with small_gpu(2 * (BESIDE + 60 * row)) as gpu:
        cache = GradientCache(micro_batch_size="auto", device=DEVICE)
        cache.call(Tower(), batch().pin_memory())
        assert 30 <= cache.micro_batch_sizes["Tower"] <= 60
        assert gpu.times_full == 0


def test_too_little_memory_for_any_row_raises(small_gpu: Any) -> None:
    with small_gpu(LAYERS * WIDTH) as gpu:
        cache, tower = GradientCache(micro_batch_size="auto", device=DEVICE), Tower()
        with pytest.raises(RuntimeError, match="too little memory for 2 rows of the tower `Tower`"):
            gradient_of(cache, tower, batch().pin_memory())
        assert gpu.times_full > 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"micro_batch_size": "all"}, "must be 'auto' or an integer of at least 1"),
        ({"activation_bytes": 0}, r"`activation_bytes` must be an integer of at least 1"),
    ],
)
def test_invalid_arguments_raise(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GradientCache(**{"micro_batch_size": "auto", **settings})
