"""What cannot work is refused before training starts, with a way out."""

import re
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import LBFGS, SGD, AdamW

from lightning_mp.precision.balanced_amp import BalancedAMP
from tests.precision.models import Regression, fit, loader, make_trainer

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "half": ({"half": "fp8"}, "`half` must be one of 'fp16', 'bf16'"),
    "weights": ({"weights": "O2"}, "`weights` must be one of 'half', 'full'"),
    "reduce_dtype": ({"reduce_dtype": "fp16"}, "`reduce_dtype` must be one of 'fp32', 'half'"),
    "bf16 scale": ({"half": "bf16", "loss_scale": "dynamic"}, "takes no loss scale"),
    "negative scale": ({"loss_scale": -1.0}, "loss_scale=-1.0"),
    "no scale": ({"loss_scale": 0}, "loss_scale=0`"),
    "unknown scale": ({"loss_scale": "static"}, "loss_scale='static'"),
    "epsilon": ({"adam_epsilon": 0.0}, "adam_epsilon=0.0"),
    "epsilon of a kind": ({"adam_epsilon": True}, "adam_epsilon=True"),
    "fp32 op": ({"fp32_ops": ["sotfmax"]}, "Near names: .*softmax"),
    "half op": ({"half_ops": ["geluu"]}, "Near names: .*gelu"),
    "one op": ({"fp32_ops": "gelu"}, r"fp32_ops=\['softmax'\]"),
}


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_cannot_be_used_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BalancedAMP(**arguments)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["network.22"], r"Near names: .*'network\.2'"),
        (["LayreNorm"], "Near names: .*'LayerNorm'"),
        ("norm", "must be a sequence of names"),
    ],
)
def test_unknown_fp32_modules_raise_with_near_names(names: Any, message: str) -> None:
    model = Regression()
    with pytest.raises(ValueError, match=message):
        fit(model, BalancedAMP(fp32_modules=names), loader(1))
    assert model.losses == []
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_precision_beside_the_plugin_raises() -> None:
    with pytest.raises(ValueError, match=r"precision=.*BalancedAMP|plugin"):
        make_trainer(BalancedAMP(), precision="16-mixed")


def test_lbfgs_raises_unless_there_is_neither_scale_nor_master() -> None:
    def make() -> Regression:
        return Regression(make_optimizer=lambda p: LBFGS(p, lr=0.1, max_iter=2))

    for arguments in ({}, {"weights": "full"}, {"half": "bf16"}):
        model = make()
        with pytest.raises(MisconfigurationException, match="LBFGS.*first-order optimizer"):
            fit(model, BalancedAMP(**arguments), loader(1))
        assert model.losses == []
    model, start = make(), None
    start = [p.clone() for p in model.parameters()]
    fit(model, BalancedAMP(half="bf16", weights="full"), loader(1))
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))


def half_network(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1, dtype=dtype))


@pytest.mark.parametrize("make_optimizer", [lambda p: SGD(p, lr=0.1), AdamW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("weights", ["half", "full"])
def test_parameters_in_half_from_the_start_raise_where_gradients_are_unscaled(
    make_optimizer: Any, dtype: torch.dtype, weights: str
) -> None:
    model = Regression(lambda: half_network(dtype), make_optimizer)
    message = re.escape(f"'network.1.weight' is in {dtype} from the start")
    with pytest.raises(MisconfigurationException, match=message):
        fit(model, BalancedAMP(weights=weights, adam_epsilon="keep"), loader(1))
    assert model.losses == []


def test_frozen_parameters_in_half_from_the_start_may_stay() -> None:
    model = Regression(lambda: half_network(torch.float16).requires_grad_(False), AdamW)
    model.network[0].requires_grad_(True)
    frozen, trained = (layer.weight.clone() for layer in reversed(model.network))
    fit(model, BalancedAMP(), loader(2))
    assert torch.equal(model.network[1].weight, frozen)
    assert model.network[1].weight.dtype == torch.float16
    assert not torch.equal(model.network[0].weight, trained)


def test_an_epsilon_that_vanishes_in_the_state_of_fp16_parameters_raises() -> None:
    model = Regression(lambda: half_network(torch.float16), AdamW)
    with pytest.raises(MisconfigurationException, match=r"'network.1.weight'.*eps=1e-08.* is 0 "):
        fit(model, BalancedAMP(half="bf16"), loader(1))
    assert model.losses == []


@pytest.mark.parametrize(("passed", "eps"), [("auto", 1e-8), ("keep", 1e-8), (1e-6, 1e-6)])
def test_adam_epsilon_is_replaced_only_by_a_number(passed: Any, eps: float) -> None:
    trainer = fit(Regression(make_optimizer=AdamW), BalancedAMP(adam_epsilon=passed), loader(1))
    assert [group["eps"] for group in trainer.optimizers[0].param_groups] == [eps]
