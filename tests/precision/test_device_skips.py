"""On a GPU, fused optimizers step before the host reads `found_inf`, and skip by themselves."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_mp import BalancedAMP, LossScaleConfig, PureFP16, SafeAdamW
from lightning_mp.optim._found_inf import found_inf_of, skips_on_gpu
from lightning_mp.precision._scaling import scaled_precision
from tests.fake_cuda import FakeCuda
from tests.precision.models import Regression, fit, loader
from tests.precision.test_step_requests import Skip

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: AdamW(p, lr=0.01, fused=True),
    "Adam": lambda p: Adam(p, lr=0.01, fused=True),
    "SGD": lambda p: SGD(p, lr=0.1, fused=True),
    "SafeAdamW": lambda p: SafeAdamW(p, lr=0.01),
}
PLUGINS = {
    "O2": lambda scale: BalancedAMP(loss_scale=scale),
    "O1": lambda scale: BalancedAMP(weights="full", loss_scale=scale),
    "pure": lambda scale: PureFP16(loss_scale=scale),
}


def numbers_of(model: Regression) -> list[Tensor]:
    optimizer = model.optimizers(use_pl_optimizer=False)
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return [state[name] for state in states for name in sorted(state) if state[name] is not None]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


class Counting(Regression):
    """Counts the calls of `optimizer.step`; three batches overflow."""

    def __init__(self, make_optimizer: Callable[[Any], Optimizer]) -> None:
        super().__init__(make_optimizer=make_optimizer, bad_batches=[0, 2, 3], interval="step")
        self.calls = 0

    def configure_optimizers(self) -> Any:
        (optimizer,), schedules = super().configure_optimizers()
        optimizer.register_step_post_hook(self._count)
        return [optimizer], schedules

    def _count(self, *_: object) -> None:
        self.calls += 1


def trained(name: str, make_optimizer: Callable[[Any], Optimizer], **kwargs: Any) -> Counting:
    """Train for 8 batches, of which three overflow and a callback skips one more."""
    model = Counting(make_optimizer)
    plugin = PLUGINS[name](LossScaleConfig(init_scale=2.0**10))
    trainer = fit(model, plugin, loader(8), callbacks=[Skip(5)], **kwargs)
    assert trainer.global_step == 4
    assert plugin.scaler.scale == 2.0**7
    (optimizer,) = trainer.optimizers
    assert optimizer.param_groups[0]["lr"] == pytest.approx(optimizer.defaults["lr"] * 0.9**4)
    assert not hasattr(optimizer, "found_inf")
    return model


cases = pytest.mark.parametrize(
    ("name", "make_optimizer"),
    [(name, each) for name in PLUGINS for each in OPTIMIZERS.values()],
    ids=[f"{name} {each}" for name in PLUGINS for each in OPTIMIZERS],
)


@cases
def test_steps_before_the_decision_equal_steps_after_it(
    name: str, make_optimizer: Callable[[Any], Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    after = trained(name, make_optimizer)
    monkeypatch.setattr(scaled_precision, "skips_on_gpu", lambda _: True)
    before = trained(name, make_optimizer)
    assert (after.calls, before.calls) == (4, 8)
    assert equal(after.weights, before.weights)
    assert after.losses == before.losses
    assert equal(numbers_of(after), numbers_of(before))


def test_requested_skip_without_a_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for steps_first in (False, True):
        monkeypatch.setattr(scaled_precision, "skips_on_gpu", lambda _, first=steps_first: first)
        model = Regression(make_optimizer=OPTIMIZERS["AdamW"])
        trainer = fit(model, PureFP16(half="bf16"), loader(4), callbacks=[Skip(1)])
        assert trainer.global_step == 3
        runs.append(model.weights)
    assert equal(*runs)
    assert torch.equal(runs[1][1], runs[1][0])
    assert not torch.equal(runs[1][2], runs[1][1])


def test_flag_of_a_step_is_exactly_one_because_kernels_compare_with_one() -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(1))], fused=True)
    with found_inf_of(optimizer, torch.tensor(1.0), None, torch.tensor(True)):
        assert optimizer.found_inf.item() == 1.0
    with found_inf_of(optimizer, None):
        assert not hasattr(optimizer, "found_inf")


@pytest.mark.gpu
@cases
def test_steps_before_the_decision_on_a_gpu_equal_steps_after_it(
    name: str, make_optimizer: Callable[[Any], Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = trained(name, make_optimizer, accelerator="cuda")
    monkeypatch.setattr(scaled_precision, "skips_on_gpu", lambda _: False)
    after = trained(name, make_optimizer, accelerator="cuda")
    assert (after.calls, before.calls) == (4, 8)
    assert equal(after.weights, before.weights)
    assert equal(numbers_of(after), numbers_of(before))


class Decaying(AdamW):
    """Decays weights before a step, also if the step is skipped."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.5)
        return super().step(closure)


def test_steps_of_subclasses_wait_for_the_decision() -> None:
    with FakeCuda():
        weight = nn.Parameter(torch.ones(3, device="cuda"))
        assert not skips_on_gpu(Decaying([weight], fused=True))


@pytest.mark.parametrize("half", [torch.float16, torch.float32])
def test_only_steps_that_read_the_flag_on_a_gpu_skip_there(half: torch.dtype) -> None:
    on_host = [nn.Parameter(torch.ones(3, dtype=half))]
    assert not skips_on_gpu(AdamW(on_host, fused=True))
    with FakeCuda():
        weights = [nn.Parameter(torch.ones(3, dtype=half, device="cuda"))]
        assert skips_on_gpu(AdamW(weights, fused=True))
        assert not skips_on_gpu(AdamW(weights))
        assert skips_on_gpu(SGD(weights, 0.1, fused=True))
        assert skips_on_gpu(SafeAdamW(weights, fused=True))
        assert not skips_on_gpu(SafeAdamW(weights, foreach=True))


def test_step_that_starts_the_momentum_of_sgd_waits_for_the_decision() -> None:
    with FakeCuda():
        first, late, added = (nn.Parameter(torch.ones(3, device="cuda")) for _ in range(3))
        optimizer = SGD([first, late], 0.1, momentum=0.9, fused=True)
        for parameter in (first, late, added):
            if parameter is added:
                optimizer.add_param_group({"params": [added]})
            parameter.grad = torch.ones_like(parameter)
            assert not skips_on_gpu(optimizer)
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            assert skips_on_gpu(optimizer)


@pytest.mark.parametrize("fused", [True, False])
def test_host_waits_once_per_step_and_after_a_fused_step(fused: bool) -> None:
    with FakeCuda() as gpu:
        network = nn.Linear(3, 2, device="cuda")
        optimizer = AdamW(network.parameters(), lr=0.1, fused=fused, foreach=False)
        waits_at_step: list[int] = []
        optimizer.register_step_post_hook(lambda *_: waits_at_step.append(gpu.syncs))
        plugin = BalancedAMP()
        plugin._first = network.weight
        plugin._after_closure = lambda *_: None  # type: ignore[method-assign]

        def closure() -> Tensor:
            with plugin.backward_context(network):
                for p in network.parameters():
                    p.grad = torch.ones_like(p)
            return torch.ones(())

        before = gpu.syncs
        plugin.optimizer_step(optimizer, SimpleNamespace(automatic_optimization=True), closure)
        waits = gpu.syncs - before
    assert waits == 1
    assert [each - before for each in waits_at_step] == [0 if fused else 1]
