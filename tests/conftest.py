"""Keeps apart what cannot run together, and skips what the machine cannot run."""

import functools
import gc
import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fake_cuda import FakeCuda

# Triton decides when a kernel is defined whether it is interpreted or compiled, so one process can
# do only one of both.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


gc.disable()  # until all is imported, which makes much that stays and little garbage

# Lightning's advice about data loaders and loops, which tiny test set-ups do not follow.
ADVICE = "lightning.fabric.utilities.warnings.PossibleUserWarning"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ignore Lightning's advice where Lightning is there.

    As a setting, the class would have all processes import Lightning, that which only hands tests
    out and those of kernels too, which takes them five seconds each.
    """
    if "lightning.fabric" in sys.modules:
        session.config.addinivalue_line("filterwarnings", f"ignore::{ADVICE}")
    gc.collect()
    gc.freeze()  # what stays for good need not be looked through again and again
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the other kind of process; skip `gpu` tests without a CUDA device."""
    others = [item for item in items if _is_interpreted(item) != INTERPRETED]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if _is_interpreted(item) == INTERPRETED]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(trylast=True)  # after the fixtures of the test
def pytest_runtest_teardown() -> None:
    """Destroy a process group that a Trainer has made: it keeps it as long as the process lives."""
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def _one_look_at_entry_points() -> None:
    """Let Lightning read the metadata of all packages once, not for each Trainer."""
    if "lightning.fabric" in sys.modules:
        from lightning.fabric.utilities import registry

        registry.entry_points = functools.cache(registry.entry_points)


@pytest.fixture(scope="session", autouse=True)
def _no_seeds_for_devices_that_are_not_there() -> None:
    """Let a seed go to the CPU alone: for a GPU to come torch keeps it with a stack."""
    if "torch" in sys.modules and not _has_gpu():
        import torch

        for device in (torch.cuda, torch.xpu, torch.mtia):
            device.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True)
def _interpreter(request: pytest.FixtureRequest) -> Iterator[None]:
    """Repair Triton's interpreter where it runs, but for tests that do it or look at its faults.

    With `interpreted(rows=None)` no program takes more rows than on a GPU.
    """
    mark = request.node.get_closest_marker("interpreted")
    if mark is None or mark.kwargs.get("repaired") is False:
        yield
        return
    from tests.contrastive.triton_tiles.interpreter import repaired_interpreter

    yield from repaired_interpreter(**mark.kwargs)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator["FakeCuda"]:
    """Return a simulated GPU without kernels by Triton; forget what is known of another one."""
    from lightning_mp.gradient_cache._served import micro_batches
    from lightning_mp.numerics import triton_support
    from tests.fake_cuda import FakeCuda

    known = (micro_batches._copying_stream, triton_support.triton_problem)
    for cached in known:
        cached.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with FakeCuda() as gpu:
        yield gpu
    for cached in known:
        cached.cache_clear()


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What Lightning and this package log from now on; pytest's own way slows all tests."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    # Where both are imported, Lightning's last twin logs for both.
    names = "lightning.pytorch", "pytorch_lightning", "lightning_mp"
    loggers = {each: each.level for each in map(logging.getLogger, names)}
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield messages
    for logger, level in loggers.items():
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture(scope="session")
def glyph_cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the demo's rendered glyphs, kept until the code that draws changes."""
    if not pytestconfig.pluginmanager.hasplugin("cacheprovider"):
        return tmp_path_factory.getbasetemp() / "glyphs"
    code = Path(__file__).parents[1] / "examples" / "glyph_clip" / "glyphs.py"
    return pytestconfig.cache.mkdir(f"glyphs-{hashlib.sha256(code.read_bytes()).hexdigest()[:16]}")


def _is_interpreted(item: pytest.Item) -> bool:
    return item.get_closest_marker("interpreted") is not None


def _has_gpu() -> bool:
    import torch  # not at the top: the process that hands tests out needs none

    return torch.cuda.is_available()
