"""`plan` for a model with one tower, and for a config whose model has the loader."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import ContrastiveLoss, SafeAdamW
from lightning_mp._config_files import read_config
from lightning_mp.cli import main
from lightning_mp.plan.config import subject_of_config

pytestmark = pytest.mark.filterwarnings("ignore")


class WithLoader(pl.LightningModule):
    """A CLIP model as in the quick start; its loader yields 48 pairs per rank."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text, self.loss = nn.Linear(12, 8), nn.Linear(6, 8), ContrastiveLoss()
        self.batch_size = 48  # per rank

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        image, text = self.visual(batch[0]), self.text(batch[1])
        return self.loss(F.normalize(image, dim=-1), F.normalize(text, dim=-1), 10.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(torch.randn(96, 12), torch.randn(96, 6)), 48)


class WithoutLoader(WithLoader):
    """The same model without a loader."""

    train_dataloader = pl.LightningModule.train_dataloader


class WithCopies(WithLoader):
    """Copies layers, as `AveragedModel` does; its optimizer reads addresses."""

    made = 0  # models so far

    def __init__(self) -> None:
        super().__init__()
        WithCopies.made += 1
        # The batches that a batch normalization has seen are counted by `torch.tensor(0)`.
        copied = copy.deepcopy(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
        self.visual = nn.Sequential(self.visual, copied)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SafeAdamW(self.parameters())


def config(folder: Path, model: type) -> str:
    strategy = {"class_path": "InfCLStrategy", "init_args": {"loader_batches_per_step": 2}}
    path = folder / "run.yaml"
    settings = {
        "trainer": {"strategy": strategy, "precision": "bf16-mixed", "devices": 2, "num_nodes": 2},
        "model": {"class_path": f"{__name__}.{model.__name__}"},
    }
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def test_config_with_a_loader_in_the_model_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, WithLoader)
    subject = subject_of_config(read_config([path]))
    assert subject.pair_bytes == 4 * (12 + 6)
    assert subject.rank_batch == 2 * 48
    main(["plan", "--config", path])
    printed = capsys.readouterr().out
    assert "Batch 384 on 4 rank(s), 96 each" in printed
    assert "for 2 rank(s)" in printed
    assert "The loss holds logits or a workspace of tiles; the backbone holds gradients" in printed
    main(["plan", "--config", path, "--gpus", "8"])
    assert "Batch 768 on 8 rank(s), 96 each" in capsys.readouterr().out


def test_model_that_copies_layers_is_measured_without_warnings(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    WithCopies.made = 0
    torch.set_warn_always(True)  # also if another test of this process has caused the warning
    try:
        subject = subject_of_config(read_config([config(tmp_path, WithCopies)]))
    finally:
        torch.set_warn_always(False)
    assert subject.found == "on tensors without memory"
    assert WithCopies.made == 2  # for the loader, and on tensors without memory
    assert not [str(each.message) for each in recwarn if "FakeTensor" in str(each.message)]


def test_config_without_a_loader_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="whose model has no `train_dataloader`"):
        main(["plan", "--config", config(tmp_path, WithoutLoader)])


class WithoutRows(WithLoader):
    """Its data are empty."""

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(torch.randn(0, 12)), 48)


def test_config_without_data_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="whose loader yields NoneType without tensors of rows"):
        main(["plan", "--config", config(tmp_path, WithoutRows)])


def test_batch_of_less_than_a_pair_per_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="Passed `--batch 3` for 4 ranks. A rank needs a pair."):
        main(["plan", "--config", config(tmp_path, WithLoader), "--batch", "3"])


def test_folder_in_the_working_directory_is_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(SystemExit, match="`--model mine`.*which BertConfig does not describe"):
        main(["plan", "--model", "mine", "--batch", "1k"])
    Path("mine/config.json").write_text('{"model_type": "be')  # as after a broken download
    with pytest.raises(SystemExit, match="mine/config.json' is not a valid JSON file"):
        main(["plan", "--model", "mine", "--batch", "1k"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ViTModel", "texts, which ViTConfig does not describe"),
        ("Siglip2Model", "texts, which Siglip2Config does not describe"),
        ("XCLIPModel", "`--model XCLIPModel`. `plan` needs a tower for images of a fixed size"),
        ("CLIPConfig", "Passed `--model CLIPConfig`. It must be one of"),
        ("PreTrainedModel", "Passed `--model PreTrainedModel`. It must be one of"),
    ],
)
def test_model_that_cannot_be_planned_raises_an_error_in_a_sentence(name: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        main(["plan", "--model", name, "--batch", "1k"])


def test_model_that_reads_values_raises_an_error_in_a_sentence(monkeypatch: Any) -> None:
    def reads(self: Any, pixel_values: Any) -> Any:
        return pixel_values.sum().item()

    monkeypatch.setattr(transformers.CLIPModel, "get_image_features", reads)
    with pytest.raises(SystemExit, match="`--model ViT-B/32`, whose forward reads values"):
        main(["plan", "--model", "ViT-B/32", "--batch", "1k"])
