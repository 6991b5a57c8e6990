"""The command `lightning-mp plan`; it imports what it needs when it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lightning_mp.plan.estimate import Rate
    from lightning_mp.plan.subject import Subject

__all__ = ["pairs_of", "plan"]


def plan(
    config: str | None = None,
    model: str | None = None,
    batch: str | None = None,
    gpus: int = 8,
    gpus_per_node: int = 8,
    gpu_memory: float = 80.0,
    host_memory: float = 1000.0,
    workers: int = 8,
    device: Literal["cuda", "cpu"] = "cuda",
    precision: str | None = None,
    micro_batch: int | None = None,
    offload: bool | None = None,
    loader_batches: int | None = None,
    pairs: str | None = None,
    pairs_per_second: str | None = None,
    tflops: float | None = None,
    network: float = 50.0,
    picture: str = "plan.png",
) -> None:
    """Say what memory and time a contrastive run needs, before it is rented.

    Memory by method of the loss (dense, OpenCLIP's local loss, Inf-CL, ours), the largest batch of
    each, data on device and host, and the time of a step: all computed, from the bytes that the
    model's towers save for the backward and the states that its optimizer keeps. Both are measured
    on tensors without memory.

    Args:
        config: YAML file of a run, as for `lightning-mp fit --config`.
        model: In place of a config: `ViT-L/14`, `ViT-B/16`, `ViT-B/32`, a class of transformers, a
            folder with a config.json, or a name of open_clip. Nothing is downloaded.
        batch: Global batch, such as 10M or 1024k; k is 1,024 and M 1,024 k, as in the papers. The
            default is the config's: `batch_size` of its data module, or what its loader yields on
            all ranks.
        gpus: Ranks.
        gpus_per_node: Ranks that share a host.
        gpu_memory: Of each, in GiB.
        host_memory: Of a node, in GiB.
        workers: Of the loader of a rank.
        device: `cuda` or `cpu`, which sizes the workspace of the loss.
        precision: `32-true`, `16-mixed`, `bf16-mixed`, `BalancedAMP`, `PureFP16` or `bf16-true`.
            The default is the config's, or `BalancedAMP`.
        micro_batch: Pairs that a tower sees at a time. The default is the config's, or 128.
        offload: Whether the batch stays in host memory. The default is the config's.
        loader_batches: Loader batches of a step. The default is the config's, or 1.
        pairs: In an epoch, such as 400M, for its hours.
        pairs_per_second: Of one GPU through the towers, with the replay; `measure` runs the
            config's model here.
        tflops: That a GPU sustains, for the loss, and for the towers where no rate is given.
        network: GB a second that a GPU sends.
        picture: PNG file for memory against batch; an empty name draws none. A file that is not an
            earlier plan's stays, and the name gets `-v1`.
    """
    if (config is None) == (model is None):
        raise SystemExit("lightning-mp plan: pass either `--config` or `--model`.")
    try:
        subject = _subject(config, model, precision)
        chosen: dict[str, Any] = {
            "micro_batch": micro_batch,
            "offload": offload,
            "loader_batches": loader_batches,
        }
        subject = replace(subject, **{k: v for k, v in chosen.items() if v is not None})
        implied = subject.batch or (subject.rank_batch and subject.rank_batch * gpus)
        asked = implied if batch is None else pairs_of(batch)
        rate = _rate(subject, config, pairs_per_second, tflops, network)
        per_epoch = None if pairs is None else pairs_of(pairs)
    # What was passed is at fault: a sentence in place of a traceback.
    except (ValueError, OSError) as error:
        raise SystemExit(f"lightning-mp plan: {error}") from None
    if asked is None:
        raise SystemExit("lightning-mp plan: pass the global batch by `--batch`, such as 1024k.")
    from lightning_mp.plan.estimate import Machine
    from lightning_mp.plan.formulas import GIB
    from lightning_mp.plan.table import advice, draw_plan, plan_lines

    machine = Machine(gpus, gpu_memory * GIB, host_memory * GIB, gpus_per_node, workers, device)
    print("\n".join(plan_lines(subject, machine, asked, rate, per_epoch)))
    print(f"\nAdvice: {advice(subject, machine, asked)}")
    if picture:
        try:
            print(f"Picture: {draw_plan(Path(picture), subject, machine, asked).resolve()}")
        except ModuleNotFoundError:
            print("No picture: it needs matplotlib, `pip install 'lightning-mp[demo]'`.")
        except (OSError, ValueError) as error:  # a name without a format, a disk that is full
            print(f"No picture: {error}. Pass a PNG file that can be written by `--picture`.")


def pairs_of(text: str) -> int:
    """Read a number of pairs: `4096`, `64k` of 1,024, `10M` of 1,024 k."""
    number, factor = text.replace("_", "").replace(",", ""), 1
    for letter, value in (("k", 2**10), ("M", 2**20), ("G", 2**30)):
        if number.lower().endswith(letter.lower()):
            number, factor = number[:-1], value
    try:
        pairs = round(float(number) * factor)
    except (ValueError, OverflowError):
        pairs = 0
    if pairs < 1:
        raise ValueError(f"Passed {text!r} as a number of pairs. Write it as 4096, 64k or 10M.")
    return pairs


def _subject(config: str | None, model: str | None, precision: str | None) -> Subject:
    from lightning_mp.plan.subject import PRECISIONS

    if precision is not None and precision not in PRECISIONS:
        raise ValueError(
            f"Passed `--precision {precision}`. It must be one of {', '.join(PRECISIONS)}."
        )
    if config is not None:
        from lightning_mp.plan.config import subject_of_config

        return subject_of_config(config, precision)
    from lightning_mp.plan.sources import subject_of_model

    return subject_of_model(str(model), precision or "BalancedAMP")


def _rate(
    subject: Subject,
    config: str | None,
    pairs_per_second: str | None,
    tflops: float | None,
    network: float,
) -> Rate | None:
    """Return the rate that was given or measured, or what it follows from."""
    from lightning_mp.plan.estimate import Rate

    work = subject.flops_per_pair(cached=True)
    if pairs_per_second is None:
        if tflops is None:
            return None
        rate = tflops * 1e12 / work
        source = f"computed, {rate:,.0f} pairs/s a rank from {work / 1e9:,.0f} GFLOP a pair"
        source += f" at the {tflops:g} TFLOP/s given"
        return Rate(rate, tflops * 1e12, network * 1e9, source)
    if pairs_per_second == "measure":
        if config is None:
            raise ValueError(
                "Passed `--pairs-per-second measure` without `--config`. Only a config has data to "
                "run on. Pass a number, or `--tflops`."
            )
        from lightning_mp.plan import config as of_config

        # As it is printed, so that who passes the printed rate gets the same times.
        rate = float(f"{of_config.pairs_per_second(config, subject.micro_batch):g}")
        source = "measured on this machine's CPU"
    else:
        rate, source = float(pairs_per_second), "given"
    flops = rate * work if tflops is None else tflops * 1e12
    source += f", {rate:g} pairs/s a rank; products at {flops / 1e12:.3g} TFLOP/s"
    return Rate(rate, flops, network * 1e9, source)
