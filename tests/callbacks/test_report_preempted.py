"""The page of a preempted run says so, rather than that the run failed or was interrupted."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_mp.callbacks.instability_report import InstabilityReport
from lightning_mp.cli.report import rebuild_page
from tests.callbacks.models import Watched, watch
from tests.processes import exit_code_of

pytestmark = pytest.mark.slow

AT = 5


def _train(folder: str, how: str) -> None:
    def act(module: Any, batch_idx: int) -> None:
        if batch_idx == AT:
            if how == "requeue":
                os.kill(os.getpid(), signal.SIGUSR1)
            else:
                os.kill(os.getpid(), signal.SIGTERM)
            if how == "error":
                raise RuntimeError("the other ranks are gone")

    if how == "handler":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    if how == "requeue":  # in SLURM, `scontrol requeue` ends the job
        scontrol = Path(folder) / "scontrol"
        scontrol.write_text("#!/bin/sh\necho $* > $(dirname $0)/called\nkill -TERM $PPID\n")
        scontrol.chmod(0o755)
        names = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
        os.environ |= dict.fromkeys(names, "0") | {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "17"}
        os.environ |= {"SLURM_JOB_NAME": "train", "PATH": f"{folder}:{os.environ['PATH']}"}
    report = InstabilityReport(dirpath=folder)
    watch(Watched(steps=40, sabotage=act), [report], default_root_dir=folder)


ENDS = {
    "signal": 0,  # Lightning's `SIGTERMException` is a `SystemExit`
    "handler": 3,
    "error": 1,
    "requeue": 0,
}


@pytest.mark.parametrize("how", ENDS)
def test_page_of_a_run_after_sigterm_says_preempted(tmp_path: Path, how: str) -> None:
    assert exit_code_of(_train, str(tmp_path), how) == ENDS[how]
    if how == "requeue":
        assert (tmp_path / "called").read_text() == "requeue 17\n"
        assert list(tmp_path.glob("hpc_ckpt_*.ckpt"))
    data = json.loads((tmp_path / "instability.json").read_text())
    assert data["run"]["end"]["how"] == "preempted"
    assert data["run"]["steps"] == AT + (how in ("signal", "requeue"))
    page = (tmp_path / "instability.html").read_text()
    assert f"<dd>Preempted by SIGTERM, {data['run']['end']['time']}</dd>" in page
    assert "Ended by" not in page
    assert "Failed" not in page
    assert rebuild_page(tmp_path).read_text() == page
