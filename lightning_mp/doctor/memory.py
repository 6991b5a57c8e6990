"""Memory of a contrastive run, by `lightning-mp plan`."""

from typing import Any

from lightning_mp.doctor.finding import Finding
from lightning_mp.doctor.started_run import StartedRun
from lightning_mp.strategies._inf_cl.serving import ServesTowers

__all__ = ["memory_findings"]


def memory_findings(
    run: StartedRun, config: str, gpu_memory: float, host_memory: float
) -> list[Finding]:
    """Return what does not fit in the memory of the machine that the run is for."""
    # What was refused in the set-up would be refused here once more.
    has_cache = run.trainer is not None and isinstance(run.trainer.strategy, ServesTowers)
    if run.error is not None or not has_cache:
        return []
    from lightning_mp.plan.config import subject_of_config
    from lightning_mp.plan.estimate import METHODS, Machine, memory
    from lightning_mp.plan.formulas import GIB
    from lightning_mp.plan.table import advice

    per_node = _devices(run.trainer_settings.get("devices"))
    ranks = per_node * int(run.trainer_settings.get("num_nodes") or 1)
    workers = getattr(run.loader, "num_workers", 0)
    machine = Machine(ranks, gpu_memory * GIB, host_memory * GIB, per_node, workers)
    size = getattr(run.loader, "batch_size", None)
    try:
        subject = subject_of_config(config)
    except Exception as error:
        run.notes.append(f"Memory: {error}")
        return []
    # The loader of `InfCLStrategy` joins `loader_batches_per_step` batches already.
    size = size or subject.batch
    if not size:
        run.notes.append("Memory: the loader does not say its batch size.")
        return []
    batch = int(size) * subject.loader_batches * ranks
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


def _devices(given: Any) -> int:
    if isinstance(given, list):
        return len(given)
    return given if isinstance(given, int) and given > 0 else 1
