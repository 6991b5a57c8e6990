"""Unsupported settings raise before training, with a remedy; half models become fp32."""

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import LBFGS, SGD, AdamW

from lightning_mp.precision.balanced_amp import BalancedAMP
from tests.precision.models import Regression, fit, loader, make_trainer

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "half": ({"half": "fp8"}, "`half` must be one of 'fp16', 'bf16'"),
    "weights": ({"weights": "O2"}, "`weights` must be one of 'half', 'full'"),
    "reduce_dtype": ({"reduce_dtype": "fp16"}, "`reduce_dtype` must be one of 'fp32', 'half'"),
    "bf16 scale": ({"half": "bf16", "loss_scale": "dynamic"}, "needs no loss scale"),
    "negative scale": ({"loss_scale": -1.0}, "loss_scale=-1.0"),
    "no scale": ({"loss_scale": 0}, r"loss_scale=0\)`"),
    "unknown scale": ({"loss_scale": "static"}, "loss_scale='static'"),
    "epsilon": ({"adam_epsilon": 0.0}, "adam_epsilon=0.0"),
    "epsilon of a kind": ({"adam_epsilon": True}, "adam_epsilon=True"),
    "fp32 op": ({"fp32_ops": ["sotfmax"]}, "Similar names: .*softmax"),
    "half op": ({"half_ops": ["geluu"]}, "Similar names: .*gelu"),
    "one op": ({"fp32_ops": "gelu"}, r"Pass `fp32_ops=\['gelu'\]`"),
}


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_invalid_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BalancedAMP(**arguments)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["network.22"], r"Similar names: .*'network\.2'"),
        (["LayreNorm"], "Similar names: .*'LayerNorm'"),
        ("norm", r"must be a list of names. Pass `fp32_modules=\['norm'\]`"),
    ],
)
def test_error_for_unknown_fp32_modules_lists_similar_names(names: Any, message: str) -> None:
    model = Regression()
    with pytest.raises(ValueError, match=message):
        fit(model, BalancedAMP(fp32_modules=names), loader(1))
    assert model.losses == []
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_trainer_precision_together_with_the_plugin_raises() -> None:
    with pytest.raises(ValueError, match=r"precision=.*BalancedAMP|plugin"):
        make_trainer(BalancedAMP(), precision="16-mixed")


@pytest.mark.slow
def test_lbfgs_with_a_loss_scale_raises() -> None:
    def make() -> Regression:
        return Regression(make_optimizer=lambda p: LBFGS(p, lr=0.1, max_iter=4))

    for arguments in ({}, {"weights": "full"}):
        model = make()
        with pytest.raises(MisconfigurationException, match="LBFGS.*first-order optimizer"):
            fit(model, BalancedAMP(**arguments), loader(1))
        assert model.losses == []
    reference = make()
    fit(reference, None, loader(3))
    for weights in ("half", "full"):
        model = make()
        fit(model, BalancedAMP(half="bf16", weights=weights), loader(3))
        assert len(model.losses) == len(reference.losses)  # the closure runs inside the step
        assert model.losses[-1] == pytest.approx(reference.losses[-1], rel=0.05)


def test_fabric_raises() -> None:
    fabric = Fabric(accelerator="cpu", plugins=BalancedAMP())
    with pytest.raises(MisconfigurationException, match=r"Fabric.*Trainer\(plugins="):
        fabric.setup(nn.Linear(2, 2))


def half_network(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("arguments", [{}, {"weights": "full"}, {"half": "bf16"}], ids=str)
def test_half_weights_of_the_model_become_fp32_and_keep_small_updates(
    dtype: torch.dtype, arguments: dict[str, Any], logged: list[str]
) -> None:
    """transformers 5 loads bf16 weights, which stagnate at a learning rate of 1e-5."""
    model = Regression(lambda: half_network(dtype), lambda p: SGD(p, lr=1e-5))
    weight = model.network[1].weight
    start = weight.detach().clone()
    fit(model, BalancedAMP(**arguments), loader(2))
    assert any("cast 2 of the model's trainable parameters" in text for text in logged)
    assert model.network[1].weight is weight
    assert weight.dtype == torch.float32
    assert (weight != start).all()
    assert torch.equal(weight.to(dtype), start)  # half weights would not have changed


def test_half_running_statistics_become_fp32_with_their_norm() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).bfloat16()

    model = Regression(network)
    fit(model, BalancedAMP(), loader(2))
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32, torch.int64}
    assert model.network[1].running_mean.abs().min() > 0


def test_frozen_half_parameters_become_fp32_when_unfrozen() -> None:
    class Unfreezes(Regression):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.dtype_before = self.network[1].weight.dtype
                self.network[1].requires_grad_(True)

    model = Unfreezes(lambda: half_network(torch.bfloat16), lambda p: SGD(p, lr=1e-5))
    model.network[1].requires_grad_(False)
    start = model.network[1].weight.detach().clone()
    fit(model, BalancedAMP(half="bf16"), loader(2), max_epochs=2)
    assert model.dtype_before == torch.bfloat16
    assert model.network[1].weight.dtype == torch.float32
    assert (model.network[1].weight != start).all()


def test_frozen_half_parameters_stay_half() -> None:
    model = Regression(lambda: half_network(torch.float16).requires_grad_(False), AdamW)
    model.network[0].requires_grad_(True)
    frozen, trained = (layer.weight.clone() for layer in reversed(model.network))
    fit(model, BalancedAMP(), loader(2))
    assert torch.equal(model.network[1].weight, frozen)
    assert model.network[1].weight.dtype == torch.float16
    assert not torch.equal(model.network[0].weight, trained)


@pytest.mark.parametrize(("passed", "eps"), [("auto", 1e-8), ("keep", 1e-8), (1e-6, 1e-6)])
def test_adam_epsilon_is_replaced_only_if_a_number_is_passed(passed: Any, eps: float) -> None:
    trainer = fit(Regression(make_optimizer=AdamW), BalancedAMP(adam_epsilon=passed), loader(1))
    assert [group["eps"] for group in trainer.optimizers[0].param_groups] == [eps]
