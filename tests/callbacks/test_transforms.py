"""Monitors of modules inside transforms of `torch.func`."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_mp.callbacks import ActivationRangeMonitor, NonFiniteLocator, TensorCollector
from lightning_mp.callbacks._step import outputs
from lightning_mp.callbacks._step.outputs import OutputSampler
from tests.callbacks.non_finite_models import Model, data, fit


class Body(nn.Module):
    """Attention over four tokens of a sample, then a choice of two of 16 experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 16)
        self.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        x_BHLE = self.fc(self.norm(x)).view(-1, 2, 4, 2)
        attended = torch.softmax(x_BHLE @ x_BHLE.mT, dim=-1) @ x_BHLE
        chosen = attended.flatten(1).topk(2).values.sum(dim=1, keepdim=True)
        return attended.flatten(1) + chosen


def by_vmap(body: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: body(row[None])[0])(x)


def by_grad(body: nn.Module, x: Tensor) -> Tensor:
    """Call the body with weights after one step of gradient descent, as in MAML."""

    def loss_of(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(body, weights, (x,)).square().mean()

    trained = {name: p for name, p in body.named_parameters() if "experts" not in name}
    steps = torch.func.grad(loss_of)(trained)
    moved = {name: p - 0.1 * steps[name] for name, p in trained.items()}
    return torch.func.functional_call(body, moved, (x,))


def by_jvp(body: nn.Module, x: Tensor) -> Tensor:
    output, tangent = torch.func.jvp(body, (x,), (torch.ones_like(x),))
    return output + tangent


class Transformed(nn.Module):
    def __init__(self, transform: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.transform = Body(), transform

    def forward(self, x: Tensor) -> Tensor:
        return self.transform(self.inner, x)


@pytest.mark.parametrize("together", [0, 2**18], ids=["at_once", "later"])
def test_vmap_has_the_statistics_of_all_samples(
    monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    monkeypatch.setattr(outputs, "_TOGETHER", together)
    torch.manual_seed(0)
    body, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), torch.randn(5, 8)

    def statistics(call: Callable[[nn.Module, Tensor], Tensor]) -> Any:
        sampler = OutputSampler(modules={"0": body[0], "1": body[1]}, backward=True, max_calls=1)
        with ExitStack() as hooks:
            sampler.start(hooks)
            call(body, x).square().sum().backward()
            sampled = sampler.take()
        assert sampled is not None
        return sampled

    expected = statistics(lambda body, x: body(x))
    found = statistics(by_vmap)
    assert list(found) == list(expected)
    assert len(expected) == 4  # outputs and gradients of two modules
    # Sums of 80 squares in fp32, in another order.
    torch.testing.assert_close(found, expected, rtol=80 * 2**-23, atol=0)


@pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.monitor.InstabilityWarning")
@pytest.mark.parametrize("transform", [by_vmap, by_grad, by_jvp])
def test_monitors_change_no_bit_and_name_the_weight(transform: Any, tmp_path: Path) -> None:
    def plant(model: Model, index: int) -> None:
        if index == 4:
            with torch.no_grad():
                model.body.inner.fc.weight[3, 2] = torch.nan

    outputs = TensorCollector(collect=["outputs"], every_n_steps=1, dirpath=str(tmp_path / "x"))
    monitors = [ActivationRangeMonitor(every_n_steps=1), NonFiniteLocator(), outputs]
    runs = [Model(lambda: Transformed(transform), plant) for _ in range(2)]
    fit(runs[0], data())
    fit(runs[1], data(), callbacks=monitors)
    for plain, watched in zip(*(run.weights for run in runs), strict=True):
        torch.testing.assert_close(watched, plain, rtol=0, atol=0, equal_nan=True)
    written = sorted(tmp_path.rglob("*.npz"))
    with np.load(written[0]) as first:
        counts = dict(zip(first["names"].tolist(), first["count"].tolist(), strict=True))
    calls = {by_vmap: 1, by_jvp: 1, by_grad: 2}[transform]
    assert counts["outputs/body.inner.fc"] == calls * 8 * 16  # rows times width
    (alarm,) = monitors[1].alarms
    assert (alarm.step, alarm.tensor) == (4, "body.inner.fc.weight")
