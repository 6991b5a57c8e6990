"""SafeAdamW under PureFP16 steps weights and residuals without copies of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_mp.optim.safe_adamw import SafeAdamW
from lightning_mp.precision._weights.half_weights import HalfWeights
from lightning_mp.precision.pure_fp16 import PureFP16
from tests.precision.models import Regression, fit, loader, parameters_of

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class RecordsOptimizerState(Regression):
    """Records parameters and states of the optimizer in and after its steps."""

    def __init__(self, **options: Any) -> None:
        make = options.pop("make", lambda p: SafeAdamW(p, lr=0.01))
        super().__init__(make_optimizer=make, **options)
        self.stepped: set[torch.dtype] = set()
        self.residuals: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}

    def configure_optimizers(self) -> Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(
            lambda o, *_: self.stepped.update(p.dtype for p in o.param_groups[0]["params"])
        )
        return optimizer

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer = self.optimizers().optimizer
        for name, p in self.named_parameters():
            if "residual" in optimizer.state.get(p, {}):
                self.residuals[name] = optimizer.state[p]["residual"]
        self.values = self.state_dict()


@pytest.mark.parametrize("half", HALVES)
def test_safe_adamw_steps_half_weights_and_the_residuals_of_checkpoints(half: Any) -> None:
    model = RecordsOptimizerState()
    fit(model, PureFP16(half=half), loader(8))
    assert model.stepped == {HALVES[half]}
    assert model.residuals.keys() == dict(model.named_parameters()).keys()
    assert {r.dtype for r in model.residuals.values()} == {HALVES[half]}
    assert any(r.any() for r in model.residuals.values())
    for name, p in model.named_parameters():  # fp32 after training
        assert torch.equal(model.values[name], p)
        unit = 2.0**-11 if half == "fp16" else 1.0
        rest = p - p.to(HALVES[half]).float()
        assert torch.equal(model.residuals[name].float() * unit, rest)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kahan", "stochastic", "nearest"])
@pytest.mark.parametrize("half", HALVES)
def test_safe_adamw_ends_near_torch_adamw(half: Any, way: Any) -> None:
    ends = []
    for kind in (AdamW, SafeAdamW):
        model = RecordsOptimizerState(make=lambda p, kind=kind: kind(p, lr=0.01))
        start = parameters_of(model)
        fit(model, PureFP16(half=half, write_back=way), loader(16))
        ends.append(parameters_of(model))
    distance = (ends[1] - ends[0]).norm() / (ends[0] - start).norm()
    if way == "kahan":
        assert distance < {"fp16": 2**-8, "bf16": 2**-4}[half]
    else:  # rounding errors differ
        assert distance < {"fp16": 2**-5, "bf16": 2**-1}[half]


@pytest.mark.parametrize("way", ["kahan", "stochastic", "nearest"])
def test_write_back_of_the_plugin_overrides_that_of_the_optimizer(way: Any) -> None:
    other = "nearest" if way == "kahan" else "kahan"
    model = RecordsOptimizerState(make=lambda p: SafeAdamW(p, lr=0.01, write_back=other))
    trainer = fit(model, PureFP16(write_back=way), loader(3))
    assert trainer.optimizers[0].param_groups[0]["write_back"] == way
    assert bool(model.residuals) == (way == "kahan")


def test_loaded_state_shares_the_residuals_of_the_model() -> None:
    torch.seed()
    holder, weights = nn.Linear(64, 64), HalfWeights(torch.float16)
    weights.convert(holder)
    optimizer = SafeAdamW(holder.parameters(), lr=1e-3)
    weights.attach(optimizer)

    def step() -> None:
        for p in holder.parameters():
            p.grad = torch.randn(p.shape)
        with weights.stepping(optimizer):
            optimizer.step()

    step()
    saved, values = optimizer.state_dict(), {n: v.clone() for n, v in holder.state_dict().items()}
    step()
    # The restored weights do not use the residuals of later steps.
    holder.load_state_dict(values)
    optimizer.load_state_dict(saved)
    for name, p in holder.named_parameters():
        assert torch.equal(holder.state_dict()[name], values[name])
        residual = optimizer.state[p]["residual"]
        rest = values[name] - p.detach().float()
        assert torch.equal(residual.float() * 2.0**-11, rest)
    step()
    for name, p in holder.named_parameters():
        residual = optimizer.state[p]["residual"].float() * 2.0**-11
        assert torch.equal(holder.state_dict()[name], p.detach().float() + residual)


def test_frozen_weight_has_no_state() -> None:
    model = RecordsOptimizerState()
    model.network[0].weight.requires_grad_(False)
    trainer = fit(model, PureFP16(), loader(2))
    assert model.network[0].weight not in trainer.optimizers[0].state
    assert len(trainer.optimizers[0].state) == len(list(model.parameters())) - 1


@pytest.mark.slow
@pytest.mark.parametrize("source", ["fp32", "PureFP16"])
@pytest.mark.parametrize("target", ["fp32", "PureFP16"])
def test_run_resumes_in_the_other_precision(source: str, target: str, tmp_path: Path) -> None:
    plugins = {"fp32": lambda: None, "PureFP16": PureFP16}
    path, reference = tmp_path / "run.ckpt", RecordsOptimizerState()
    start = parameters_of(reference)
    fit(reference, None, loader(6), max_epochs=2)
    fit(RecordsOptimizerState(), plugins[source](), loader(6)).save_checkpoint(path)
    model = RecordsOptimizerState(seed=3)
    fit(model, plugins[target](), loader(6), ckpt_path=path, max_epochs=2)
    distance = (parameters_of(model) - parameters_of(reference)).norm()
    assert distance < 2**-6 * (parameters_of(reference) - start).norm()
