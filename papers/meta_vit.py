"""Meta's ladder of a faster ViT, where each rung adds to the one before, and throughput by chips.

On a GPU the model is a ViT-H/16, and images per second and TFLOP/s are measured. On a CPU it is a
small ViT on drawn characters, and FLOPs, bytes and losses are measured. Speed is not judged on a
CPU, which is slow at half-precision products.

References:
    Speeding up Vision Transformers, https://ai.meta.com, 5 May 2022
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp import BalancedAMP, ModelParallelBalancedAMP, PureFP16
from papers._characters import CHARACTERS, draw
from papers._fit import Batch, Classifier, Outcome, fit
from papers._vit import SIZES, Layout, Pool, ViT, ViTSize
from papers.allocation import peak_allocated
from papers.output import COMPUTED, MEASURED, PRINTED, Output, Row, line_width
from papers.ranks import on_ranks

__all__ = ["LADDER", "PARTS", "Rung", "Scene", "flops_of"]

_PRECISIONS: dict[str, Callable[[], Precision]] = {
    "32-true": Precision,
    "O1": lambda: BalancedAMP(weights="full"),
    "balanced": BalancedAMP,
    "balanced, FSDP": ModelParallelBalancedAMP,
    "pure fp16": PureFP16,
}
_LAST = 10  # number of last steps whose losses are averaged
_IMAGENET = 1_281_167  # images of an epoch
# Meta's figures 2 and 3 for a ViT-H/16: rate relative to DDP with O1, and hours of an epoch.
_METAS_LADDER = {
    "DDP, O1": (1.0, 0.65),
    "FSDP, balanced, batch 560": (1.51, 0.43),
    "256 px": (1.86, None),
    "full fp16, less accurate": (2.18, None),
}
_METAS_CHIPS = 64, 1.83  # figure 4: GPUs, and rate relative to O1 on as many
_METAS_A100 = 4.05  # figure 1: images per second relative to a V100
# TFLOP/s of tensor cores in fp16 without sparsity, and GB/s of memory, from NVIDIA's data sheets.
_PEAKS = {"V100 SXM2": (125, 900), "A100 SXM4 80 GB": (312, 2039), "H100 SXM5": (989, 3350)}


@dataclass(frozen=True)
class Rung:
    """A training; each rung changes one property of the rung before."""

    name: str  # the property that it changes
    precision: str = "32-true"  # one of `_PRECISIONS`
    optimizer: str = "foreach"  # implementation of AdamW
    pool: Pool = "cls"  # input of the head
    layout: Layout = "nld"  # layout of the activations
    larger: bool = False  # images of 256 instead of 224 pixels, or as many patches of smaller ones


_CHANGES: tuple[dict[str, Any], ...] = (
    {"name": "O1", "precision": "O1"},
    {"name": "balanced", "precision": "balanced"},
    {"name": "fused step", "optimizer": "fused"},
    {"name": "pooled head", "pool": "mean"},
    {"name": "batch second", "layout": "lnd"},
    {"name": "FSDP", "precision": "balanced, FSDP"},
    {"name": "256 px", "larger": True},
    # `PureFP16` needs whole weights on every rank: DDP again.
    {"name": "pure fp16, DDP", "precision": "pure fp16", "optimizer": "safe"},
)
LADDER = tuple(
    accumulate(_CHANGES, lambda rung, change: replace(rung, **change), initial=Rung("32-true, DDP"))
)


@dataclass(frozen=True)
class Scene:
    """Sizes and settings that all rungs share."""

    size: ViTSize  # size of the ViT
    # Edge of the images without and with `larger`: 7 and 8 patches, 14 and 16 on a GPU.
    edges: tuple[int, int]
    batch: int  # images of a rank and step
    steps: int  # steps of a training
    lr: float  # learning rate of AdamW
    device: str  # device type

    @classmethod
    def for_this_machine(cls, *, fast: bool) -> Scene:
        """Return the scene for this machine."""
        if torch.cuda.is_available() and not fast:
            return cls(SIZES["H16"], (224, 256), 64, 60, 1e-3, "cuda")
        # A CPU takes about 0.1 s for a step in fp16, so all rungs take minutes, and each one
        # learns.
        size = replace(SIZES["characters"], depth=1) if fast else SIZES["characters"]
        return cls(size, (28, 32), 4 if fast else 32, 2 if fast else 300, 3e-3, "cpu")

    def edge(self, rung: Rung) -> int:
        """Return the edge of a rung's images."""
        return self.edges[rung.larger]

    def model(self, rung: Rung) -> ViT:
        """Return a rung's model on the default device."""
        kinds: dict[str, Any] = {"pool": rung.pool, "layout": rung.layout, "channels": 1}
        return ViT(self.size, image=self.edge(rung), classes=len(CHARACTERS), **kinds)

    def batches(self, rung: Rung, steps: int, rank: int = 0) -> list[Batch]:
        """Return the batches of a rank."""
        images, labels = draw(steps * self.batch, self.edge(rung), seed=1 + rank)
        parts = zip(images.split(self.batch), labels.split(self.batch), strict=True)
        return [(x.to(self.device), y.to(self.device)) for x, y in parts]


