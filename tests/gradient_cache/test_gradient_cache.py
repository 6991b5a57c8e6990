"""`GradientCache` without a Trainer."""

import functools
import random
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.rnn import pack_sequence

from lightning_mp.gradient_cache.gradient_cache import GradientCache
from tests.processes import run_ranks

CPU = torch.device("cpu")
Output = namedtuple("Output", ["features", "count"])


def make_cache(rows: int = 3) -> GradientCache:
    return GradientCache(micro_batch_size=rows, device=CPU)


class Draws(nn.Module):
    """Draws from torch, Python and numpy, and stores the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.drawn: list[tuple[Any, ...]] = []

    def forward(self, batch: Tensor) -> Tensor:
        self.drawn.append((torch.rand(3).tolist(), random.random(), np.random.rand()))
        return batch * self.weight


def test_replay_draws_the_same_numbers_and_leaves_the_generators_alone() -> None:
    tower = Draws()
    features = make_cache().call(tower, torch.randn(8, 4))
    before = (torch.rand(1), random.random(), np.random.rand())
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[2])
    features.sum().backward()
    assert tower.drawn[:3] == tower.drawn[3:]
    assert len({str(draw) for draw in tower.drawn}) == 3
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[2] == states[2]
    assert (torch.rand(1), random.random(), np.random.rand()) != before


def test_gradients_of_parameters_and_inputs_equal_autograd() -> None:
    tower = nn.Bilinear(5, 6, 7).double()
    left = torch.randn(10, 5, dtype=torch.float64, requires_grad=True)
    right = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(10, 7, dtype=torch.float64)
    (tower(left, right) * weight).sum().backward()
    expected = [x.grad.clone() for x in (left, right, *tower.parameters())]
    for x in (left, right, *tower.parameters()):
        x.grad = None
    (make_cache().call(tower, left, right) * weight).sum().backward()
    for x, value in zip((left, right, *tower.parameters()), expected, strict=True):
        assert torch.allclose(x.grad, value, rtol=1e-12)


class Structured(nn.Module):
    """Returns a nested output, partly without gradients, and takes a mask shared by all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: dict[str, Tensor], *, mask: Tensor, flag: bool) -> dict[str, Any]:
        features = self.linear(batch["x"]) * mask
        return {"out": Output(features, batch["x"].argmax(1)), "flag": flag, "none": None}


def test_nested_outputs_masks_and_flags_keep_their_structure() -> None:
    tower, mask = Structured(), torch.rand(4, requires_grad=True)
    batch = {"x": torch.randn(7, 4)}
    plain = tower(batch, mask=mask, flag=True)
    plain["out"].features.square().sum().backward()
    expected = [mask.grad.clone(), tower.linear.weight.grad.clone()]
    mask.grad = tower.linear.weight.grad = None
    cached = make_cache().call(tower, batch, mask=mask, flag=True)
    assert isinstance(cached["out"], Output)
    assert (cached["flag"], cached["none"]) == (True, None)
    assert torch.equal(cached["out"].count, plain["out"].count)
    assert not cached["out"].count.requires_grad
    cached["out"].features.square().sum().backward()
    assert torch.allclose(mask.grad, expected[0])
    assert torch.allclose(tower.linear.weight.grad, expected[1])


def test_two_backwards_through_one_call_accumulate() -> None:
    tower = nn.Linear(4, 4)
    features = make_cache().call(tower, torch.ones(7, 4))
    features.sum().backward(retain_graph=True)
    once = tower.weight.grad.clone()
    features.sum().backward()
    assert torch.allclose(tower.weight.grad, 2 * once)


def test_backward_frees_the_batch_and_a_second_one_raises() -> None:
    tower, batch = nn.Linear(4, 4), torch.randn(7, 4)
    loss, memory = make_cache().call(tower, batch).sum(), weakref.ref(batch.untyped_storage())
    del batch
    assert memory() is not None
    loss.backward()
    assert memory() is None, "a loss that a user keeps holds no batch"
    with pytest.raises(RuntimeError, match="second backward.*retain_graph=True"):
        loss.backward()


def test_backward_after_an_optimizer_step_raises() -> None:
    tower, head = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), nn.Linear(4, 4)
    features = make_cache().call(tower, torch.ones(7, 4))
    with torch.no_grad():
        head.weight.mul_(2)  # the tower does not use the head
    features.sum().backward(retain_graph=True)
    with torch.no_grad():
        tower[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        features.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_call_without_grad_returns_plain_features(mode: Callable[[], Any]) -> None:
    tower = nn.Linear(4, 4)
    with mode():
        assert not make_cache().call(tower, torch.ones(7, 4)).requires_grad
    frozen = nn.Linear(4, 4).requires_grad_(False)
    assert not make_cache().call(frozen, torch.ones(7, 4)).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replay_uses_the_autocast_of_the_first_run(dtype: torch.dtype) -> None:
    tower = nn.Linear(4, 4)
    seen: list[torch.dtype] = []
    tower.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=dtype):
        features = make_cache().call(tower, torch.ones(7, 4))
    features.sum().backward()  # outside of autocast, as in Lightning
    assert seen == [dtype] * 6
    seen.clear()
    with torch.autocast("cpu", dtype=dtype):
        with torch.autocast("cpu", enabled=False):
            features = make_cache().call(tower, torch.ones(7, 4))
        features.sum().backward()
    assert seen == [torch.float32] * 6


