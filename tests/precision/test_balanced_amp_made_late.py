"""BalancedAMP with models that `configure_model` creates."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_mp.precision.balanced_amp import BalancedAMP
from tests.precision.models import Regression, fit, loader, parameters_of, perceptron


class _MadeLate(Regression):
    """Creates its network in `configure_model`, on the meta device if `is_meta`."""

    def __init__(self, is_meta: bool) -> None:
        super().__init__(nn.Identity)
        self.is_meta = is_meta

    def configure_model(self) -> None:
        if not isinstance(self.network, nn.Identity):
            return
        torch.manual_seed(0)
        if self.is_meta:
            with torch.device("meta"):
                network = perceptron()
            values = perceptron().state_dict()
            network.to_empty(device=self.device).load_state_dict(values)
        else:
            network = perceptron()
        self.network = network


@pytest.mark.parametrize("is_meta", [False, True])
def test_network_created_in_configure_model_gets_working_weights(is_meta: bool) -> None:
    torch.manual_seed(0)
    reference, model = _MadeLate(False), _MadeLate(is_meta)
    fit(reference, None, loader(6))
    seen: list[torch.dtype] = []

    class Seen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.weight.dtype)
            return super().forward(x)

    class Watch(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            assert {p.dtype for p in pl_module.parameters()} == {torch.float32}
            pl_module.network[3].__class__ = Seen

    fit(model, BalancedAMP(), loader(6), callbacks=[Watch()])
    assert seen == [torch.float16] * 6
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    moved = parameters_of(reference) - parameters_of(_start())
    assert (parameters_of(model) - parameters_of(reference)).norm() < 0.005 * moved.norm()


def _start() -> nn.Module:
    torch.manual_seed(0)
    return perceptron()