class _Sharding(Classifier):
    """Shards its blocks and itself under `ModelParallelStrategy`."""

    def configure_model(self) -> None:
        plugin: Any = self.trainer.precision_plugin
        if not isinstance(plugin, ModelParallelBalancedAMP) or self.device_mesh is None:
            return
        mesh = self.device_mesh["data_parallel"]
        plugin.shard_fp32_modules(self, mesh)
        blocks: Any = self.model.blocks
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=plugin.mp_policy)
        fully_shard(self.model, mesh=mesh, mp_policy=plugin.mp_policy)


def train(scene: Scene, rung: Rung, batches: Sequence[Batch], *, seed: int = 0) -> Outcome:
    """Train a rung on this rank, in the process group if there is one."""
    device, is_in_group = torch.device(scene.device), dist.is_initialized()
    ranks = dist.get_world_size() if is_in_group else 1
    torch.manual_seed(seed)
    with device:
        classifier = _Sharding(scene.model(rung), lr=scene.lr, optimizer=rung.optimizer)
    backend = "nccl" if device.type == "cuda" else "gloo"
    strategy: pl.strategies.Strategy = DDPStrategy(process_group_backend=backend)
    if "FSDP" in rung.precision:
        strategy = ModelParallelStrategy(ranks, 1, process_group_backend=backend)
    outcome = fit(
        classifier,
        batches,
        device=device,
        plugin=_PRECISIONS[rung.precision](),
        strategy=strategy,
        devices=ranks,
        # At least one step is timed.
        warm_up=min(5, len(batches) - 1),
    )
    if not is_in_group:  # the strategy made a group, which the next training must not find
        dist.destroy_process_group()
    return outcome


def flops_of(scene: Scene, rung: Rung) -> int:
    """Return the FLOPs of forward and backward for one image, three times those of the forward."""
    with torch.device("meta"):
        model, edge = scene.model(rung), scene.edge(rung)
        image = torch.empty(1, 1, edge, edge)
    with FlopCounterMode(display=False) as counter:
        model(image)
    return 3 * int(counter.get_total_flops())


def _rung_peak(scene: Scene, rung: Rung, outcome: Outcome) -> int | None:
    """Return the peak memory: that of the allocator, or on a CPU that of two steps."""
    if scene.device == "cuda":
        return outcome.peak_bytes
    batches = scene.batches(rung, 2)  # drawing more would take more memory than the model
    return peak_allocated(lambda: train(scene, rung, batches))


