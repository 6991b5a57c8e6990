"""`InfClamp` counts the values that it clamps."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lightning_mp.gradient_cache.gradient_cache import GradientCache
from lightning_mp.precision.inf_clamp import InfClamp
from tests.precision.overflowing import Block, batch, overflowing


def test_counts_add_up_over_forwards_and_start_again_when_reset() -> None:
    model = overflowing()
    clamp = InfClamp(["Linear"]).attach(model)
    one = clamped_once(model, clamp)
    model(batch())
    assert clamp.counts().tolist() == [2 * count for count in one]
    before = clamp.counts()
    clamp.reset_counts()
    assert before.tolist() == [2 * count for count in one]  # a copy
    assert clamp.counted() == {"0.fc2": 0, "1.fc2": 0}


def clamped_once(model: nn.Module, clamp: InfClamp) -> list[int]:
    with torch.no_grad():
        model(batch())
    counts = clamp.counts().tolist()
    assert sum(counts) > 0
    return counts


@pytest.mark.slow
def test_clamping_and_counting_read_nothing_on_the_host() -> None:
    """A fake tensor has no data, so every read of a value raises."""
    with FakeTensorMode():
        model = nn.Sequential(Block(dtype=torch.float16), Block(dtype=torch.float16))
        clamp = InfClamp().attach(model)
        x = torch.randn(3, 8, dtype=torch.float16, requires_grad=True)
        model(x).sum().backward()
        assert clamp.counts().shape == (6,)
        clamp.reset_counts()
        with pytest.raises(Exception, match="_local_scalar_dense"):
            clamp.counted()


def test_counts_continue_in_training_after_a_first_forward_in_inference_mode() -> None:
    model = overflowing()
    clamp = InfClamp(["Linear"]).attach(model)
    with torch.inference_mode():
        model(batch())
    one = clamp.counts().tolist()
    model(batch()).sum().backward()
    assert clamp.counts().tolist() == [2 * count for count in one]


@pytest.mark.parametrize("gradient", ["zero", "straight_through"])
def test_values_inside_transforms_are_counted(gradient: str) -> None:
    model, x = overflowing(), batch()
    clamp = InfClamp(["Linear"], gradient=gradient).attach(model)
    one = clamped_once(model, clamp)
    torch.vmap(model)(x).sum().backward()
    assert clamp.counts().tolist() == [2 * count for count in one]
    torch.func.grad(lambda x: model(x).sum())(x)
    assert clamp.counts().tolist() == [3 * count for count in one]


class _Elsewhere:
    """A count that looks as if it were on another device."""

    device = torch.device("cuda:0")

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def to(self, device: torch.device) -> Tensor:
        return self._value.clone()


def test_counts_that_change_device_in_inference_mode_continue() -> None:
    model = overflowing()
    clamp = InfClamp(["Linear"]).attach(model)
    one = clamped_once(model, clamp)
    for counter in clamp._counters:
        counter.value = _Elsewhere(counter.value)
    with torch.inference_mode():
        model(batch())
    model(batch())
    assert clamp.counts().tolist() == [3 * count for count in one]
    clamp.reset_counts()
    assert clamp.counts().tolist() == [0, 0]


def test_loaded_counts_continue_by_name_before_or_after_attach() -> None:
    model = overflowing()
    clamp = InfClamp(["Linear"]).attach(model)
    one = clamped_once(model, clamp)
    state = clamp.state_dict()
    assert state == {"counts": {"0.fc2": one[0], "1.fc2": one[1]}}
    early, late = InfClamp(["1.fc2", "Block"]), InfClamp(["1.fc2", "Block"])
    early.load_state_dict(state)
    early.attach(overflowing())
    late.attach(overflowing()).load_state_dict(state)
    assert early.counted() == late.counted() == {"0": 0, "1": 0, "1.fc2": one[1]}
    assert early.attach(overflowing()).counts().sum() == 0
    assert late.attach(overflowing()).counts().sum() == 0


def test_counts_of_a_model_on_the_meta_device_follow_it() -> None:
    source = overflowing()
    model = copy.deepcopy(source).to("meta")
    clamp = InfClamp(["Linear"]).attach(model)
    model.to_empty(device="cpu").load_state_dict(source.state_dict())
    model(batch())
    assert clamp.counts().tolist() == clamped_once(source, InfClamp(["Linear"]).attach(source))


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_counts_of_a_checkpointed_forward_are_not_doubled(is_reentrant: bool) -> None:
    model = overflowing()
    clamp = InfClamp().attach(model)
    one = clamped_once(model, clamp)
    clamp.reset_counts()
    x = batch().requires_grad_()
    (checkpoint(model, x, use_reentrant=is_reentrant).float().mean() * 2**-12).backward()
    assert clamp.counts().tolist() == one
    assert x.grad.isfinite().all()


def test_counts_of_a_tower_replayed_by_a_gradient_cache_are_not_doubled() -> None:
    model = overflowing()
    clamp = InfClamp().attach(model)
    one = clamped_once(model, clamp)
    clamp.reset_counts()
    cache = GradientCache(micro_batch_size=2, device=torch.device("cpu"))
    cache.call(model, batch()).float().sum().backward()
    assert clamp.counts().tolist() == one


@pytest.mark.gpu
def test_clamp_on_a_gpu_under_autocast_follows_the_model_without_sync() -> None:
    model = overflowing().float()
    clamp = InfClamp().attach(model)
    model.cuda()
    x = batch().float().cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        model(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            result = model(x)
            counts = clamp.counts()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert result.isfinite().all()
    assert counts.is_cuda
    assert counts.sum() > 0
