"""`plan` for configs of many kinds: loaders, hooks, precisions and devices."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp._config_files import read_config
from lightning_mp.cli import main
from lightning_mp.plan.config import subject_of_config
from lightning_mp.plan.estimate import METHODS, Machine, memory
from lightning_mp.plan.table import advice
from tests.plan.test_door import WithLoader

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = 48  # pairs of a loader batch


def subject(folder: Path, model: type, **trainer: Any) -> Any:
    path = folder / "run.yaml"
    settings = {"trainer": trainer, "model": {"class_path": f"{model.__module__}.{model.__name__}"}}
    path.write_text(yaml.safe_dump(settings))
    return subject_of_config(read_config([str(path)]))


class TwoLoaders(WithLoader):
    """Its loaders yield one batch together, of which a step uses the first half."""

    def training_step(self, batch: dict[str, list[Tensor]], batch_idx: int) -> Tensor:
        return super().training_step(batch["pairs"], batch_idx)

    def train_dataloader(self) -> Any:
        other = DataLoader(TensorDataset(torch.randn(96, 3)), 16)
        return {"pairs": super().train_dataloader(), "other": other}


class Combined(TwoLoaders):
    """The same loaders, combined by the model."""

    def train_dataloader(self) -> Any:
        return CombinedLoader(super().train_dataloader(), "max_size_cycle")


class AsksTrainer(WithLoader):
    """Uses its Trainer and its optimizer before its towers, and takes no index."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:
        optimizer = self.optimizers()
        self.log("share", self.global_step / self.trainer.estimated_stepping_batches)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, 0))
        optimizer.step()

    def train_dataloader(self) -> Any:
        rows = ROWS // self.trainer.world_size
        return DataLoader(TensorDataset(torch.randn(96, 12), torch.randn(96, 6)), rows)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        epochs = self.trainer.max_epochs
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)]


class MadeLater(WithLoader):
    """Makes one tower in `setup`, the other in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        del self.visual, self.text

    def setup(self, stage: str) -> None:
        self.visual = nn.Linear(12, 8)

    def configure_model(self) -> None:
        self.text = nn.Linear(6, 8)


class ShardsTowers(WithLoader):
    """Makes towers and shards them in one hook."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = self.text = None

    def configure_model(self) -> None:
        self.visual, self.text = nn.Linear(12, 8), nn.Linear(6, 8)
        fully_shard(self.visual, mesh=self.device_mesh["data_parallel"])


class Pretrained(WithLoader):
    """Has weights in fp32 whatever the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Linear(12, 8, dtype=torch.float32)


class Recurrent(WithLoader):
    """Has a recurrent tower, which keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(nn.LSTM(6, 8, batch_first=True), _Features())


class _Features(nn.Module):
    def forward(self, outputs: tuple[Tensor, object]) -> Tensor:
        return outputs[0]


