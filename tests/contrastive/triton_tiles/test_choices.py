"""Choices of autotuning outlive the process, and processes agree."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mp.contrastive._tiles.triton_tiles import choices
from lightning_mp.contrastive._tiles.triton_tiles.configs import TileConfig, find_configs

CUDA = torch.device("cuda", 0)
CONFIGS = find_configs("lse", 90, torch.bfloat16, 768)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return tmp_path / "lightning-mp" / "tiles"


def take(row: int, what: str = "lse, width 768", calls: list[int] | None = None) -> TileConfig:
    def choose() -> TileConfig:
        if calls is not None:
            calls.append(row)
        return CONFIGS[row]

    return choices.cached_choice(CONFIGS, what, CUDA, choose)


def test_second_process_reuses_the_choice_without_timing(folder: Path) -> None:
    calls: list[int] = []
    assert [take(2, calls=calls), take(0, calls=calls)] == [CONFIGS[2], CONFIGS[2]]
    assert calls == [2]
    (path,) = folder.iterdir()
    assert '"gpu": "NVIDIA H100 80GB HBM3"' in path.read_text()


def test_other_widths_and_gpus_have_their_own_choice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(2)
    assert take(1, "lse, width 512") == CONFIGS[1]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert take(0) == CONFIGS[0]
    assert len([*folder.iterdir()]) == 3


def test_concurrent_processes_use_the_first_choice(folder: Path) -> None:
    def choose() -> TileConfig:
        assert take(1) == CONFIGS[1]  # another process, meanwhile
        return CONFIGS[2]

    assert choices.cached_choice(CONFIGS, "lse, width 768", CUDA, choose) == CONFIGS[1]
    assert len([*folder.iterdir()]) == 1


@pytest.mark.parametrize("content", ["", "{", '{"row": 99}', '{"row": "1"}', "[]"])
def test_damaged_choice_is_replaced(folder: Path, content: str) -> None:
    take(2)
    (path,) = folder.iterdir()
    path.write_text(content)
    assert [take(1), take(0)] == [CONFIGS[1], CONFIGS[1]]
    assert [*folder.iterdir()] == [path]


def test_unwritable_folder_disables_storage(tmp_path: Path, folder: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert take(1) == CONFIGS[1]


def test_user_without_home_directory_stores_no_choice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert [take(1), take(0)] == [CONFIGS[1], CONFIGS[0]]


def test_interpreter_stores_no_choice(folder: Path) -> None:
    choices.cached_choice(CONFIGS, "lse", torch.device("cpu"), lambda: CONFIGS[0])
    assert not folder.exists()
