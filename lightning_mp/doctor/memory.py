"""Memory of a contrastive run, by `lightning-mp plan`."""

from lightning_mp.doctor.finding import Finding
from lightning_mp.doctor.started_run import StartedRun
from lightning_mp.strategies._inf_cl.serving import ServesTowers

__all__ = ["memory_findings"]


def memory_findings(run: StartedRun, gpu_memory: float, host_memory: float) -> list[Finding]:
    """Return a finding if the run does not fit in the memory of its machine."""
    # An error of the set-up would only be raised again.
    has_cache = run.trainer is not None and isinstance(run.trainer.strategy, ServesTowers)
    if run.error is not None or not has_cache:
        return []
    from lightning_mp.plan.config import subject_of_config
    from lightning_mp.plan.estimate import METHODS, Machine, memory
    from lightning_mp.plan.formulas import GIB
    from lightning_mp.plan.table import advice

    try:
        subject = subject_of_config(run.settings)
    except Exception as error:
        *_, reason = (str(error).strip() or repr(error)).splitlines()  # of a worker's traceback
        run.notes.append(f"Memory: {reason}")
        return []
    per_node = subject.devices or 1
    ranks = per_node * subject.nodes
    machine = Machine(ranks, gpu_memory * GIB, host_memory * GIB, per_node)
    batch = (subject.rank_batch or 1) * ranks
    need = memory(METHODS[-1], batch, subject, machine)
    if need.peak <= machine.gpu_bytes and need.host <= machine.host_bytes:
        return []
    return [
        Finding(
            "memory",
            "wrong",
            f"A batch of {batch:,} on {ranks} ranks needs {need.peak / GIB:.1f} GiB a GPU and "
            f"{need.host / GIB:.1f} GiB a node; there are {gpu_memory:g} and {host_memory:g}.",
            "The run ends with an out-of-memory error (computed by `lightning-mp plan`).",
            advice(subject, machine, batch),
        )
    ]
