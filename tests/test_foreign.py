"""Users of `pytorch_lightning` are told that the plugins are for `lightning.pytorch`."""

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
def test_plugin_in_a_foreign_trainer_says_what_it_is_for(plugin: str) -> None:
    foreign = ptl.utilities.exceptions.MisconfigurationException
    with pytest.raises(foreign, match=f"{plugin} {SENTENCE}"):
        ptl.Trainer(plugins=getattr(lightning_mp, plugin)(), **SETTINGS)


def test_strategy_in_a_foreign_trainer_says_what_it_is_for() -> None:
    with pytest.raises(ValueError, match=f"InfCLStrategy {SENTENCE}"):
        ptl.Trainer(strategy=lightning_mp.InfCLStrategy(), **SETTINGS)


@pytest.mark.parametrize("name", ["inf_cl", "InfCLStrategy"])
def test_strategys_name_in_a_foreign_trainer_says_what_it_is_for(name: str) -> None:
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
def test_callback_in_a_foreign_trainer_says_what_it_is_for(callback: str) -> None:
    # Before 2.6 its Trainer refuses foreign callbacks itself, before it calls any code of theirs.
    refuses = Version(ptl.__version__) < Version("2.6")
    said = "Expected a parent" if refuses else f"`{callback}`.*{SENTENCE}"
    with pytest.raises((MisconfigurationException, ValueError), match=said):
        ptl.Trainer(callbacks=[getattr(lightning_mp, callback)()], **SETTINGS).fit(Model())


def test_precision_beside_a_plugin_is_refused_without_a_word_of_the_other_package() -> None:
    with pytest.raises(ValueError, match="Received both") as refused:
        pl.Trainer(precision="16-mixed", plugins=lightning_mp.BalancedAMP(), accelerator="cpu")
    assert "pytorch_lightning" not in str(refused.value)
