"""`AdamStateMonitor` measures Adam, and no optimizer that steps otherwise from the same states."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from lightning_mp.callbacks import AdamStateMonitor
from tests.callbacks.models import Watched, kinds, watch

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.InstabilityWarning")


class Scaled(SGD):
    """Has the states of Adam, but steps with 0.001 of the learning rate, like Prodigy and LAMB."""

    def __init__(self, parameters: Any, **group: Any) -> None:
        super().__init__(parameters, lr=1.0)
        for each in self.param_groups:
            each |= {"betas": (0.9, 0.999), "eps": 1e-8, **group}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for p in self.param_groups[0]["params"]:
            self.state[p] |= {"step": 1, "exp_avg": p.grad.clone(), "exp_avg_sq": p.grad**2}
            p.sub_(0.001 * p.grad.sign())
        return loss


class AdaptedAdam(Scaled):
    """Estimates the learning rate, like D-Adaptation."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, d=0.001)


class Counting(SGD):
    """Keeps a tensor of its own among the states of parameters, like MADGRAD."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.state["k"] = torch.zeros(1)  # type: ignore[index]


@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.01), Scaled, AdaptedAdam, Counting])
def test_adam_monitor_warns_if_no_optimizer_is_adam(make: Any) -> None:
    watcher = AdamStateMonitor(every_n_steps=5)
    with pytest.warns(UserWarning, match="no optimizer is Adam"):
        watch(Watched(None, make, steps=30), [watcher])
    assert (watcher.samples, kinds(watcher)) == (0, [])


class EightBitAdam(SGD):
    """Steps like SGD and keeps quantized states like bitsandbytes and torchao."""

    def __init__(self, parameters: Any, keep: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.keep = keep
        for group in self.param_groups:
            group |= {"betas": (0.9, 0.999), "eps": 1e-8}

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self.keep(parameter)
        return loss


def as_bitsandbytes(parameter: Tensor) -> dict[str, Any]:
    codes = torch.zeros(parameter.shape, dtype=torch.uint8)
    return {"step": 1, "state1": codes, "state2": codes}


def as_torchao(parameter: Tensor) -> dict[str, Any]:
    if parameter.numel() == 1:  # small states are not quantized
        return {}
    state = {"step": torch.ones(())}
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = torch.full_like(parameter, torch.inf)  # must not be measured
        state[name].codes = torch.zeros(parameter.shape, dtype=torch.uint8)
    return state


@pytest.mark.parametrize(
    ("keep", "names"), [(as_bitsandbytes, "state1, state2"), (as_torchao, "exp_avg, exp_avg_sq")]
)
def test_quantized_moments_are_skipped_with_one_warning(keep: Any, names: str) -> None:
    watcher = AdamStateMonitor(every_n_steps=1)
    with pytest.warns(
        UserWarning, match=f"states {names} of `EightBitAdam`, which are quan"
    ) as told:
        watch(Watched(None, lambda p: EightBitAdam(p, keep), steps=6), [watcher])
    assert len([each for each in told if "quantized" in str(each.message)]) == 1
    assert (watcher.samples, watcher.alarms) == (0, [])
