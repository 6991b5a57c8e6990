"""Ranks inherit what the fork server imports; each rank would otherwise import it again."""

import gc
import sys

import pytest

from tests.processes import run_ranks


def _inherited(rank: int) -> tuple[int, bool, bool, bool]:
    # Python removes a module whose import failed.
    return rank, "tests.preloaded" in sys.modules, gc.get_freeze_count() > 0, gc.isenabled()


@pytest.mark.distributed
def test_ranks_inherit_imports_and_frozen_objects() -> None:
    assert run_ranks(_inherited, 2) == [(rank, True, True, True) for rank in range(2)]
