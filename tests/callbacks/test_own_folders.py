"""`SpikeGuard(action="rewind")` removes its own checkpoints and no other files."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_mp._files import SIGNATURE, SignedFolder
from tests.callbacks.disks import full_disk
from tests.callbacks.spike_models import PlantedModel, fit, make_batches
from tests.callbacks.test_rewind import guard

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_mp.callbacks.monitor.InstabilityWarning",
    "ignore:Experiment logs directory",
)

OWN = re.compile(r"step=\d+\.ckpt(/[^/]+\.distcp)?")


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return the contents of all files in a folder, by path; `None` for folders."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def fill(folder: Path, *names: str, marker: str | None = None) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"of {name}")
    if marker is not None:
        (folder / "in_use").write_text(marker)


def fill_as_users_do(root: Path, log_folder: Path) -> None:
    """Make folders whose names begin like those of the guard."""
    fill(log_folder / "spike_guard-skip", "last.ckpt", "step=10.ckpt")
    fill(log_folder / "spike_guard-0123abcd", "step=10.ckpt")  # the exact name, without a marker
    # Left by an earlier version, which did not sign folders.
    fill(log_folder / "spike_guard-89abcdef", "step=10.ckpt", marker="")
    fill(log_folder / "spike_guard-99999999", "step=10.ckpt", marker="notes of mine")
    fill(log_folder / "spike_guard-0123abcd-old", "step=10.ckpt", marker=SIGNATURE)  # a copy
    fill(root / "other_project" / "spike_guard-notes", "notes.txt")
    # Folder of another run in a sibling folder, which the next run there removes.
    fill(root / "other_project" / "spike_guard-aaaaaaaa", "step=5.ckpt", marker=SIGNATURE)


def test_folder_whose_marker_is_not_a_regular_file_is_not_taken(tmp_path: Path) -> None:
    fill(tmp_path / "real", "step=3.ckpt", marker=SIGNATURE)
    linked, piped = tmp_path / "spike_guard-bbbbbbbb", tmp_path / "spike_guard-cccccccc"
    for folder in (linked, piped):
        fill(folder, "step=7.ckpt")
    (linked / "in_use").symlink_to(tmp_path / "real" / "in_use")
    os.mkfifo(piped / "in_use")  # opening it for reading would block forever
    (tmp_path / "spike_guard-dddddddd").symlink_to(tmp_path / "real", target_is_directory=True)
    before = sorted(tmp_path.rglob("*"))
    for folder in tmp_path.glob("spike_guard-*"):
        assert not SignedFolder(folder, OWN).take()
    fit(PlantedModel(), make_batches(5), guard(tmp_path, dirpath=str(tmp_path)))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("where", ["dirpath", "default_root_dir", "logger"])
def test_rewind_keeps_folders_of_users(tmp_path: Path, where: str) -> None:
    folder = tmp_path / "runs"
    options: dict[str, Any] = {"default_root_dir": folder}
    if where == "logger":
        options["logger"] = CSVLogger(tmp_path, name="runs", version="")
    fill_as_users_do(tmp_path, folder)
    before = tree(tmp_path)
    watch = guard(tmp_path, dirpath=str(folder) if where == "dirpath" else None)
    fit(PlantedModel(), make_batches(25), watch, **options)
    after = tree(tmp_path)
    assert {path: after.get(path) for path in before} == before


def test_rewind_keeps_foreign_files_in_the_folder_of_a_killed_run(tmp_path: Path) -> None:
    left = tmp_path / "marks" / "spike_guard-0123abcd"
    fill(left, "step=10.ckpt", "notes.txt", "last.ckpt", "plots/loss.png", marker=SIGNATURE)
    fill(left, "step=20.ckpt/.metadata", "step=20.ckpt/__0_0.distcp", "step=20.ckpt/mine.txt")
    fill(left, ".step=30.ckpt.4711")
    (left / "step=40.ckpt").symlink_to(tmp_path / "data", target_is_directory=True)
    fill(tmp_path / "data", "step=1.ckpt", "x.distcp")
    fit(PlantedModel(), make_batches(5), guard(tmp_path), default_root_dir=tmp_path)
    assert {path for path, content in tree(left).items() if content is not None} == {
        *("notes.txt", "last.ckpt", "plots/loss.png", "step=20.ckpt/mine.txt", "in_use")
    }
    assert set(tree(tmp_path / "data")) == {"step=1.ckpt", "x.distcp"}


def test_rewind_removes_nothing_at_the_paths_of_an_untrusted_checkpoint(
    tmp_path: Path,
) -> None:
    fill(tmp_path / "project", "step=3.ckpt", "train.py")
    fill(tmp_path / "spike_guard-0123abcd", "step=3.ckpt", "train.py", marker="")
    before = tree(tmp_path)
    for folder in ("project", "spike_guard-0123abcd"):
        watch = guard(tmp_path)
        path = str(tmp_path / folder / "step=3.ckpt")
        mark = {"path": path, "step": 3, "global_step": 3, "schedule_steps": 3, "position": 3}
        watch._rewinder.load_state_dict({"marks": [mark], "to_skip": 0})
        fit(PlantedModel(), make_batches(25), watch, default_root_dir=tmp_path)
        assert {path: tree(tmp_path).get(path) for path in before} == before


def test_rewind_signs_its_folder_and_removes_it_when_training_ends(tmp_path: Path) -> None:
    seen: list[str] = []

    class Looks(PlantedModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 15:
                (marker,) = (tmp_path / "marks").glob("spike_guard-*/in_use")
                seen.append(marker.read_text())
                (marker.parent / "mine.txt").write_text("a note")
            return super().training_step(batch, batch_idx)

    fit(Looks(), make_batches(25), guard(tmp_path), default_root_dir=tmp_path)
    assert seen == [SIGNATURE]
    files = [path.name for path in (tmp_path / "marks").rglob("*") if path.is_file()]
    assert sorted(files) == ["in_use", "mine.txt"]  # foreign files and their folder are kept
    fit(PlantedModel(), make_batches(25), guard(tmp_path / "b"), default_root_dir=tmp_path)
    assert not list((tmp_path / "b" / "marks").rglob("*"))


def test_signed_folder_is_locked_by_one_process(tmp_path: Path) -> None:
    first = SignedFolder(tmp_path / "own", OWN)
    first.make()
    fill(first.path, "step=1.ckpt")
    second = SignedFolder(first.path, OWN)
    assert not second.take()
    second.remove(["step=1.ckpt"])  # without the lock
    second.close()
    assert set(tree(first.path)) == {"in_use", "step=1.ckpt"}
    first.release()
    assert second.take()
    second.close()
    assert not first.path.exists()


def test_folder_that_cannot_be_signed_is_not_used(tmp_path: Path) -> None:
    folder = SignedFolder(tmp_path / "own", OWN)
    with full_disk(0), pytest.raises(OSError, match="too large"):
        folder.make()
    assert list(tmp_path.iterdir()) == []
    folder.close()
    folder.make()
    assert tree(folder.path) == {"in_use": SIGNATURE.encode()}
    folder.close()


def test_signed_folder_is_recreated_if_it_was_deleted(tmp_path: Path) -> None:
    folder = SignedFolder(tmp_path / "own", OWN)
    folder.make()
    (folder.path / "in_use").unlink()
    folder.path.rmdir()
    folder.make()
    assert (folder.path / "in_use").read_text() == SIGNATURE
    assert not SignedFolder(folder.path, OWN).take()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_rewind_reuses_the_signed_folder_of_the_resumed_run(tmp_path: Path) -> None:
    left = tmp_path / "version_0" / "spike_guard-0123abcd"
    fill(left, "step=3.ckpt", "step=9.ckpt", "mine.txt", marker=SIGNATURE)
    watch = guard(tmp_path)
    mark = {"path": str(left / "step=3.ckpt"), "step": 3, "global_step": 3}
    mark |= {"schedule_steps": 3, "position": 3}
    watch._rewinder.load_state_dict({"marks": [mark], "to_skip": 0})
    found: list[set[str]] = []

    class Looks(PlantedModel):
        def on_train_batch_start(self, *_: Any) -> None:
            found.append(set(tree(left)))

    fit(Looks(), make_batches(2), watch, default_root_dir=tmp_path)
    assert found[0] == {"in_use", "step=3.ckpt", "mine.txt"}  # not the stray checkpoint
    assert set(tree(left)) == {"in_use", "mine.txt"}


def test_rewind_works_after_its_folder_was_deleted(tmp_path: Path) -> None:
    class Vanishes(PlantedModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 15 and self.global_step == 15:
                (folder,) = (tmp_path / "marks").iterdir()
                for path in folder.iterdir():
                    path.unlink()
                folder.rmdir()
            return super().training_step(batch, batch_idx)

    watch = guard(tmp_path, rewind_steps=5)
    model = Vanishes({43: "explosion"})
    fit(model, make_batches(90), watch, default_root_dir=tmp_path)
    assert [alarm.kind for alarm in watch.alarms] == ["loss_spike", "rewind_to_step"]
    assert all(p.isfinite().all() for p in model.parameters())
    assert not list((tmp_path / "marks").rglob("*"))


def test_rewind_writes_checkpoints_that_torch_loads(tmp_path: Path) -> None:
    loaded: list[dict[str, Any]] = []

    class Looks(PlantedModel):
        def on_train_batch_start(self, _: Any, batch_idx: int) -> None:
            if batch_idx == 12:
                (path,) = (tmp_path / "marks").rglob("step=10.ckpt")
                loaded.append(torch.load(path, weights_only=False))
                assert not list(path.parent.glob(".*"))

    fit(Looks(), make_batches(14), guard(tmp_path), default_root_dir=tmp_path)
    assert loaded[0]["global_step"] == 10


def test_rewind_tries_to_write_a_checkpoint_once_per_period(tmp_path: Path) -> None:
    watch, tried = guard(tmp_path), []
    watch._rewinder.store.write = lambda _, mark, __: tried.append(mark.step)  # type: ignore[assignment]
    fit(PlantedModel(), make_batches(35), watch, default_root_dir=tmp_path)
    assert tried == [0, 10, 20, 30]
