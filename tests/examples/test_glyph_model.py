"""Towers, their reading of names, and the arithmetic of the report."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from examples.glyph_clip.compare import LOSSES
from examples.glyph_clip.glyphs import GlyphTable, encode_names
from examples.glyph_clip.model import GlyphCLIP
from examples.glyph_clip.report import drawing_ceilings, memory_lines, recall_table
from examples.glyph_clip.towers import GlyphTower, NameTower, hash_words
from lightning_mp import LightningMPCLI, LossStatistics, SigmoidContrastiveLoss


def test_towers_take_uint8_and_give_features():
    image = torch.randint(0, 256, (5, 32, 32), dtype=torch.uint8)
    text = torch.from_numpy(encode_names(["DIGIT ONE"] * 5))
    assert GlyphTower(width=64, feature_width=48)(image).shape == (5, 48)
    assert NameTower(feature_width=48)(text).shape == (5, 48)


def test_glyph_tower_jitters_in_training_only():
    tower = GlyphTower(width=64)
    image = torch.randint(0, 256, (4, 32, 32), dtype=torch.uint8)
    assert not torch.equal(tower(image), tower(image))
    tower.eval()
    assert torch.equal(tower(image), tower(image))


@pytest.mark.slow
def test_name_tower_does_not_depend_on_the_seed_or_its_neighbors():
    names = encode_names(["LATIN SMALL LETTER A WITH ACUTE", "DIGIT ONE"])
    text = torch.from_numpy(names)
    torch.manual_seed(0)
    first = NameTower()
    torch.manual_seed(1)
    second = NameTower()
    assert torch.equal(first.characters, second.characters)
    torch.testing.assert_close(first.eval()(text)[1:], first(text[1:]))


def test_hash_words_reads_words_wherever_they_stand():
    tower = NameTower()
    codes = torch.from_numpy(encode_names(["ACUTE ACCENT", "GRAVE ACUTE-X", "ETUCA"]))
    words = hash_words(codes, tower.characters)
    assert words[0, 0] == words[1, 1]
    assert words[2, 0] != words[0, 0]
    assert (words > 0).sum(dim=1).tolist() == [2, 3, 1]


def test_memory_of_a_step_grows_with_each_line():
    names = encode_names([f"DIGIT {n}" for n in "ABCDEF"])
    images, ids = np.full((6, 32, 32), 7, dtype=np.uint8), np.arange(6, dtype=np.int32)
    table = GlyphTable(images=images, codes=names, name_ids=ids, font_ids=ids)
    model = GlyphCLIP(width=32, feature_width=64)
    lines = memory_lines(model, table, (2048, 32_768, 65_536), peak_bytes=3 * 2**30)
    assert lines[0].endswith("in total: 3.0 GiB")
    cached, whole, tiled, dense = (
        [float(n) * {"M": 1, "G": 1024}[unit] for n, unit in re.findall(r"([\d.]+) ([MG])iB", line)]
        for line in (line.replace(",", "") for line in lines[3:])
    )
    assert cached == [cached[0]] * 3  # one micro-batch
    assert 8 < whole[0] / cached[0] < 16  # eight micro-batches of two towers
    assert whole[2] == pytest.approx(
        2 * whole[1], abs=0.05 * 1024 + 1
    )  # rounding of the printed numbers
    assert tiled == [32 + 8 * 4 * b * 64 / 2**20 for b in (2048, 32_768, 65_536)]
    assert dense == [64, 16 * 1024, 64 * 1024]


def test_drawing_ceilings_count_glyphs_drawn_alike():
    images = np.zeros((4, 2, 2), dtype=np.uint8)
    images[1:3] = 7  # two of four are equal
    images[3] = 9
    ids = np.arange(4, dtype=np.int32)
    table = GlyphTable(images=images, codes=encode_names(["A"] * 4), name_ids=ids, font_ids=ids)
    ceilings = drawing_ceilings(table)
    assert ceilings["image_to_text_recall@1"] == pytest.approx(0.75)
    assert ceilings["text_to_image_recall@1"] == pytest.approx(0.5)
    assert ceilings["text_to_image_recall@5"] == 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of jsonargparse about Lightning
def test_two_arguments_of_the_config_train_the_sigmoid_loss(tmp_path, monkeypatch):
    config = Path(__file__).parents[2] / "examples" / "glyph_clip" / "config.yaml"
    trainer = {"callbacks": "[]", "logger": "false", "default_root_dir": tmp_path}
    arguments = ["lightning-mp", "--config", str(config), *LOSSES["SigLIP"], "--model.width=64"]
    arguments += [f"--trainer.{name}={value}" for name, value in trainer.items()]
    monkeypatch.setattr("sys.argv", arguments)
    cli = LightningMPCLI(run=False)
    model = cli.model
    assert isinstance(model, GlyphCLIP)
    assert type(model.loss) is SigmoidContrastiveLoss
    groups = model_groups(model)
    assert groups[-1] == {"logit_scale", "logit_bias"}
    logged = {}
    model.log = lambda name, value, **_: logged.update({name: value})
    model.log_dict = lambda values, **_: logged.update(values)
    batch = {
        "image": torch.randint(0, 256, (6, 32, 32), dtype=torch.uint8),
        "text": torch.from_numpy(encode_names([f"DIGIT {n}" for n in "ABCDEF"])),
    }
    model.training_step(batch, 0).backward()
    # Six positives outweigh the negatives, so the gradient raises the bias.
    assert model.logit_bias.grad < 0
    assert {*LossStatistics._fields, "loss", "logit_scale"} <= set(logged)


def model_groups(model):
    names = {id(p): name for name, p in model.named_parameters()}
    model.trainer = SimpleNamespace(estimated_stepping_batches=10)
    groups = model.configure_optimizers()["optimizer"].param_groups
    assert sum(len(group["params"]) for group in groups) == len(names)
    return [{names[id(p)] for p in group["params"]} for group in groups]


def test_recall_table_sets_models_side_by_side():
    scores = {
        name: {
            **{f"{way}_recall@{k}": value for way in ("image_to_text", "text_to_image")
               for k in (1, 5, 10)},
            "image_to_text_median_rank": 3.0,
            "text_to_image_median_rank": 4.0,
        }
        for name, value in (("InfoNCE", 0.25), ("SigLIP", 0.5))
    }  # fmt: skip
    lines = recall_table(scores)
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["glyph", "to", "name", "InfoNCE", *["0.250"] * 3, "3"]
    assert lines[4].split() == ["name", "to", "glyph", "SigLIP", *["0.500"] * 3, "4"]