class Sparse(WithLoader):
    """Has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.EmbeddingBag(100, 8, sparse=True)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(96, 12), torch.ones(96, 6).long()), ROWS)


class FiveTexts(WithLoader):
    """Has five texts for each image."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        image, text = self.visual(batch[0]), self.text(batch[1])
        return self.loss(F.normalize(image), F.normalize(text[::5]), 10.0)

    def train_dataloader(self) -> Any:
        def collate(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
            return torch.stack([row[0] for row in rows]), torch.cat([row[1] for row in rows])

        data = TensorDataset(torch.randn(96, 12), torch.randn(96, 5, 6))
        return DataLoader(data, ROWS, collate_fn=collate)


class Strings(WithLoader):
    """Its texts are strings; the batch has a table that all pairs share."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        texts = torch.stack([torch.full((6,), float(len(text))) for text in batch[1]])
        return super().training_step([batch[0], texts], batch_idx)

    def train_dataloader(self) -> Any:
        def collate(rows: Sequence[Tensor]) -> Any:
            return torch.stack([row[0] for row in rows]), ["text"] * len(rows), torch.zeros(7, 480)

        return DataLoader(TensorDataset(torch.randn(96, 12)), ROWS, collate_fn=collate)


class Waveforms(WithLoader):
    """Has a list of waveforms, whose samples are no rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([torch.stack(batch[0])[:, :12], batch[1]], batch_idx)

    def train_dataloader(self) -> Any:
        def collate(rows: Sequence[tuple[Tensor, Tensor]]) -> Any:
            return [row[0] for row in rows], torch.stack([row[1] for row in rows])

        data = TensorDataset(torch.randn(96, 10 * ROWS), torch.randn(96, 6))
        return DataLoader(data, ROWS, collate_fn=collate)


class Bytes(WithLoader):
    """Loads uint8 images and converts them on the device."""

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        return [batch[0].float() / 255, batch[1]]

    def train_dataloader(self) -> Any:
        images = torch.zeros(96, 12, dtype=torch.uint8)
        return DataLoader(TensorDataset(images, torch.randn(96, 6)), ROWS, num_workers=0)


@pytest.mark.parametrize("model", [TwoLoaders, Combined])
def test_loaders_that_form_one_batch_are_planned(tmp_path: Path, model: type) -> None:
    found = subject(tmp_path, model)
    assert found.rank_batch == ROWS
    # 16 rows of the other loader belong to the batch.
    assert found.pair_bytes == 4 * (12 + 6) + 4 * 3 * 16 / ROWS


def test_model_that_asks_its_trainer_is_planned_with_the_ranks_of_the_config(
    tmp_path: Path,
) -> None:
    found = subject(tmp_path, AsksTrainer, devices=2, num_nodes=2, max_epochs=3)
    assert found.found == "on tensors without memory"
    assert found.optimizer == "SGD"
    assert found.rank_batch == ROWS // 4


def test_more_loader_batches_form_a_larger_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert subject(tmp_path, WithLoader).rank_batch == ROWS
    main(["plan", "--config", str(tmp_path / "run.yaml"), "--gpus=2", "--loader-batches=3"])
    assert "Batch 288 on 2 rank(s), 144 each" in capsys.readouterr().out


def test_wrong_arguments_of_the_strategy_are_refused(tmp_path: Path) -> None:
    strategy = {"class_path": "InfCLStrategy", "init_args": {"towers": "visual"}}
    with pytest.raises(ValueError, match=r"Pass `towers=\['visual'\]`"):
        subject(tmp_path, WithLoader, strategy=strategy)


def test_towers_made_by_hooks_are_found(tmp_path: Path) -> None:
    assert set(subject(tmp_path, MadeLater).towers) == {"visual", "text"}


def test_towers_made_by_the_hook_that_shards_them_are_found(tmp_path: Path) -> None:
    found = subject(tmp_path, ShardsTowers, strategy="inf_cl_fsdp2")
    assert set(found.towers) == {"visual", "text"}


def test_sparse_gradients_are_counted(tmp_path: Path) -> None:
    found = subject(tmp_path, Sparse)
    assert found.found == "on tensors without memory"
    assert found.towers["text"].parameters == 100 * 8


def test_texts_of_an_image_count_for_its_pair(tmp_path: Path) -> None:
    found = subject(tmp_path, FiveTexts)
    assert (found.rank_batch, found.pair_bytes) == (ROWS, 4 * (12 + 5 * 6))
    assert found.towers["text"].saved_per_pair == 5 * 8 * 4
    assert found.towers["text"].peak_per_row == found.towers["visual"].peak_per_row
    assert found.towers["visual"].saved_per_pair == 8 * 4


def test_strings_have_rows_and_a_shared_table_has_none(tmp_path: Path) -> None:
    found = subject(tmp_path, Strings)
    assert found.towers["text"].saved_per_pair == 8 * 4
    assert found.pair_bytes == 4 * 12 + 4 * 7 * 480 / ROWS


def test_list_with_an_item_for_each_pair_has_rows(tmp_path: Path) -> None:
    found = subject(tmp_path, Waveforms)
    assert found.pair_bytes == 4 * (10 * ROWS + 6)
    assert found.towers["visual"].saved_per_pair == 8 * 4


def test_batch_of_the_device_differs_from_that_of_the_loader(tmp_path: Path) -> None:
    found = subject(tmp_path, Bytes)
    assert (found.loaded_pair_bytes, found.pair_bytes) == (12 + 4 * 6, 4 * (12 + 6))
    need = memory(METHODS[-1], ROWS, found, Machine(1, 2**40, 2**40, 1, "cpu"))
    assert need.data == ROWS * 4 * (12 + 6)
    assert need.host == ROWS * (12 + 4 * 6)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"precision": 16}, "16-mixed"),
        ({"precision": "bf16"}, "bf16-mixed"),
        ({"plugins": "FSDPBalancedAMP"}, "BalancedAMP"),
        ({"plugins": [{"class_path": "lightning_mp.ModelParallelBalancedAMP"}]}, "BalancedAMP"),
        (
            {
                "plugins": {
                    "class_path": "lightning.pytorch.plugins.MixedPrecision",
                    "init_args": {"precision": "bf16-mixed", "device": "cpu"},
                }
            },
            "bf16-mixed",
        ),
    ],
)
def test_precision_is_that_of_the_config(tmp_path: Path, given: Any, name: str) -> None:
    assert subject(tmp_path, WithLoader, **given).precision == name


