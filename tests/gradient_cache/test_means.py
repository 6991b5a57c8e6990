"""Scalar outputs with the role `mean`: their values and gradients equal the whole batch's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import GradientCache

BATCH, WIDTH = 10, 5
ROLES = {"aux": "mean", "scale": "whole", "layers": "whole"}


class Gated(nn.Module):
    """Returns features, the mean entropy of a gate, and a scale, as MoE and open_clip models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> dict[str, Any]:
        shares = self.gate(x).softmax(1)
        entropy = -(shares * shares.log()).sum(1).mean()
        scale, layers = self.scale.exp(), torch.tensor(2)
        out = {"features": self.linear(x), "aux": {"loss": entropy}}
        return {**out, "scale": scale, "layers": layers}


def _loss(out: dict[str, Any]) -> Tensor:
    x = nn.functional.normalize(out["features"], dim=1)
    return (out["scale"] * x @ x.T).logsumexp(1).mean() + 0.3 * out["aux"]["loss"] ** 2


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 10, "auto"])
def test_means_and_their_gradients_equal_those_of_the_whole_batch(rows: Any) -> None:
    tower = Gated().double()
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
    plain = tower(x)
    inputs = [x, *tower.parameters()]
    expected = torch.autograd.grad(_loss(plain), inputs)
    cache = GradientCache(micro_batch_size=rows, roles=ROLES, activation_bytes=2**11)
    out = cache.call(tower, x)
    for value, wanted in (
        (out["aux"]["loss"], plain["aux"]["loss"]),
        (out["scale"], plain["scale"]),
    ):
        assert (value.shape, value.dtype) == ((), torch.float64)
        assert value.detach().item() == pytest.approx(wanted.detach().item(), rel=1e-14)
    for value, wanted in zip(torch.autograd.grad(_loss(out), inputs), expected, strict=True):
        # float64 sums of ten terms in a different order.
        assert torch.allclose(value, wanted, rtol=1e-12, atol=1e-15)
    cache.check()


def test_means_in_half_precision_are_summed_in_fp32() -> None:
    tower, x = Gated().bfloat16(), torch.randn(1024, WIDTH, dtype=torch.bfloat16)
    parts = [tower(part)["aux"]["loss"].double() for part in x.split(4)]
    out = GradientCache(micro_batch_size=4, roles=ROLES).call(tower, x)
    assert out["aux"]["loss"].dtype == torch.bfloat16
    mean = torch.stack(parts).mean().item()
    assert out["aux"]["loss"].detach().item() == pytest.approx(
        mean, rel=2**-8
    )  # 256 roundings: 2**-2


def test_replay_with_a_different_mean_raises() -> None:
    tower = Gated()
    cache = GradientCache(micro_batch_size=5, roles=ROLES)
    out = cache.call(tower, torch.randn(BATCH, WIDTH))
    tower.gate.bias.data[0] += 1.0  # autograd does not count this write
    with pytest.raises(RuntimeError, match="returned different outputs when it was replayed"):
        out["aux"]["loss"].backward()


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({}, r"`aux.loss` of shape \[\] .* `roles={'aux.loss': 'mean'}` for a mean over rows"),
        ({**ROLES, "features": "mean"}, None),
        ({**ROLES, "aux": "whole"}, r"`aux.loss` .* equal to those of other"),
        ({**ROLES, "layers": "mean"}, r"`layers` .* means of floating-point numbers were expected"),
        ({**ROLES, "los": "mean"}, r"`GradientCache\(roles={'los': 'mean'}\)`"),
    ],
)
def test_undeclared_scalars_and_unknown_names_raise(
    roles: dict[str, str], message: str | None
) -> None:
    model, cache = nn.Module(), GradientCache(micro_batch_size=5, roles=roles)
    model.tower, x = Gated(), torch.randn(BATCH, WIDTH)
    if message is None:  # a mean may have any shape
        with cache.serving(model, ["tower"]):
            mean = model.tower(x)["features"]
        assert torch.allclose(mean, model.tower.linear(x).view(2, 5, WIDTH).mean(0), atol=1e-6)
        return
    with pytest.raises(ValueError, match=message), cache.serving(model, ["tower"]):
        model.tower(x)
