"""Faults of disks, processes, ranks and user code do no harm without an error or a warning."""

import pytest

from tests.faults.__main__ import main
from tests.faults.disks import DISKS, Disk, check_disks
from tests.faults.hooks import CALLED, HOOKS, calls_of
from tests.faults.kills import KILLS
from tests.faults.ranks import RANKS
from tests.faults.runs import KINDS
from tests.faults.table import CASES, Fault, counts, is_short

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def cases(all_of_them: list[Fault]) -> pytest.MarkDecorator:
    """Parametrise a test by cases; only `make sweep` runs cases that are not short."""
    params = [
        pytest.param(case, id=str(case), marks=() if is_short(case) else pytest.mark.sweep)
        for case in all_of_them
    ]
    return pytest.mark.parametrize("case", params)


@cases(KILLS)
def test_killed_run_resumes_bit_for_bit(case: Fault) -> None:
    case.check()


@cases(HOOKS)
def test_error_in_a_hook_reaches_the_user_and_leaves_nothing_behind(case: Fault) -> None:
    case.check()


@pytest.mark.distributed
@cases(RANKS)
def test_other_ranks_end_in_time_and_say_why(case: Fault) -> None:
    case.check()


def test_no_disk_error_ends_a_run() -> None:
    check_disks([case for case in DISKS if is_short(case)])


def _group(disk: Disk) -> tuple[str, str]:
    return disk.kind, disk.how


@pytest.mark.sweep
@pytest.mark.parametrize("group", sorted({_group(each) for each in DISKS}), ids="-".join)
def test_no_disk_error_at_any_call_ends_a_run(group: tuple[str, str]) -> None:
    check_disks([case for case in DISKS if _group(case) == group])


@pytest.mark.sweep
@pytest.mark.parametrize("source", CALLED)
@pytest.mark.parametrize("kind", KINDS)
def test_every_listed_hook_is_called(kind: str, source: str) -> None:
    called = calls_of(kind, source)
    often = {hook.name for hook in HOOKS if hook.source.startswith(source) and hook.when == "third"}
    assert [name for name, count in called.items() if not count] == []
    assert [name for name in often if called[name] < 3] == []


def test_command_counts_all_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count"]) == 0
    printed = capsys.readouterr().out
    total = sum(map(len, CASES.values()))
    assert sum(counts().values()) == total
    assert printed.split()[-2:] == ["total", str(total)]
    names = [str(case) for each in CASES.values() for case in each]
    assert len(set(names)) == total
    assert sum(map(is_short, [case for each in CASES.values() for case in each])) == 20