def test_autocast_weight_cache_does_not_cut_the_graph_of_later_calls() -> None:
    tower = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
        make_cache().call(tower, torch.ones(7, 4))
        tower(torch.ones(7, 4)).sum().backward()
    assert tower.weight.grad is not None


class Counts(nn.Module):
    """Buffers of several kinds: a count, an average, a buffer replaced by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))

    def forward(self, batch: Tensor) -> Tensor:
        self.steps += 1
        self.mean.lerp_(batch.mean(), 0.5)
        self.assigned = 0.5 * self.assigned + 0.5 * batch.mean()
        return batch * self.weight


def test_buffers_are_updated_once_a_call_and_not_by_the_replay() -> None:
    tower = Counts()
    assigned_before, version = tower.assigned, tower.assigned._version
    batch = torch.arange(7.0)
    features = make_cache().call(tower, batch)
    for _ in range(2):
        assert tower.steps == 1
        assert tower.mean.item() == pytest.approx(0.5 * batch.mean().item())
        assert tower.assigned.item() == pytest.approx(0.5 * batch.mean().item())
        assert tower.assigned is not assigned_before, "as where the tower runs plainly"
        assert assigned_before._version == version
        features.sum().backward(retain_graph=True)


class Centers(nn.Module):
    """Subtracts a center and multiplies by a sparse matrix; `training_step` moves the center."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("adjacency", torch.eye(4).to_sparse())

    def forward(self, batch: Tensor) -> Tensor:
        return self.linear((self.adjacency @ batch.T).T) - self.center


def test_buffer_changed_before_the_backward_has_its_first_value_in_the_replay() -> None:
    tower, batch = Centers(), torch.randn(7, 4)
    features = make_cache().call(tower, batch)
    expected = torch.autograd.grad(tower(batch).square().sum(), tower.linear.weight)[0]
    tower.center += 1
    features.square().sum().backward()
    torch.testing.assert_close(tower.linear.weight.grad, expected)
    assert torch.equal(tower.center, torch.ones(4))


def test_partial_of_a_module_updates_its_buffers_once() -> None:
    tower = nn.BatchNorm1d(4)
    make_cache().call(functools.partial(tower), torch.randn(8, 4)).sum().backward()
    assert tower.num_batches_tracked == 1


def test_gradients_of_a_shared_input_in_half_precision_are_summed_in_fp32() -> None:
    shared = torch.zeros(1, 4, dtype=torch.bfloat16, requires_grad=True)
    cache = GradientCache(micro_batch_size=1)
    cache.call(torch.add, torch.ones(1024, 4, dtype=torch.bfloat16), shared).sum().backward()
    assert shared.grad.eq(1024).all()  # a sum in bf16 stops at 256


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.jagged])
def test_shared_inputs_of_other_layouts_get_gradients(layout: torch.layout) -> None:
    values, batch = torch.ones(6, 4, requires_grad=True), torch.randn(7, 4)
    if layout is torch.jagged:
        shared = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 6]))
    else:
        shared = values.to_sparse(1)

    def tower(batch: Tensor, shared: Tensor) -> Tensor:
        part = shared.values() if layout is torch.jagged else shared.to_dense()
        return batch * part.sum(0)

    make_cache().call(tower, batch, shared).sum().backward()
    torch.testing.assert_close(values.grad, batch.sum(0).expand(6, 4))


@pytest.mark.parametrize(
    ("tower", "message"),
    [
        (lambda x: x.sum(), r"shape \[\] for a micro-batch, where 3 rows"),
        (lambda x: x @ x.T, r"expected"),
        (lambda x: x[:1], r"shape \[1, 4\] for a micro-batch, where 3 rows"),
        (lambda x: x.to_sparse(), r"shape \[3, 4\] for a micro-batch, where a dense tensor was"),
    ],
)
def test_output_without_rows_raises(tower: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_cache().call(tower, torch.ones(7, 4))


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(1, 4)] * 7, layout=torch.jagged)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no arguments"),
        ((1.0,), "type float"),
        ((jagged(),), r"`input` \(nested or sparse\)"),
        ((torch.eye(4).to_sparse(),), r"`input` \(nested or sparse\).*pad nested, sparse"),
        ((pack_sequence([torch.ones(1, 4)] * 7),), "whole: `input` a PackedSequence"),
    ],
)
def test_arguments_without_a_batch_raise(arguments: tuple[Any, ...], message: str) -> None:
    tower = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=message):
        make_cache().call(tower, *arguments)


