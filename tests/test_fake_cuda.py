"""CUDA code paths on a simulated device: no race, no sync, correct numbers."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import ContrastiveLoss, GradientCache
from lightning_mp.contrastive._call import first_inputs
from lightning_mp.contrastive._call.first_inputs import FirstInputs
from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._sums import agreement
from lightning_mp.contrastive._sums.sweep import NeedsGrad
from lightning_mp.contrastive._tiles.triton_tiles.configs import (
    TileConfig,
    _time_on_device,
    fastest,
    find_configs,
)
from lightning_mp.numerics.async_readback import AsyncReadback
from lightning_mp.numerics.tensor_stats import tensor_stats
from tests.fake_cuda import FakeCuda, RaceError

DEVICE = torch.device("cuda", 0)


def test_tensor_is_on_its_device_and_reading_it_synchronizes(gpu: FakeCuda) -> None:
    x = torch.ones(3, device="cuda") * 2
    assert x.device == DEVICE
    assert x.is_cuda
    assert gpu.launches == {"ones": 1, "mul": 1}
    assert (x.sum().item(), gpu.syncs) == (6.0, 1)
    assert type(x.cpu()) is Tensor
    assert gpu.syncs == 2


def test_reading_a_copy_before_it_finished_is_a_race(gpu: FakeCuda) -> None:
    host = torch.empty(3).pin_memory()
    host.copy_(torch.ones(3, device="cuda"), non_blocking=True)
    with pytest.raises(RaceError, match="the host accesses memory that stream 0 still writes"):
        host.sum()
    torch.cuda.synchronize()
    assert host.sum() == 3


def test_use_on_another_stream_requires_wait_and_record_stream(gpu: FakeCuda) -> None:
    x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
    with (
        torch.cuda.stream(side),
        pytest.raises(RaceError, match="stream 1 accesses memory that stream 0"),
    ):
        x + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    del x
    with pytest.raises(RaceError, match="stream 0 writes memory that stream 1 still reads"):
        torch.zeros(3, device="cuda")
    torch.cuda.synchronize()
    torch.zeros(3, device="cuda")
    assert y.sum().item() == 6


def test_readback_never_synchronizes_and_never_races(gpu: FakeCuda) -> None:
    readback, taken = AsyncReadback(), []
    packed = torch.zeros(4, 8, device="cuda")
    for step in range(20):
        packed.fill_(step)
        gpu.compute(0.01)
        readback.submit(step, packed)
        taken += readback.ready()
        gpu.time += 0.004 * (step % 5)  # the host is ahead now and then
    assert gpu.syncs == gpu.waits == 0
    assert 0 < len(taken) < 20
    taken += readback.drain()
    assert [(one.step, one.array[0, 0]) for one in taken] == [(step, step) for step in range(20)]


def test_statistics_are_computed_without_a_sync(gpu: FakeCuda) -> None:
    values = [torch.randn(5, 7), torch.randn(3)]
    stats = tensor_stats([value.to(DEVICE) for value in values], scale=8.0)
    syncs = gpu.syncs
    assert syncs == len(values)  # copies of the test itself, from pageable memory
    assert torch.allclose(stats.cpu(), tensor_stats(values, scale=8.0), rtol=1e-5)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_gradient_cache_has_no_race(gpu: FakeCuda, prefetch: int) -> None:
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    batch, weights = torch.randn(23, 4).pin_memory(), torch.randn(23, 5)
    (tower(batch) * weights).sum().backward()
    expected = [p.grad.clone() for p in tower.parameters()]
    tower.zero_grad()
    cache = GradientCache(micro_batch_size=4, device=DEVICE, prefetch=prefetch)
    features = cache.call(tower, batch)
    (features * weights).sum().backward()
    cache.check()
    for parameter, gradient in zip(tower.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-5, atol=1e-6)


def test_loss_uses_torch_tiles_and_their_workspace(gpu: FakeCuda) -> None:
    features = [torch.randn(37, 8, requires_grad=True) for _ in range(2)]
    expected = ContrastiveLoss()(*features, 5.0)
    loss = ContrastiveLoss()(*(f.detach().to(DEVICE) for f in features), 5.0)
    assert torch.allclose(loss.cpu(), expected.detach(), rtol=1e-6)


def test_default_device_of_torch_is_not_used_for_memory_of_the_host(gpu: FakeCuda) -> None:
    features = [torch.randn(8, 8, device=DEVICE) for _ in range(2)]
    tower, loss_fn = nn.Linear(8, 8), ContrastiveLoss()
    # As after `torch.set_default_device("cuda")`: memory of a GPU cannot be pinned either.
    with torch.device("meta"):
        for _ in range(2):
            loss_fn(*features, 5.0)
            gpu.time += 1.0  # the norms of the first inputs arrive
        output = GradientCache(micro_batch_size=4).call(tower, torch.ones(8, 8, device="cpu"))
        output.sum().backward()
    assert tower.bias.grad.tolist() == [8.0] * 8


def test_autotuning_measures_device_time(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = find_configs("lse", 90, torch.bfloat16, 512)[:3]
    on_host = dict(zip(configs, (1e-4, 7e-4, 4e-4), strict=True))
    on_device = dict(zip(configs, (3e-4, 1e-4, 2e-4), strict=True))

    def run(config: TileConfig) -> None:
        gpu.time += on_host[config]
        gpu.compute(on_device[config])

    monkeypatch.setattr("time.perf_counter", lambda: gpu.time)
    assert fastest(configs, run, DEVICE) == configs[1]
    measured = {config: _time_on_device(run, config) for config in configs}
    assert measured == pytest.approx(on_device)


def test_facts_of_ranks_arrive_without_a_sync_with_the_towers(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Tensor] = []

    def all_gather(by_rank: Tensor, mine: Tensor, group: object) -> None:
        sent.append(mine)
        by_rank.copy_(mine.repeat(2))

    agreement._stream_of.cache_clear()
    monkeypatch.setattr(agreement, "all_gather", all_gather)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    gpu.compute(10.0)  # the towers
    facts = agreement.Facts(1, images=3)
    assert agreement._gather(facts, DEVICE, None) == [facts] * 2
    assert (gpu.syncs, gpu.waits) == (0, 1)  # for the network
    assert gpu.time < 1.0
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(agreement, "ranks_of", lambda *_: 2)
    with pytest.raises(ValueError, match="unusable"):
        agreement.refuse_on_all_ranks(
            "unusable", "Loss", "no tensor", None
        )  # NCCL accepts no tensor of the host
    assert all(facts.is_cuda for facts in sent)
    assert set(sent[1].tolist()) == {0}
    agreement._stream_of.cache_clear()


def test_scale_on_a_device_is_compared_after_the_host_has_read_it(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_inputs, "ranks_of", lambda *_: 2)
    features = [torch.eye(4, 8, device=DEVICE) for _ in range(2)]

    def facts_of(scale: float, calls: int) -> agreement.Facts:
        """Return the facts of the call after several others."""
        request, looks = Request(*features, torch.full((), scale, device=DEVICE)), FirstInputs()
        for _ in range(calls):
            looks.check(request, None)
            gpu.time += 1.0  # the copy arrives
        request = Request(*features, request.scale, **looks.read)
        return agreement._own_facts(request, NeedsGrad(image=True, text=True, scale=True))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        facts = {(scale, calls): facts_of(scale, calls) for scale in (8.0, 9.0) for calls in (1, 2)}
    assert gpu.syncs == 0
    assert [facts[8.0, calls].scale_call for calls in (1, 2)] == [0, 1]
    for alike in ([(8.0, 1), (9.0, 1)], [(8.0, 1), (9.0, 2)], [(8.0, 2), (8.0, 2)]):
        agreement._refuse_what_differs([facts[each] for each in alike], "ContrastiveLoss")
    with pytest.raises(ValueError, match=r"Passed `logit_scale` of \[8\.0, 9\.0\] to `Contrast"):
        agreement._refuse_what_differs([facts[8.0, 2], facts[9.0, 2]], "ContrastiveLoss")