def ladder(out: Output) -> None:
    """Train every rung, and compare its loss with that of the first rung and of another seed."""
    scene = Scene.for_this_machine(fast=out.fast)
    on_cpu = scene.device == "cpu"
    seeds = [(rung, 0) for rung in LADDER]
    # Another seed shows how much of a difference between rungs is noise.
    seeds.insert(1, (replace(LADDER[0], name="32-true, DDP, another seed"), 1))
    rows: list[Row] = []
    losses: dict[str, Sequence[float]] = {}
    for rung, seed in out.progress(seeds, "rungs"):
        outcome = train(scene, rung, scene.batches(rung, scene.steps), seed=seed)
        losses[rung.name] = outcome.losses
        loss = statistics.mean(outcome.losses[-_LAST:])
        flops = flops_of(scene, rung)
        seconds = statistics.median(outcome.step_seconds) if outcome.step_seconds else None
        rate = None if on_cpu or seconds is None else scene.batch / seconds
        rows.append(
            {
                "rung": rung.name,
                "gflops_an_image": flops / 1e9,
                "images_a_second": rate,
                "times_O1": None,
                "epoch_h": rate and _IMAGENET / rate / 3600,
                "tflops_a_chip": rate and rate * flops / 1e12,
                "peak_mib": (_rung_peak(scene, rung, outcome) or 0) / 2**20,
                "loss": loss,
                "of_the_first": loss / (rows[0]["loss"] if rows else loss) - 1,
                "skipped": outcome.skipped_steps,
                "kind": MEASURED,
            }
        )
    base = next(row["images_a_second"] for row in rows if row["rung"] == "O1")
    for row in rows:
        row["times_O1"] = base and row["images_a_second"] / base
    printed: list[Row] = [
        {"rung": name, "times_O1": times, "epoch_h": hours, "kind": PRINTED}
        for name, (times, hours) in _METAS_LADDER.items()
    ]
    verdict = "speed is not judged on a CPU" if on_cpu else "measured on one chip"
    before, after = scene.edges
    sizes = f"images of {before} px, {after} from the rung `256 px` on"
    title = f"The ladder, {scene.steps} steps of {scene.batch} {sizes}; {verdict}"
    out.table("ladder", [*rows, *printed], title)
    with out.picture("ladder", 2, f"Meta's ladder: {sizes}; {verdict}") as (left, right):
        column = "peak_mib" if on_cpu else "images_a_second"
        # `barh` draws upwards, so the order is reversed.
        bars = {row["rung"]: row[column] for row in rows[::-1]}
        left.barh([*bars], [*bars.values()])
        left.set(xlabel="peak MiB of a step" if on_cpu else "images a second")
        for index, (name, found) in enumerate(losses.items()):
            width = max(1, len(found) // 25)
            means = [statistics.mean(found[i : i + width]) for i in range(0, len(found), width)]
            steps = range(width, len(found) + 1, width)
            right.plot(steps, means[: len(steps)], label=name, linewidth=line_width(index, losses))
        right.set(xlabel="step", ylabel=f"loss, mean of {width} steps")
        # Beside the axes, where the legend hides no line.
        right.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _seconds_on_rank(rank: int, scene: Scene, rung: Rung, steps: int) -> float:
    """Return the median seconds of a step, with one GPU for each rank if there are any."""
    if scene.device == "cuda":
        # Replaces the gloo group that `on_ranks` made.
        size = dist.get_world_size()
        dist.destroy_process_group()
        torch.accelerator.set_device_index(rank)
        address = "tcp://127.0.0.1:29531"
        dist.init_process_group("nccl", init_method=address, rank=rank, world_size=size)
    return statistics.median(train(scene, rung, scene.batches(rung, steps, rank)).step_seconds)


def chips(out: Output) -> None:
    """Measure TFLOP/s a chip by number of chips, and compute the bytes that a chip sends a step."""
    scene = Scene.for_this_machine(fast=out.fast)
    on_cpu = scene.device == "cpu"
    most = 2 if on_cpu else torch.cuda.device_count()
    counts = [2**i for i in range(most.bit_length()) if 2**i <= most]
    rungs = [rung for rung in LADDER if rung.name in ("O1", "batch second", "FSDP")]
    rows: list[Row] = []
    columns = "rung", "chips", "tflops_a_chip", "times_O1", "mib_sent_a_step", "kind"
    for rung in rungs:
        with torch.device("meta"):
            # On the meta device, so that counting allocates no ViT-H.
            weights = sum(p.numel() for p in scene.model(rung).parameters())
        for count in out.progress(counts, f"{rung.name}, chips"):
            steps = 2 if out.fast else 12
            # All ranks wait for the slowest one in the all-reduce.
            seconds = max(on_ranks(_seconds_on_rank, count, scene, rung, steps))
            tflops = scene.batch * flops_of(scene, rung) / seconds / 1e12
            figures = rung.name, count, tflops, None, None, MEASURED
            rows.append(dict(zip(columns, figures, strict=True)))
        for count in (1, 2, 4, 8, 16, 32, 64):
            share = (count - 1) / count
            # A ring all-reduce sends each gradient twice; FSDP all-gathers half-precision weights
            # twice and reduce-scatters fp32 gradients once.
            sent = 2 * 4 * share if "FSDP" not in rung.precision else (2 * 2 + 4) * share
            computed = {"mib_sent_a_step": sent * weights / 2**20, "kind": COMPUTED}
            rows.append({"rung": rung.name, "chips": count} | computed)
    measured = [row for row in rows if row["kind"] == MEASURED and not on_cpu]
    base = {row["chips"]: row["tflops_a_chip"] for row in measured if row["rung"] == "O1"}
    for row in measured:
        row["times_O1"] = row["tflops_a_chip"] / base[row["chips"]]
    count, times = _METAS_CHIPS
    rows.append({"rung": "all of Meta's", "chips": count, "times_O1": times, "kind": PRINTED})
    verdict = "not judged: ranks share a CPU" if on_cpu else "one GPU a rank"
    out.table("chips", rows, f"Throughput by chips ({verdict}), and bytes by formula")
    with out.picture("chips", 2, "Scaling") as (left, right):
        for index, rung in enumerate(rungs):
            own = [row for row in rows if row["rung"] == rung.name]
            for axes, column in ((left, "tflops_a_chip"), (right, "mib_sent_a_step")):
                points = [(row["chips"], row[column]) for row in own if row.get(column) is not None]
                style = {"label": rung.name, "linewidth": line_width(index, rungs)}
                axes.plot(*zip(*points, strict=True), "o-", **style)
        left.set(title=f"measured; {verdict}", ylabel="TFLOP/s a chip", ylim=(0, None))
        right.set(title="computed", ylabel="MiB that a chip sends a step")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set(xlabel="chips")
            axes.legend()


def gpus(out: Output) -> None:
    """Compare Meta's gain of an A100 over a V100 with the ratio of the chips' peak rates."""
    columns = "chip", "tflops", "gb_a_second", "times_V100", "times_V100_by_memory", "kind"
    peaks = [(chip, t, gb, t / 125, gb / 900, COMPUTED) for chip, (t, gb) in _PEAKS.items()]
    # The larger ratio, of FLOPs or of memory.
    explained = max(peaks[1][3:5])
    printed = [
        ("A100, Meta's ViT-H/16", None, None, _METAS_A100, None, PRINTED),
        ("left to software and batch", None, None, _METAS_A100 / explained, None, COMPUTED),
    ]
    measured = []
    scene, rung = Scene.for_this_machine(fast=out.fast), LADDER[-2]
    if scene.device == "cuda":
        seconds = train(scene, rung, scene.batches(rung, scene.steps)).step_seconds
        tflops = scene.batch * flops_of(scene, rung) / statistics.median(seconds) / 1e12
        name = f"{torch.cuda.get_device_name()}, {rung.name}"
        measured.append((name, tflops, None, None, None, MEASURED))
    rows = [dict(zip(columns, row, strict=True)) for row in (*peaks, *printed, *measured)]
    out.table("gpus", rows, "Throughput by GPU: peaks of the data sheets, and Meta's gain")
    with out.picture("gpus", 1, "Times a V100, by GPU") as (axes,):
        bars = {f"{chip}, peak": times for chip, _, _, times, *_ in peaks}
        bars |= {f"{chip}, memory": times for chip, _, _, _, times, _ in peaks}
        bars |= {"A100, printed by Meta": _METAS_A100}
        colors = ["C1", *["C0"] * (2 * len(peaks))]  # highlights the printed figure
        axes.barh([*bars][::-1], [*bars.values()][::-1], color=colors)
        axes.set(xlabel="times a V100 SXM2")


PARTS = {part.__name__: part for part in (ladder, chips, gpus)}
