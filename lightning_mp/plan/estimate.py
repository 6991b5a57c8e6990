"""Memory and time of a contrastive training step, for each method of computing the loss."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lightning_mp.contrastive._sums.agreement import share_workspace
from lightning_mp.contrastive._tiles.tile_backend import TileBackend
from lightning_mp.contrastive._tiles.torch_tiles import TorchTiles
from lightning_mp.plan import formulas
from lightning_mp.plan.formulas import DENSE, FP32, FP64, INF_CL, LOCAL, OURS
from lightning_mp.plan.subject import Subject

# fmt: off
__all__ = ["METHODS", "Machine", "Memory", "Method", "Seconds", "exchanged", "largest",
           "memory", "products", "seconds", "workspace_on"]
# fmt: on


def _tiles_on(device: str, workspace_bytes: int | None = None) -> TileBackend:
    """Return the tile backend of a `"cuda"` or `"cpu"` device, which need not exist here."""
    # Triton exists only on Linux; elsewhere, use the tiles of torch.
    if device == "cpu" or importlib.util.find_spec("triton") is None:
        return TorchTiles(workspace_bytes)
    from lightning_mp.contrastive._tiles.triton_tiles import TritonTiles

    return TritonTiles(workspace_bytes)


def workspace_on(device: str) -> int:
    """Return the default workspace of the loss on a device, in bytes."""
    return _tiles_on(device).budget(torch.device(device))


@dataclass(frozen=True)
class Machine:
    """The machine that a run needs."""

    gpus: int  # ranks, W
    gpu_bytes: float  # memory of a GPU
    host_bytes: float  # memory of a node
    gpus_per_node: int  # ranks that share a node
    device: str = "cuda"  # `"cuda"` or `"cpu"`, the device of the loss
    # Speed of a rank, to predict times.
    pairs_per_second: float = 0.0  # through the towers, replay included
    flops_per_second: float = 0.0  # in the products of the loss
    bytes_per_second: float = 50e9  # sent by a rank

    @property
    def ranks_per_node(self) -> int:
        """Ranks on one node."""
        return min(self.gpus, self.gpus_per_node)


@dataclass(frozen=True)
class Method:
    """A way to compute the loss."""

    name: str  # for tables
    loss: str  # key of `formulas.loss_bytes`
    products: int  # matrix products of `2 b B D` FLOPs, at most
    cached: bool = True  # whether towers run in micro-batches


METHODS = (
    Method("dense, towers at once", DENSE, formulas.CLIP_PRODUCTS, cached=False),
    Method(DENSE, DENSE, formulas.CLIP_PRODUCTS),
    Method(LOCAL, LOCAL, formulas.CLIP_PRODUCTS),
    Method(INF_CL, INF_CL, formulas.INF_CL_PRODUCTS),
    Method(OURS, OURS, formulas.OUR_PRODUCTS),
)
"""The first method is plain DDP; all others have gradient caching, as in the paper."""


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
    """Return the memory that a method needs."""
    rank_batch = batch / machine.gpus
    seen = min(subject.micro_batch, rank_batch)
    # With offload, the device holds the micro-batches copied ahead and the one in use.
    staged = (subject.prefetch + 1) * subject.micro_batch if subject.offload else rank_batch
    # Both towers, before and after normalization.
    features = 4.0 * rank_batch * subject.width * subject.static.activations.itemsize
    towers = subject.towers.values()
    # A step that pools tokens outside of a tower has gradients of all tokens of one call.
    tokens = rank_batch * max(t.tokens_per_pair for t in towers)
    static = subject.static.at_rest(subject.parameters, subject.states, subject.frozen_parameters)
    backbone: float = subject.static.gradient * subject.parameters
    if subject.is_sharded:  # a replay still sums the whole gradients of its tower
        static = (static - subject.static.bucket * subject.parameters) / machine.gpus
        backbone /= machine.gpus
    workspace = workspace_on(machine.device)
    loss = formulas.loss_bytes(method.loss, batch, machine.gpus, subject.width, workspace)
    if method.cached:
        # During a replay, the gradients of the running tower for this micro-batch and the gradients
        # of the features exist in addition.
        backbone += max(seen * t.peak_per_row + FP32 * t.parameters for t in towers)
        backbone += features / 2
    else:  # the towers' graphs exist while the loss is computed, and until their own backward
        saved = rank_batch * sum(t.saved_per_pair for t in towers)
        rising = rank_batch * max(0.0, *(t.peak_per_row - t.saved_per_pair for t in towers))
        backbone, loss = backbone + saved + rising, loss + saved
    # Every worker has two loader batches ready (`prefetch_factor`), besides the batch in use.
    loaded = rank_batch * (1 + 2 * subject.workers / subject.loader_batches)
    return Memory(
        static=static,
        data=min(staged, rank_batch) * subject.pair_bytes,
        features=features + tokens,
        loss=loss,
        backbone=backbone,
        host=machine.ranks_per_node * loaded * subject.host_pair_bytes,
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

    Our second sweep multiplies only the tiles that the workspace could not store in the first. This
    assumes that the texts of all ranks arrive at once.
    """
    if method.loss != OURS:
        return method.products
    dtype, device = subject.static.activations, torch.device(machine.device)
    rows = -(-batch // machine.gpus)
    left = workspace_on(machine.device)
    if machine.gpus > 1:  # the exchange uses a part of the workspace
        _, left = share_workspace([rows] * machine.gpus, subject.width, dtype, left)
    tiles = _tiles_on(machine.device, left)
    kept = tiles.stored_values(rows, batch, dtype, device)
    again = tiles.multiplied_twice(rows, batch, subject.width, dtype, device, kept)
    return method.products - 1 + again / (rows * batch)


def exchanged(
    method: Method, batch: int, subject: Subject, machine: Machine
) -> tuple[float, float]:
    """Return the bytes that a rank sends for a loss and its backward, and its FLOPs.

    The forward sends the texts of a shard to every other rank, and the sums of its columns; the
    backward sends the texts again, their log-sum-exps, and their gradients in fp32.
    """
    ranks, width = machine.gpus, subject.width
    pair_bytes = width * (2 * subject.static.activations.itemsize + FP32) + 2 * FP64
    shared = 1 if method.loss == DENSE else ranks  # every rank computes CLIP's whole dense loss
    flops = 2 * products(method, batch, subject, machine) * batch**2 * width / shared
    return (ranks - 1) * batch / ranks * pair_bytes, flops


class Seconds(NamedTuple):
    """Time of a step and of its parts."""

    towers: float
    loss: float
    exchange: float
    step: float


def seconds(method: Method, batch: int, subject: Subject, machine: Machine) -> Seconds:
    """Return the time of a step with a method."""
    sent, flops = exchanged(method, batch, subject, machine)
    # The rate includes the replay, which does not exist without a gradient cache.
    whole, work = (subject.flops_per_pair(cached=cached) for cached in (True, method.cached))
    share = work / whole if whole else 1.0
    towers = share * batch / machine.gpus / machine.pairs_per_second
    loss, exchange = flops / machine.flops_per_second, sent / machine.bytes_per_second
    # Transfers overlap with the products.
    return Seconds(towers, loss, exchange, towers + max(loss, exchange))
