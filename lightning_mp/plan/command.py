"""The command `lightning-mp plan`; heavy imports happen when it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from lightning_mp._arguments import check_arguments

__all__ = ["pairs_of", "plan"]

_GPUS = 8  # GPUs of a node, if neither the command nor the config names a number


@check_arguments(
    **dict.fromkeys(("gpus", "gpus_per_node", "micro_batch", "loader_batches"), "[1, inf)"),
    **dict.fromkeys(("gpu_memory", "host_memory", "network"), "(0, inf)"),
    **dict.fromkeys(("pairs_per_second", "tflops"), "(0, inf)"),
    workers="[0, inf)",
)
def plan(
    settings: dict[str, Any] | None = None,
    model: str | None = None,
    batch: str | None = None,
    gpus: int | None = None,
    gpus_per_node: int | None = None,
    gpu_memory: float = 80.0,
    host_memory: float = 1000.0,
    workers: int | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    precision: str | None = None,
    micro_batch: int | None = None,
    offload: bool | None = None,
    loader_batches: int | None = None,
    pairs: str | None = None,
    pairs_per_second: float | None = None,
    tflops: float | None = None,
    network: float = 50.0,
) -> None:
    """Predict memory and time of a contrastive run, before a machine is rented.

    Prints the memory of a GPU and a host for each method (dense loss, OpenCLIP's local loss,
    Inf-CL, this package), the largest batch that fits, and the time of a step. Everything is
    computed from the bytes that the towers need at their peak and the states that the optimizer
    keeps; both are measured on tensors without memory.

    Args:
        settings: The config of a run.
        model: Instead of a config: `ViT-L/14`, `ViT-B/16`, `ViT-B/32`, a class of transformers, a
            folder with a config.json, or a model name of open_clip. Nothing is downloaded.
        batch: Global batch, such as 10M or 1024k, where k is 1,024 and M is 1,024 k. The default is
            what the loader of the config yields on all ranks in a step.
        gpus: Number of ranks. The default is the config's `devices` times `num_nodes`, or 8.
        gpus_per_node: Ranks that share a host. The default is the config's `devices`, or 8.
        gpu_memory: Memory of a GPU, in GiB.
        host_memory: Memory of a node, in GiB.
        workers: Loader workers of a rank. The default is the config's, or 8.
        device: Device of the loss, which determines the default workspace.
        precision: `32-true`, `16-mixed`, `bf16-mixed`, `BalancedAMP`, `PureFP16` or `bf16-true`.
            The default is the config's, or `BalancedAMP`.
        micro_batch: Pairs that a tower processes at a time. The default is the config's, or 128.
        offload: Whether the batch stays in host memory. The default is the config's.
        loader_batches: Loader batches of a step. The default is the config's, or 1.
        pairs: Pairs of an epoch, such as 400M, to predict the hours of an epoch.
        pairs_per_second: Measured rate of one GPU through the towers, replay included.
        tflops: Sustained TFLOP/s of a GPU, for the loss; also for the towers if there is no
            `pairs_per_second`.
        network: Bandwidth at which a GPU sends, in GB/s.
    """
    from lightning_mp.plan.estimate import Machine
    from lightning_mp.plan.formulas import GIB
    from lightning_mp.plan.subject import PRECISIONS
    from lightning_mp.plan.table import advice, plan_lines

    asked = None if batch is None else pairs_of(batch, "--batch")
    per_epoch = None if pairs is None else pairs_of(pairs, "--pairs")
    if (settings is None) == (model is None):
        raise ValueError("pass either `--config` or `--model`.")
    if precision is not None and precision not in PRECISIONS:
        names = ", ".join(PRECISIONS)
        raise ValueError(f"Passed `--precision {precision}`. It must be one of {names}.")
    if settings is not None:
        from lightning_mp.plan.config import subject_of_config

        subject = subject_of_config(settings, precision)
    else:
        from lightning_mp.plan.sources import subject_of_model

        subject = subject_of_model(str(model), precision or "BalancedAMP")
    given: dict[str, Any] = {"micro_batch": micro_batch, "offload": offload}
    given |= {"loader_batches": loader_batches, "workers": workers}
    subject = replace(subject, **{k: v for k, v in given.items() if v is not None})
    per_node = gpus_per_node or subject.devices or _GPUS
    ranks = gpus or per_node * subject.nodes
    asked = asked or (subject.rank_batch or 0) * ranks
    if not asked:
        raise ValueError("pass the global batch by `--batch`, such as 1024k.")
    if asked < ranks:
        raise ValueError(f"Passed `--batch {batch}` for {ranks} ranks. A rank needs a pair.")
    work = subject.flops_per_pair(cached=True)
    flops = (pairs_per_second or 0.0) * work if tflops is None else tflops * 1e12
    machine = Machine(
        *(ranks, gpu_memory * GIB, host_memory * GIB, per_node, device),
        pairs_per_second=pairs_per_second or flops / max(work, 1.0),
        flops_per_second=flops,
        bytes_per_second=network * 1e9,
    )
    print("\n".join(plan_lines(subject, machine, asked, per_epoch)))
    print(f"\nAdvice: {advice(subject, machine, asked)}")


def pairs_of(text: str, option: str) -> int:
    """Parse an option's number of pairs: `4096`, `64k` (times 1,024) or `10M` (times 1,024 k)."""
    number, factor = text.replace("_", "").replace(",", ""), 1
    for letter, value in (("k", 2**10), ("M", 2**20), ("G", 2**30)):
        if number.lower().endswith(letter.lower()):
            number, factor = number[:-1], value
    try:
        pairs = round(float(number) * factor)
    except (ValueError, OverflowError):
        pairs = 0
    if not 1 <= pairs < 2**63:
        raise ValueError(
            f"Passed `{option} {text}`. It must be a number of pairs, such as 4096, 64k or 10M."
        )
    return pairs
