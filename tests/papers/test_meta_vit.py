"""Meta's ladder at its smallest size: each rung changes one property, and no other results."""

import pytest
import torch

from papers.meta_vit import LADDER, Scene, chips, flops_of, gpus, ladder
from papers.output import Output
from tests.benchmarks.rehearsing import read

pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_rung_changes_one_setting_of_the_rung_before() -> None:
    names = ["precision", "optimizer", "pool", "layout", "larger"]
    for before, after in zip(LADDER[:-1], LADDER[1:], strict=True):
        changed = [name for name in names if getattr(before, name) != getattr(after, name)]
        assert len(changed) == (2 if "pure" in after.name else 1)


def test_flops_are_those_of_the_products_by_hand() -> None:
    scene = Scene.for_this_machine(fast=True)
    d, depth = scene.size.width, scene.size.depth
    for rung in (LADDER[0], LADDER[-1]):
        edge = scene.edge(rung)
        patches = (edge // scene.size.patch) ** 2
        tokens = patches + (rung.pool == "cls")
        # Products per token: 4 d^2 for q, k, v and out, 8 d^2 for the MLP, 2 L d for attention.
        blocks = depth * tokens * (12 * d**2 + 2 * tokens * d)
        multiplies = patches * d * scene.size.patch**2 + blocks + d * 36
        assert flops_of(scene, rung) == 3 * 2 * multiplies


def test_gain_of_an_a100_is_more_than_its_peaks(out: Output) -> None:
    pytest.importorskip("matplotlib")
    gpus(out)
    assert (out.folder / "gpus.png").stat().st_size > 0
    rows = {row["chip"]: row for row in read(out.folder / "gpus.csv")}
    by_peak = float(rows["A100 SXM4 80 GB"]["times_V100"])
    assert by_peak == pytest.approx(312 / 125)
    meta, left = rows["A100, Meta's ViT-H/16"], rows["left to software and batch"]
    assert (meta["times_V100"], meta["kind"]) == ("4.05", "printed in the paper")
    assert float(left["times_V100"]) == pytest.approx(4.05 / by_peak)


@pytest.mark.slow
def test_characters_are_the_same_at_any_size_and_differ() -> None:
    pytest.importorskip("PIL")
    from papers._characters import CHARACTERS, draw

    (small, labels), (large, same) = (draw(200, edge, seed=3) for edge in (28, 56))
    assert torch.equal(labels, same)
    assert set(labels.tolist()) <= set(range(len(CHARACTERS)))
    halved = torch.nn.functional.avg_pool2d(large, 2)
    # Drawings at twice the size are equal except for the blur of bilinear sampling.
    assert torch.corrcoef(torch.stack([small.flatten(), halved.flatten()]))[0, 1] > 0.9
    assert abs(float(small.mean())) < 0.3
    assert 0.5 < float(small.std()) < 2
    # Nearest neighbors show the same character much more often than by chance, 1 in 36.
    distance = torch.cdist(small.flatten(1), small.flatten(1)).fill_diagonal_(torch.inf)
    assert (labels[distance.argmin(1)] == labels).float().mean() > 5 / len(CHARACTERS)


@pytest.mark.sweep
@pytest.mark.distributed
def test_ladder_and_chips_write_their_files(out: Output) -> None:
    pytest.importorskip("matplotlib")
    ladder(out)
    chips(out)
    tables = {part: read(out.folder / f"{part}.csv") for part in ("ladder", "chips")}
    assert all((out.folder / f"{part}.png").stat().st_size > 0 for part in tables)
    rows = {row["rung"]: row for row in tables["ladder"] if row["kind"] == "measured"}
    assert len(rows) == len(LADDER) + 1
    printed = [row["times_O1"] for row in tables["ladder"] if row["kind"] != "measured"]
    assert printed == ["1.0", "1.51", "1.86", "2.18"]
    # A fused step, the layout and shards of one rank change no arithmetic and therefore no loss.
    for name, before in (("fused step", "balanced"), ("batch second", "pooled head")):
        assert float(rows[name]["loss"]) == pytest.approx(float(rows[before]["loss"]), rel=1e-3)
    assert float(rows["FSDP"]["loss"]) == pytest.approx(
        float(rows["batch second"]["loss"]), rel=1e-3
    )
    assert all(float(row["peak_mib"]) > 0 for row in rows.values())
    if not torch.cuda.is_available():
        assert {row["images_a_second"] for row in rows.values()} == {""}
        assert {row["times_O1"] for row in rows.values()} == {""}
    kinds = {(row["kind"], row["tflops_a_chip"] == "") for row in tables["chips"]}
    assert kinds == {("measured", False), ("computed", True), ("printed in the paper", True)}
