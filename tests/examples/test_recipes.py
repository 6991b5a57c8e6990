"""Every recipe can be parsed unchanged and trained at toy size, with shards from the test."""

import importlib.util
import io
import tarfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from examples.recipes.clip import RecipeCLIP
from examples.recipes.shards import END, START, ImageTextShards, tokens_of
from lightning_mp import InfCLStrategy
from lightning_mp.cli import main

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
TOWER |= {"num_attention_heads": 2}
TOY: dict[str, Any] = {
    "projection_dim": 8,
    "text_config": TOWER | {"vocab_size": 258, "eos_token_id": END, "bos_token_id": START},
    "vision_config": TOWER | {"image_size": 16, "patch_size": 8},
}

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def library_of(path: Path) -> str:
    return "open_clip" if "library: open_clip" in path.read_text() else "transformers"


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipe_is_parsed_unchanged(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--config", str(path), "--print_config"])
    printed = capsys.readouterr().out
    for line in ("class_path: examples.recipes.clip.RecipeCLIP", "- encode_image"):
        assert line in printed
    if path.stem == "inf_cl":
        for line in ("optimizer: adafactor", "lr: 0.001", "weight_decay: 0.0001", "- 0.95"):
            assert line in printed
        assert "warmup_epochs: 0.5" in printed
        assert "lock_image: true" in printed


def write_shards(folder: Path, shards: int = 2, pairs: int = 24) -> str:
    """Write tar files of PNGs and captions; return the pattern of their names."""
    from PIL import Image

    for shard in range(shards):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for index in range(pairs):
                picture = io.BytesIO()
                Image.new("RGB", (20, 24), (index * 10, shard * 90, 7)).save(picture, "PNG")
                for kind, data in (("png", picture.getvalue()), ("txt", f"hue {index}".encode())):
                    member = tarfile.TarInfo(f"{shard}-{index}.{kind}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return f"{folder}/{{0..{shards - 1}}}.tar"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipe_trains_at_toy_size_on_shards(path: Path, tmp_path: Path) -> None:
    needs("webdataset", library_of(path))
    config: Any = TOY
    if library_of(path) == "open_clip":
        vision = {"image_size": 16, "layers": 1, "width": 16, "patch_size": 8, "head_width": 8}
        text = {"context_length": 77, "vocab_size": 258, "width": 16, "heads": 2, "layers": 1}
        config = {"model_name": "ViT-B-32", "embed_dim": 8, "vision_cfg": vision, "text_cfg": text}
    changes = {
        "model.config": config,
        "data.urls": write_shards(tmp_path),
        "data.pairs": 32,
        "data.batch_size": 8,
        "data.image_size": 16,
        "data.workers": 0,
        "trainer.max_epochs": 2,
        "trainer.strategy.micro_batch_size": 3,
        "trainer.accelerator": "cpu",
        "trainer.devices": 1,
        "trainer.logger": "false",
        "trainer.default_root_dir": str(tmp_path),
    }
    arguments = [f"--{name}={value}" for name, value in changes.items()]
    main(["fit", "--config", str(path), *arguments])
    assert list(tmp_path.glob("**/*.ckpt"))


def test_shards_become_batches_of_bytes_and_tokens(tmp_path: Path) -> None:
    needs("webdataset")
    sizes: dict[str, int] = {"batch_size": 8, "image_size": 16, "context_length": 12}
    data = ImageTextShards(write_shards(tmp_path), 32, workers=0, **sizes)
    batches = list(data.train_dataloader())
    assert len(batches) == 4
    images, tokens = batches[0]
    assert (images.dtype, images.shape) == (torch.uint8, (8, 3, 16, 16))
    for image, line in zip(images, tokens, strict=True):
        text = bytes(int(code) for code in line if 0 < code < START).decode()
        assert text == f"hue {int(image[0, 0, 0]) // 10}"


def test_captions_are_cut_and_padded() -> None:
    assert tokens_of("ab", 6).tolist() == [START, 97, 98, END, 0, 0]
    assert tokens_of("abcdef", 4).tolist() == [START, 97, 98, END]


def pairs() -> DataLoader[Any]:
    """Return random pairs, four steps of 12."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (48, 3, 16, 16), generator=generator, dtype=torch.uint8)
    rows = [(image, tokens_of(f"{index:b}", 12)) for index, image in enumerate(images)]
    return DataLoader(rows, batch_size=12)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw"])
def test_locked_tower_stays_and_the_schedule_is_a_cosine_after_warm_up(optimizer: Any) -> None:
    needs("transformers")
    torch.manual_seed(0)
    model = RecipeCLIP(TOY, lock_image=True, optimizer=optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rates = []

    class Note(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    strategy = InfCLStrategy(towers=["encode_image", "encode_text"], micro_batch_size=5)
    pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=2, callbacks=[Note()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    ).fit(model, pairs())  # fmt: skip
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert not any(name.startswith("model.vision_model") for name in moved)
    assert any(name.startswith("model.text_model") for name in moved)
    # Half an epoch of four steps, then a cosine over six.
    cosine = [0.5 * (1 + torch.tensor(torch.pi * i / 6).cos().item()) for i in range(6)]
    assert rates == pytest.approx([5e-4, 1e-3, *(1e-3 * factor for factor in cosine)], rel=1e-5)