def test_rows_that_a_step_lacks_have_gradients_of_zero() -> None:
    tower = nn.Linear(4, 4)
    features = make_cache().call(tower, torch.ones(0, 4))
    assert features.shape == (0, 4)
    features.sum().backward()
    assert not tower.weight.grad.any()
    elsewhere = GradientCache(micro_batch_size=3, device="meta")
    assert elsewhere.call(nn.Linear(4, 4, device="meta"), torch.ones(0, 4)).is_meta


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_micro_batches_from_the_host_are_copied_completely(prefetch: int, pinned: bool) -> None:
    batch = torch.randint(0, 255, (1003, 3, 64, 64), dtype=torch.uint8)
    batch = batch.pin_memory() if pinned else batch
    device = torch.device("cuda", torch.cuda.current_device())
    seen = []

    def tower(images: Tensor, flag: str) -> Tensor:
        seen.append((len(images), images.device, images.dtype, flag))
        return images.flatten(1).float()

    cache = GradientCache(micro_batch_size=100, device=device, prefetch=prefetch)
    assert torch.equal(cache.call(tower, batch, "flag").cpu(), batch.flatten(1).float())
    assert seen == [(rows, device, torch.uint8, "flag") for rows in [100] * 10 + [3]]


@pytest.mark.gpu
def test_replay_on_a_gpu_draws_the_same_dropout_masks() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    tower = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)).to(device)
    seen: list[Tensor] = []
    tower.register_forward_hook(lambda module, args, output: seen.append(output.detach() == 0))
    cache = GradientCache(micro_batch_size=3, device=device)
    features = cache.call(tower, torch.randn(8, 4, device=device))
    torch.rand(5, device=device)
    features.sum().backward()
    assert all(torch.equal(*masks) for masks in zip(seen[:3], seen[3:], strict=True))


class Wrapper:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def encode(self, batch: Tensor) -> Tensor:
        return self.model(batch)


def test_function_has_the_modules_of_its_closure_object_and_arguments() -> None:
    def norm_after_call(way: Callable[[GradientCache, nn.Module, Tensor], Tensor]) -> Tensor:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
        features = way(make_cache(), model, torch.arange(32.0).view(8, 4))
        if features.requires_grad:
            features.sum().backward()
        assert model[0].num_batches_tracked == 1
        return model[0].running_mean

    def through_two(cache: GradientCache, model: nn.Module, batch: Tensor) -> Tensor:
        return cache.call(lambda x: model[1](model[0](x)), batch)

    cache, one, two = make_cache(), nn.Linear(4, 4), nn.Linear(4, 4)
    for _ in range(2):
        cache.call(lambda x: one(x) + two(x), torch.ones(7, 4))
    assert list(cache.roles) == ["<lambda>"]
    expected = norm_after_call(lambda cache, model, batch: cache.call(model, batch))
    ways: list[Callable[[GradientCache, nn.Module, Tensor], Tensor]] = [
        through_two,
        lambda cache, model, batch: cache.call(torch.no_grad()(lambda x: model(x)), batch),
        lambda cache, model, batch: cache.call(Wrapper(model).encode, batch),
        lambda cache, model, batch: cache.call(functools.partial(_apply, model), batch),
        lambda cache, model, batch: cache.call(_apply, model, batch),
    ]
    for way in ways:
        assert torch.equal(norm_after_call(way), expected)


def _apply(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def _refused_towers(rank: int) -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    static = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), static_graph=True)
    messages = []
    for tower in (FullyShardedDataParallel(nn.Linear(4, 4), device_id=CPU), static):
        with pytest.raises(ValueError, match="replays") as error:
            make_cache().call(tower, torch.randn(7, 4))
        messages.append(str(error.value))
    return messages


@pytest.mark.distributed
def test_towers_whose_wrapper_would_not_reduce_the_gradients_of_replays_raise() -> None:
    ((fsdp, static),) = run_ranks(_refused_towers, 1)
    assert "contains `FullyShardedDataParallel`" in fsdp
    assert "in DDP with `static_graph=True`" in static


def _train_without_finish(rank: int) -> tuple[bool, str]:
    from torch.distributed.fsdp import fully_shard

    tower, cache = nn.Linear(4, 4), make_cache()
    fully_shard(tower, mesh=init_device_mesh("cpu", (1,)))
    cache.call(tower, torch.randn(7, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"Call `cache\.finish\(\)` after") as error:
        cache.call(tower, torch.randn(7, 4))
    cache.finish()
    return tower.weight.grad is not None, str(error.value)


@pytest.mark.distributed
def test_next_call_of_a_sharded_tower_before_finish_raises() -> None:
    ((is_finished, message),) = run_ranks(_train_without_finish, 1)
    assert is_finished
    assert "its gradients are missing" in message
