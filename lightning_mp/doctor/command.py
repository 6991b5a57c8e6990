"""The command `lightning-mp doctor`; heavy imports happen when it runs."""

from typing import Any

from lightning_mp._arguments import check_arguments

__all__ = ["doctor"]


@check_arguments(gpu_memory="(0, inf)", host_memory="(0, inf)")
def doctor(settings: dict[str, Any], gpu_memory: float = 80.0, host_memory: float = 1000.0) -> None:
    """Check the configuration of a run, without running a batch.

    Model, data, optimizers and Trainer are set up as in `fit`, on one device of this machine. Each
    finding says what the configuration does, why it matters and which line to change. The exit code
    is 1 if a finding is an error, so that the command can run in continuous integration.

    Args:
        settings: The config of the run.
        gpu_memory: Memory of a GPU of the run, in GiB.
        host_memory: Memory of a node of the run, in GiB.
    """
    from lightning_mp.doctor.checks import CHECKS
    from lightning_mp.doctor.finding import Finding
    from lightning_mp.doctor.memory import memory_findings
    from lightning_mp.doctor.started_run import StartedRun, start

    findings: list[Finding] = []

    def inspect(run: StartedRun) -> None:
        findings.extend(finding for check in CHECKS for finding in check(run))

    run = start(settings, inspect)
    findings += memory_findings(run, gpu_memory, host_memory)
    findings.sort(key=lambda finding: finding.severity != "wrong")
    wrong = sum(finding.severity == "wrong" for finding in findings)
    checks = len(CHECKS) + 1
    if findings:
        print(f"{wrong} wrong, {len(findings) - wrong} to improve, of {checks} checks.")
    else:
        print(f"Nothing found by {checks} checks.")
    for finding in findings:
        print("", *finding.lines(), sep="\n")
    for note in run.notes:
        print(f"\nNot checked: {note}")
    if wrong:
        raise SystemExit(1)
