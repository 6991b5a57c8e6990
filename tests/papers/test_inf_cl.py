"""Every part of `python -m papers inf-cl` at its fastest size, and the numbers that come out."""

import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from examples.glyph_clip.glyphs import encode_names
from lightning_mp import ContrastiveLoss
from lightning_mp.plan import formulas
from papers.__main__ import main
from papers.inf_cl import PARTS, cost, levels, memory
from papers.inf_cl.losses import DenseLoss, LocalLoss, NothingStored, RanksInOne
from papers.inf_cl.training import model_with
from papers.output import COMPUTED, MEASURED, PRINTED, Output
from tests.benchmarks.rehearsing import read
from tests.processes import run_ranks

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")


def test_table_contains_provenance_and_refuses_rows_without_a_kind(out: Output) -> None:
    path = out.table("small", [{"kind": MEASURED, "value": 1.5}], "Small")
    (row,) = read(path)
    assert row["value"] == "1.5"
    assert "cores" in row["hardware"]
    assert f"torch {torch.__version__}" in row["versions"]
    assert len(row["date"].split("-")) == 3
    with pytest.raises(ValueError, match="Set the row's `kind`"):
        out.table("small", [{"kind": "guessed", "value": 1.5}], "Small")


def test_tables_and_pictures_replace_those_of_an_earlier_run_and_no_others(out: Output) -> None:
    def make() -> list[str]:
        path = out.table("small", [{"kind": MEASURED, "value": 1.5}], "Small")
        with out.picture("small", 1, "Small") as (axes,):
            axes.plot([1, 2])
        return sorted(each.name for each in path.parent.iterdir())

    assert make() == make() == ["small.csv", "small.png"]
    for name in ("small.csv", "small.png"):
        (out.folder / name).write_text("mine")
    assert make() == ["small-v1.csv", "small-v1.png", "small.csv", "small.png"]
    assert (
        (out.folder / "small.csv").read_text() == (out.folder / "small.png").read_text() == "mine"
    )


def test_errors_about_parts_and_folders_say_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit,
        match="inf-cl has no part table9. Choose among figures_and_formulas, table1, table2",
    ):
        main(["inf-cl", "--only", "table9", "--output", str(tmp_path)])
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="Not a directory.*Pass another folder by `--output`"):
        main(["inf-cl", "--output", str(tmp_path / "file")])
    trained = ["table4", "figure4", "table3", "figure5"]
    assert list(PARTS) == ["figures_and_formulas", "table1", "table2", "figure1", *trained]


def test_baselines_compute_the_same_loss() -> None:
    torch.manual_seed(0)
    sides = [F.normalize(torch.randn(96, 16, dtype=torch.float64), dim=-1) for _ in range(2)]
    scale = torch.tensor(14.3, dtype=torch.float64)
    ours = ContrastiveLoss()(*sides, scale)
    for baseline in (DenseLoss(), LocalLoss(), RanksInOne(4), NothingStored()):
        torch.testing.assert_close(baseline(*sides, scale), ours)


@pytest.mark.parametrize("make", [DenseLoss, LocalLoss, lambda: RanksInOne(4), ContrastiveLoss])
def test_the_demos_model_trains_with_every_loss(make: Callable[[], torch.nn.Module]) -> None:
    batch = {
        "image": torch.randint(0, 256, (8, 32, 32), dtype=torch.uint8),
        "text": torch.from_numpy(encode_names([unicodedata.name(chr(0xC0 + i)) for i in range(8)])),
        "name_id": torch.arange(8),
    }
    model = model_with(make(), lr=1e-3)
    model.training_step(batch, 0).backward()
    assert all(p.grad is not None for p in model.parameters())


def _level_errors(rank: int, level: str) -> dict[str, float]:
    return levels._errors(level, rank, 2, 64, 16)


@pytest.mark.distributed
@pytest.mark.parametrize("level", list(levels.LEVELS))
def test_levels_agree_with_float64_on_ranks(level: str) -> None:
    found = run_ranks(_level_errors, 2, level)[0]
    # Each of three products in fp32 has at most 64 rounding errors of 2^-24.
    for name in ("loss_error", "d_image_error", "d_text_error", "d_scale_error"):
        assert found[name] <= 3 * 64 * 2**-24, name


def _counts(name: str, batch: int) -> tuple[int, int]:
    """Return the FLOPs of a step, and those of its loss."""
    kind = cost.KINDS[name]
    model, inputs = cost._Model(kind.make(), kind.cached), torch.randn(2, batch, cost.INPUTS)
    loss = cost._loss_alone(kind.make(), batch)
    return cost.counted(lambda: model.step(*inputs)), cost.counted(loss)


DENSE, UNKEPT, OURS = cost.KINDS