@pytest.mark.parametrize("model", [WithLoader, Pretrained])
@pytest.mark.parametrize("given", [{"precision": "bf16-true"}, {"plugins": "PureFP16"}])
def test_half_models_receive_half_batches(tmp_path: Path, given: Any, model: type) -> None:
    found = subject(tmp_path, model, **given)
    assert (found.loaded_pair_bytes, found.pair_bytes) == (4 * (12 + 6), 2 * (12 + 6))
    assert found.towers["visual"].saved_per_pair == 2 * 8


def test_weights_of_a_recurrent_tower_in_half_are_counted(tmp_path: Path) -> None:
    found = subject(tmp_path, Recurrent, plugins="PureFP16")
    assert found.found == "on tensors without memory"
    assert found.towers["text"].parameters == 4 * 8 * (6 + 8 + 2)


def test_precision_without_a_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="precision 'TransformerEnginePrecision'"):
        subject(tmp_path, WithLoader, plugins="TransformerEnginePrecision")


@pytest.mark.parametrize(
    ("devices", "ranks"),
    [
        ("2", 2),
        ("0,3,5", 3),
        ("1,", 1),
        ([4], 1),
        ("auto", None),
        (-1, None),
        ("-1", None),
        ("${oc.env:GPUS}", None),
    ],
)
def test_devices_are_counted_as_by_the_trainer(tmp_path: Path, devices: Any, ranks: Any) -> None:
    assert subject(tmp_path, WithLoader, devices=devices).devices == ranks


@pytest.mark.parametrize(
    ("strategy", "is_sharded"),
    [("inf_cl", False), ("ddp", False), ("inf_cl_fsdp2", True), ("fsdp", True),
     ({"class_path": "lightning_mp.InfCLModelParallelStrategy"}, True)],
)  # fmt: skip
def test_strategy_tells_whether_weights_are_sharded(
    tmp_path: Path, strategy: Any, is_sharded: bool
) -> None:
    assert subject(tmp_path, WithLoader, strategy=strategy).is_sharded == is_sharded


def test_advice_names_no_batch_if_not_even_one_pair_fits(tmp_path: Path) -> None:
    found = subject(tmp_path, WithLoader)
    said = advice(found, Machine(2, 100.0, 2.0**40, 2, "cpu"), 64)
    assert "no batch fits beside" in said
    assert "batch of 0" not in said
    said = advice(found, Machine(2, 2.0**40, 100.0, 2, "cpu"), 64)
    assert "hosts: no batch fits: take more nodes" in said


def test_advice_about_loader_batches_keeps_the_batch(tmp_path: Path) -> None:
    found = replace(subject(tmp_path, WithLoader), workers=8)
    # 17 batches of 72 bytes a pair would be in host memory: one in use, and two of 8 workers.
    said = advice(found, Machine(1, 2.0**40, 8 * 64 * 72.0, 1, "cpu"), 64)
    assert "`InfCLStrategy(loader_batches_per_step=4)`, and load 16 pairs at a time" in said


def test_workers_are_those_of_the_loader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subject(tmp_path, WithLoader)
    main(["plan", "--config", str(tmp_path / "run.yaml")])
    assert " 0 workers each" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_parts_in_files_of_their_own_are_read(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "part").mkdir()
    parts = {
        "part/trainer": {"accelerator": "cpu", "devices": 2, "strategy": "strategy.yaml"},
        "part/strategy": {
            "class_path": "InfCLStrategy",
            "init_args": {"loader_batches_per_step": 3},
        },
        "model": {"class_path": f"{WithLoader.__module__}.WithLoader"},
        "run": {"trainer": "part/trainer.yaml", "model": "model.yaml"},
    }
    for name, part in parts.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(part))
    # Beside the file that names them, as for `fit`, not in the working directory.
    main([command, "--config", str(tmp_path / "run.yaml")])
    printed = capsys.readouterr().out
    assert ("Batch 288 on 2 rank(s), 144 each" if command == "plan" else "14 checks") in printed
    (tmp_path / "model.yaml").unlink()
    with pytest.raises(SystemExit, match=r"model\.yaml"):
        main([command, "--config", str(tmp_path / "run.yaml")])


def test_later_file_appends_to_a_list(tmp_path: Path) -> None:
    first, second = tmp_path / "run.yaml", tmp_path / "more.yaml"
    first.write_text("trainer: {callbacks: SpikeGuard}")
    second.write_text("trainer: {callbacks+: [NonFiniteLocator]}")
    found = read_config([str(first), str(second)])
    assert found == {"trainer": {"callbacks": ["SpikeGuard", "NonFiniteLocator"]}}


def test_other_settings_may_name_files(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"  # for a CLI with an argument of its own
    path.write_text("{labels: labels.json, rates: {lr: 1e-3}}")
    assert read_config([str(path)]) == {"labels": "labels.json", "rates": {"lr": 0.001}}
