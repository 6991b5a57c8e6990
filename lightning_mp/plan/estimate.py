"""What every method of a contrastive loss needs of a machine, for one subject.

Legend: ``B`` global batch, ``b`` batch of a rank, ``W`` ranks, ``D`` feature width, ``m``
micro-batch.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from lightning_mp.contrastive._sums.agreement import share_workspace
from lightning_mp.contrastive._tiles.tile_backend import TileBackend
from lightning_mp.contrastive._tiles.torch_tiles import TorchTiles
from lightning_mp.plan import formulas
from lightning_mp.plan.formulas import DENSE, INF_CL, LOCAL, OURS
from lightning_mp.plan.subject import Subject

__all__ = [
    "METHODS",
    "Machine",
    "Memory",
    "Method",
    "Rate",
    "Seconds",
    "exchanged",
    "largest",
    "memory",
    "products",
    "workspace_on",
]


def _tiles_on(device: str, workspace_bytes: int | None = None) -> TileBackend:
    """Return what multiplies our loss's tiles on a `"cuda"` or `"cpu"` device, which need not be.

    Triton is there on Linux only; where a plan is made without it, torch's tiles stand in.
    """
    if device == "cpu" or importlib.util.find_spec("triton") is None:
        return TorchTiles(workspace_bytes)
    from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles

    return TritonTiles(workspace_bytes)


def workspace_on(device: str) -> int:
    """Return the bytes of our loss's workspace there."""
    return _tiles_on(device).budget(torch.device(device))


@dataclass(frozen=True)
class Machine:
    """What is to be rented."""

    gpus: int  # ranks W
    gpu_bytes: float  # memory of each
    host_bytes: float  # memory of a node
    gpus_per_node: int  # ranks that share it
    workers: int  # of the loader of a rank
    device: str = "cuda"  # `"cuda"` or `"cpu"`, which sizes the loss's workspace

    @property
    def ranks_per_node(self) -> int:
        """Ranks on one node."""
        return min(self.gpus, self.gpus_per_node)


@dataclass(frozen=True)
class Method:
    """A way to compute the loss."""

    name: str  # for tables
    loss: str  # whose bytes it takes; see `formulas.loss_bytes`
    products: int  # matrix products of `2 b B D` FLOPs, at the most
    cached: bool = True  # whether towers see micro-batches


METHODS = (
    Method("dense, towers at once", DENSE, formulas.CLIP_PRODUCTS, cached=False),
    Method(DENSE, DENSE, formulas.CLIP_PRODUCTS),
    Method(LOCAL, LOCAL, formulas.CLIP_PRODUCTS),
    Method(INF_CL, INF_CL, formulas.INF_CL_PRODUCTS),
    Method(OURS, OURS, formulas.OUR_PRODUCTS),
)
"""The first is plain DDP; all others have gradient caching, as in the paper."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at its peak, and of its node's host."""

    static: float
    data: float
    features: float
    loss: float
    backbone: float
    host: float

    @property
    def peak(self) -> float:
        """Bytes on the device."""
        return self.data + self.features + self.static + max(self.loss, self.backbone)


