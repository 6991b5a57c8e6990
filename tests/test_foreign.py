"""Under `pytorch_lightning`, errors say that the plugins are for `lightning.pytorch`."""

from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning as ptl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from packaging.version import Version

import lightning_mp
from tests.quiet import QUIET

SENTENCE = "for `lightning.pytorch`"
SETTINGS = QUIET | {"max_steps": 1}
pytestmark = pytest.mark.filterwarnings("ignore")


class Model(ptl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(2, 2))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("plugin", ["BalancedAMP", "PureFP16", "ModelParallelBalancedAMP"])
def test_error_for_plugin_in_a_foreign_trainer_names_the_package(plugin: str) -> None:
    foreign = ptl.utilities.exceptions.MisconfigurationException
    with pytest.raises(foreign, match=f"{plugin} {SENTENCE}"):
        ptl.Trainer(plugins=getattr(lightning_mp, plugin)(), **SETTINGS)


def test_error_for_strategy_in_a_foreign_trainer_names_the_package() -> None:
    with pytest.raises(ValueError, match=f"InfCLStrategy {SENTENCE}"):
        ptl.Trainer(strategy=lightning_mp.InfCLStrategy(), **SETTINGS)


@pytest.mark.parametrize("name", ["inf_cl", "InfCLStrategy"])
def test_error_for_strategy_name_in_a_foreign_trainer_names_the_package(name: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"`InfCLStrategy`.*{SENTENCE}"):
        ptl.Trainer(strategy=name, **SETTINGS)


@pytest.mark.parametrize(
    "callback",
    [
        "ActivationRangeMonitor",
        "AdamStateMonitor",
        "GradientUnderflowMonitor",
        "InstabilityReport",
        "LossScaleMonitor",
        "NonFiniteLocator",
        "ParameterMonitor",
        "RepresentationMonitor",
        "SpikeGuard",
    ],
)
def test_error_for_callback_in_a_foreign_trainer_names_the_package(callback: str) -> None:
    # Before 2.6, the Trainer refuses foreign callbacks before it calls their code.
    refuses = Version(ptl.__version__) < Version("2.6")
    said = "Expected a parent" if refuses else f"`{callback}`.*{SENTENCE}"
    with pytest.raises((MisconfigurationException, ValueError), match=said):
        ptl.Trainer(callbacks=[getattr(lightning_mp, callback)()], **SETTINGS).fit(Model())


def test_error_for_precision_beside_a_plugin_does_not_name_the_foreign_package() -> None:
    with pytest.raises(ValueError, match="Received both") as refused:
        pl.Trainer(precision="16-mixed", plugins=lightning_mp.BalancedAMP(), accelerator="cpu")
    assert "pytorch_lightning" not in str(refused.value)
