"""Separates interpreted from other tests, skips tests without their device, and holds fixtures."""

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

# Triton decides at the definition of a kernel whether it is interpreted or compiled, so a process
# supports only one of the two.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


gc.disable()  # during imports, which create many permanent objects and little garbage

# Lightning's advice about data loaders and loops, which tiny test set-ups do not follow.
ADVICE = "lightning.fabric.utilities.warnings.PossibleUserWarning"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ignore Lightning's advice if Lightning is imported.

    In the settings, the class of the warning would make all processes import Lightning, which takes
    five seconds each, also in the process that distributes tests and in tests of kernels.
    """
    if "lightning.fabric" in sys.modules:
        session.config.addinivalue_line("filterwarnings", f"ignore::{ADVICE}")
    gc.collect()
    gc.freeze()  # so that later collections skip permanent objects
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of the other mode of Triton; skip `gpu` tests without a CUDA device."""
    others = [item for item in items if _is_interpreted(item) != INTERPRETED]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if _is_interpreted(item) == INTERPRETED]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_sessionfinish() -> None:
    """Collect garbage once; pytest then collects ten times, which now visits no object."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # after the fixtures of the test
def pytest_runtest_teardown() -> None:
    """Destroy the process group of a Trainer, which otherwise exists until the process ends."""
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def _cached_entry_points() -> None:
    """Make Lightning read the metadata of all packages once instead of for each Trainer."""
    if "lightning.fabric" in sys.modules:
        from lightning.fabric.utilities import registry

        registry.entry_points = functools.cache(registry.entry_points)


@pytest.fixture(scope="session", autouse=True)
def _seeds_for_the_cpu_only() -> None:
    """Skip the seeds of missing devices, for which torch stores each call with a stack trace."""
    if "torch" in sys.modules and not _has_gpu():
        import torch

        for device in (torch.cuda, torch.xpu, torch.mtia):
            device.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True)
def _interpreter(request: pytest.FixtureRequest) -> Iterator[None]:
    """Repair Triton's interpreter in interpreted tests, unless they are marked `repaired=False`.

    With `interpreted(rows=None)`, programs have as few rows as on a GPU.
    """
    mark = request.node.get_closest_marker("interpreted")
    if mark is None or mark.kwargs.get("repaired") is False:
        yield
        return
    from tests.contrastive.triton_tiles.interpreter import repaired_interpreter

    yield from repaired_interpreter(**mark.kwargs)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator["FakeCuda"]:
    """Return a simulated GPU without Triton; clear caches of facts about devices."""
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
    """Return a list of all further messages of Lightning and this package; faster than `caplog`."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    # If both packages of Lightning are imported, the later import logs for both.
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
    """Return the folder of the demo's rendered glyphs, kept until the drawing code changes."""
    if not pytestconfig.pluginmanager.hasplugin("cacheprovider"):
        return tmp_path_factory.getbasetemp() / "glyphs"
    code = Path(__file__).parents[1] / "examples" / "glyph_clip" / "glyphs.py"
    return pytestconfig.cache.mkdir(f"glyphs-{hashlib.sha256(code.read_bytes()).hexdigest()[:16]}")


def _is_interpreted(item: pytest.Item) -> bool:
    return item.get_closest_marker("interpreted") is not None


def _has_gpu() -> bool:
    import torch  # here, because the process that distributes tests does not need it

    return torch.cuda.is_available()
