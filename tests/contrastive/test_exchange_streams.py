"""Collectives on a stream of their own, as NCCL's, overlap with the sweeps without a race."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp import ContrastiveLoss, SigmoidContrastiveLoss
from lightning_mp.contrastive import _operator
from lightning_mp.contrastive._call.request import Request
from lightning_mp.contrastive._exchange import slices
from lightning_mp.contrastive._sums import agreement
from lightning_mp.contrastive._sums.sweep import agreed_plan
from tests import fake_cuda
from tests.fake_cuda import FakeCuda, RaceError

WORLD_SIZE = 3
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (ContrastiveLoss, {}),
    "targets": (lambda: ContrastiveLoss(label_smoothing=0.1), {}),
    "joint": (lambda: ContrastiveLoss(partition="joint", within="both"), {}),
    "sigmoid": (SigmoidContrastiveLoss, {"statistics": True}),
    "prefixes": (ContrastiveLoss, {"widths": (8, 4), "width_weights": (1.0, 0.5)}),
}


class Network:
    """Collectives among ranks with the same tensors."""

    def __init__(self) -> None:
        self.stream, self.waits = torch.cuda.Stream(), True

    def run(self, send: Callable[[], object], is_async: bool = False) -> Any:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            send()
        done = self.stream.record_event()
        work = SimpleNamespace(wait=lambda: done.wait() if self.waits else None)
        return work if is_async else work.wait()

    def all_gather(self, out: Tensor, own: Tensor, group: Any = None, async_op: Any = False) -> Any:
        return self.run(lambda: out.copy_(torch.cat([own] * WORLD_SIZE).view(out.shape)), async_op)

    def reduce_scatter(self, out: Tensor, own: Tensor, group: Any, async_op: bool) -> Any:
        return self.run(lambda: out.copy_(own.view(WORLD_SIZE, *out.shape).sum(0)), async_op)

    def all_to_all(self, out: Tensor, own: Tensor, group: Any, async_op: bool) -> Any:
        return self.run(lambda: out.copy_(own.view(out.shape)), async_op)

    def all_reduce(self, tensor: Tensor, group: Any) -> None:
        self.run(lambda: tensor.mul_(WORLD_SIZE))

    def send_and_receive(self, operations: list[Any]) -> list[Any]:
        sent, received = ([x[1] for x in operations[start::2]] for start in (0, 1))
        pairs = list(zip(received, sent, strict=True))
        return [self.run(lambda: [to.copy_(x) for to, x in pairs], True)]


@pytest.fixture
def network(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    network = Network()
    # Slices and other views access no memory.
    views = ("__getitem__", "flatten", "unbind")
    monkeypatch.setattr(fake_cuda, "_QUIET", (*fake_cuda._QUIET, *views))
    for module in (slices, agreement):
        monkeypatch.setattr(module, "all_gather", network.all_gather)
    monkeypatch.setattr(slices, "_reduce_scatter", network.reduce_scatter)
    for name, function in {
        "all_to_all_single": network.all_to_all,
        "all_reduce": network.all_reduce,
        "batch_isend_irecv": network.send_and_receive,
        "P2POp": lambda operation, tensor, **_: (operation, tensor),
        "get_world_size": lambda group=None: WORLD_SIZE,
        "get_rank": lambda group=None: 1,
        "is_initialized": lambda: True,
    }.items():
        monkeypatch.setattr(dist, name, function)
    agreement._stream_of.cache_clear()
    yield network
    agreement._stream_of.cache_clear()


def _step(name: str, exchange: str, count: int) -> None:
    make_loss, call = CASES[name]
    loss_fn = make_loss()
    loss_fn.exchange, loss_fn.backend = exchange, "torch"
    image, text = (torch.randn(rows, 8, device="cuda").requires_grad_() for rows in (20, 25))
    scale = torch.ones((), device="cuda", requires_grad=True)
    ids = torch.arange(25, device="cuda") // 2
    request = Request.of(loss_fn, image, text, scale, None, ids=ids, **call).checked()
    with torch.no_grad(), torch._C._SetExcludeDispatchKeyGuard(_operator._AUTOGRAD, False):
        plan = agreed_plan(request)
        if exchange == "slices":
            plan.exchange.count = count  # type: ignore[attr-defined]
        for x in _operator._compute(plan).of_inputs(plan):
            if x is not None:
                x.sum()


@pytest.mark.parametrize(("exchange", "count"), [("slices", 1), ("slices", 4), ("ring", 0)])
@pytest.mark.parametrize("name", CASES)
def test_exchange_has_no_race(
    name: str, exchange: str, count: int, network: Network, gpu: FakeCuda
) -> None:
    for _ in range(2):  # the second reuses the memory of the first
        _step(name, exchange, count)
    assert gpu.syncs == 0


@pytest.mark.parametrize(("exchange", "count"), [("slices", 4), ("ring", 0)])
def test_missing_wait_is_a_race(exchange: str, count: int, network: Network) -> None:
    network.waits = False
    with pytest.raises(RaceError):
        _step("plain", exchange, count)