def memory(method: Method, batch: int, subject: Subject, machine: Machine) -> Memory:
    """Return what a method needs."""
    rank_batch = batch / machine.gpus
    seen = min(subject.micro_batch, rank_batch) if method.cached else rank_batch
    # With offload, the device holds the micro-batches copied ahead and the one in use.
    staged = (subject.prefetch + 1) * subject.micro_batch if subject.offload else rank_batch
    features = formulas.our_features_bytes(rank_batch, subject.width, subject.feature_itemsize)
    towers = subject.towers.values()
    saved = sum(seen * tower.saved_per_pair for tower in towers)
    backbone: float = subject.static.gradient * subject.parameters
    if method.cached:
        # Gradients are summed aside; the running tower's for this micro-batch come on top, and
        # features have their gradients by now.
        backbone += max(seen * t.saved_per_pair + formulas.FP32 * t.parameters for t in towers)
        backbone += features / 2
    else:
        backbone += saved
    workspace = workspace_on(machine.device)
    loss = formulas.loss_bytes(method.loss, batch, machine.gpus, subject.width, workspace)
    return Memory(
        static=subject.static.at_rest(subject.parameters, subject.states)
        + subject.static.held * subject.frozen_parameters,
        data=min(staged, rank_batch) * subject.pair_bytes,
        features=features,
        # Without the cache the towers' graphs are alive while the loss is computed.
        loss=loss + (0 if method.cached else saved),
        backbone=backbone,
        host=formulas.host_bytes(
            rank_batch=rank_batch,
            pair_bytes=subject.pair_bytes,
            ranks=machine.ranks_per_node,
            workers=machine.workers,
            loader_batches=subject.loader_batches,
        ),
    )


def largest(method: Method, subject: Subject, machine: Machine) -> tuple[int, int]:
    """Return the largest global batches that fit the device and the host."""

    def need(batch: int) -> Memory:
        return memory(method, batch, subject, machine)

    most, step = formulas.largest_batch, machine.gpus
    return (
        most(lambda batch: need(batch).peak, machine.gpu_bytes, step),
        most(lambda batch: need(batch).host, machine.host_bytes, step),
    )


def products(method: Method, batch: int, subject: Subject, machine: Machine) -> float:
    """Return the matrix products of `2 b B D` FLOPs of a loss and its backward.

    Ours does without a part of one: what tiles it keeps from the first sweep for the second, here
    as if the texts of all ranks came at once.
    """
    if method.loss != OURS:
        return method.products
    dtype, device = getattr(torch, subject.static.activations), torch.device(machine.device)
    rows = -(-batch // machine.gpus)
    # What travels between ranks has its part of the workspace first.
    left = workspace_on(machine.device)
    if machine.gpus > 1:
        _, left = share_workspace([rows] * machine.gpus, subject.width, dtype, left)
    tiles = _tiles_on(machine.device, left)
    kept = tiles.stored_values(rows, batch, dtype, device)
    again = tiles.multiplied_twice(rows, batch, subject.width, dtype, device, kept)
    return method.products - 1 + again / (rows * batch)


def exchanged(
    method: Method, batch: int, subject: Subject, machine: Machine
) -> tuple[float, float]:
    """Return the bytes that a rank sends for a loss and its backward, and its FLOPs meanwhile."""
    ranks, width = machine.gpus, subject.width
    # CLIP's dense loss is computed whole on every rank.
    shared = 1 if method.loss == DENSE else ranks
    return (
        formulas.exchange_bytes(batch / ranks, ranks, width, subject.feature_itemsize),
        formulas.loss_flops(batch, shared, width, products(method, batch, subject, machine)),
    )


@dataclass(frozen=True)
class Rate:
    """How fast a rank is."""

    pairs_per_second: float  # through the towers, with gradient caching's replay
    flops_per_second: float  # in the loss's products
    bytes_per_second: float  # that a rank sends
    source: str  # where the figures come from, for the table


@dataclass(frozen=True)
class Seconds:
    """Of one step."""

    towers: float
    loss: float
    exchange: float

    @classmethod
    def of(
        cls, method: Method, batch: int, subject: Subject, machine: Machine, rate: Rate
    ) -> Seconds:
        """Return what a step of a method takes."""
        sent, flops = exchanged(method, batch, subject, machine)
        # The rate is that of gradient caching, without which there is a forward less.
        whole, work = (subject.flops_per_pair(cached=cached) for cached in (True, method.cached))
        share = work / whole if whole else 1.0
        return cls(
            towers=share * batch / machine.gpus / rate.pairs_per_second,
            loss=flops / rate.flops_per_second,
            exchange=sent / rate.bytes_per_second,
        )

    @property
    def step(self) -> float:
        """Transfers run beside the products."""
        return self.towers + max(self.loss, self.exchange)