@pytest.mark.parametrize(("name", "units"), [(DENSE, 6), (UNKEPT, 8)])
def test_flops_are_exactly_units_of_b_squared_d_and_a_constant_a_pair(
    name: str, units: int
) -> None:
    constants = []
    for batch in (64, 192, 320):
        whole, loss = _counts(name, batch)
        assert loss == units * batch**2 * cost.WIDTH
        assert (whole - loss) % batch == 0
        constants.append((whole - loss) // batch)
        assert whole == cost.KINDS[name].flops(batch)
    assert len(set(constants)) == 1


def test_kept_tiles_save_up_to_one_product_of_four() -> None:
    batch = 512
    unit = 2 * batch**2 * cost.WIDTH
    nothing, everything = (_counts(name, batch)[1] for name in (UNKEPT, OURS))
    part = cost.counted(cost._loss_alone(ContrastiveLoss(workspace_bytes=2**20), batch))
    assert everything == 3 * unit < part < 4 * unit == nothing
    # Half of the workspace stores fp32 tiles.
    kept = (nothing - part) // (2 * cost.WIDTH)
    assert 0 < kept <= 2**19 // 4


@pytest.mark.sweep
def test_figure4_counts_a_replay_and_draws(out: Output) -> None:
    cost.figure4(out)
    rows = [row for row in read(out.folder / "figure4.csv") if row["kind"] == MEASURED]
    assert [row["method"] for row in rows[:3]] == list(cost.KINDS)
    plain, *cached = (float(row["other_flops_a_pair"]) for row in rows[:3])
    # The replay adds a forward. A plain step has a forward and twice its products in the backward,
    # except the gradients of the inputs.
    first, second = 2 * cost.INPUTS * cost.HIDDEN, 2 * cost.HIDDEN * cost.WIDTH
    assert plain == 2 * (2 * first + 3 * second)
    assert cached == [plain + 2 * (first + second)] * 2
    for row in rows:
        if row["method"] == UNKEPT:
            assert int(row["loss_flops"]) == 8 * int(row["batch"]) ** 2 * cost.WIDTH
    assert (out.folder / "figure4.png").stat().st_size > 10_000


def test_memory_rows_put_formulas_beside_the_papers_cells() -> None:
    rows = list(memory._paper_memory_rows())
    assert {row["kind"] for row in rows} == {PRINTED}
    assert len(rows) == 9 + 11
    (cell,) = (r for r in rows if (r["method"], r["ranks"], r["batch"]) == ("Inf-CL", 8, 2**17))
    assert cell["loss_MiB"] == pytest.approx(0.72 * 1024)
    largest = {
        row["method"]: row["largest_batch"]
        for row in memory._with_80_gb()
        if (row["kind"], row["model"], row["ranks"]) == (COMPUTED, "ViT-L/14", 32)
    }
    # Both are limited by data and features, not by the loss.
    assert largest["Inf-CL"] == largest["lightning-mp"] == 1984 * 1024


def _peaks_on_a_rank(rank: int) -> list[int]:
    return [memory._loss_peak(method, 256, 64) for method in memory.METHODS]


@pytest.mark.sweep
@pytest.mark.distributed
def test_loss_on_ranks_allocates_the_bytes_of_the_formulas() -> None:
    ranks = memory.RANKS
    found = dict(zip(memory.METHODS, run_ranks(_peaks_on_a_rank, ranks)[0], strict=True))
    for method, measured in found.items():
        predicted = formulas.loss_bytes(method, 256 * ranks, ranks, 64, memory.MANY_TILES)
        # The peers hold 4 matrices of b x B or B x B, and may hold one more or one less. Ours holds
        # at most the promised memory, and at least the gradients.
        matrix = {"dense (CLIP)": 4 * 1024**2, "local (OpenCLIP)": 4 * 256 * 1024}.get(method, 0)
        least = predicted - matrix if matrix else 2 * 4 * 256 * 64
        assert least <= measured <= predicted + matrix, method
    assert found["lightning-mp"] < found["local (OpenCLIP)"] < found["dense (CLIP)"]


@pytest.mark.sweep
def test_figure5_trains_on_the_glyphs_by_both_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    main(["inf-cl", "--only", "figure5", "--fast", "--output", str(tmp_path)])
    rows = read(tmp_path / "inf-cl" / "figure5.csv")
    assert [(row["batch"], row["learning_rate"]) for row in rows] == [
        ("64", "fixed"),
        ("64", "scaled"),
        ("256", "fixed"),
        ("256", "scaled"),
    ]
    assert all(0 <= float(row["t2i_r@10"]) <= 1 for row in rows)
    assert (tmp_path / "inf-cl" / "figure5.png").stat().st_size > 10_000


@pytest.mark.sweep
@pytest.mark.distributed
def test_all_parts_run_and_label_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    main(["inf-cl", "--fast", "--output", str(tmp_path)])
    folder = tmp_path / "inf-cl"
    for name in PARTS:
        if name not in ("figure1", "figures_and_formulas"):
            assert {row["kind"] for row in read(folder / f"{name}.csv")} <= {
                MEASURED,
                COMPUTED,
                PRINTED,
            }
    dense, _, ours, _ = (row for row in read(folder / "table3.csv") if row["kind"] == MEASURED)
    for score in ("top1", "i2t_r@1", "t2i_r@1"):
        # Equal except for rounding, which may change the ranks of a few of 3,268 glyphs.
        assert float(ours[score]) == pytest.approx(float(dense[score]), abs=2e-3), score
    by_level = {
        (row["level"], int(row["ranks"])): row
        for row in read(folder / "table4.csv")
        if row["kind"] == MEASURED
    }
    assert list(by_level) == [(level, n) for n in levels.RANKS for level in levels.LEVELS]
    trained = {ranks for (_, ranks), row in by_level.items() if row["top1"]}
    assert trained == {levels.RANKS[-1]}
    for name in ("figure1", "figure4", "figure5"):
        assert (folder / f"{name}.png").stat().st_size > 10_000
