"""`ContrastiveLoss`: CLIP's loss over the global batch in memory that grows with b, not b^2.

Shapes:
    b: this rank's batch. D: feature width.
"""

from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp.contrastive.arguments import find_problem
from lightning_mp.contrastive.infonce import InfoNCE, Plan
from lightning_mp.contrastive.ring import Ring
from lightning_mp.contrastive.torch_tiles import TorchTiles
from lightning_mp.numerics.floats import FLOAT_DTYPES, accumulation_dtype

__all__ = ["ContrastiveLoss"]

_UNUSABLE = -1  # what a rank reports in place of a batch size when its arguments are bad


class ContrastiveLoss(nn.Module):
    r"""Symmetric contrastive (InfoNCE, CLIP) loss, exact and without a b x b matrix.

    A drop-in for open_clip's `ClipLoss`. A dense loss holds four logit matrices at its peak:
    4.3 GB at b = 16,384 in fp32 and 1.1 TB at 262,144; this one needs a workspace of a fixed size,
    the gradients of the features and some vectors of length b. Where `torch.distributed` is
    initialised, the negatives are those of all ranks.

    .. math::
        L = \frac{1}{2B} \sum_i \left[
            -\log \frac{e^{S_{ii}}}{\sum_j e^{S_{ij}}}
            -\log \frac{e^{S_{ii}}}{\sum_j e^{S_{ji}}} \right],
        \qquad S = \mathrm{logit\_scale} \cdot \mathrm{image} \, \mathrm{text}^T

    **Work**: two sweeps over the tiles of S, four matrix products of `2 b^2 D` FLOPs with the
    backward (a dense loss: six). A locked tower (LiT) saves its product.

    **Precision**: products are summed in fp32, in float64 for float64 features; log-sum-exps are
    kept in float64. The positive is kept apart from the negatives, so a pair with a loss of 1e-12
    keeps four digits of its loss and gradients. Logits up to +-1e4 are safe. NaN and inf propagate.
    Tiles and ranks are added in a fixed order, so a run repeats bit for bit.

    **Several ranks**: batch sizes may differ. The value is the loss of the global batch, on every
    rank. Feature gradients come out W times too large and the scale's as the total, so that the
    *mean* over ranks that DDP and FSDP take gives exactly the gradient of one process with the
    whole batch. All ranks of the group must call forward and backward in the same order.

    `logit_bias` shifts all logits alike, which softmax does not see: its gradient is exactly 0.

    Args:
        process_group: Whose ranks share the batch; `None` is the default group, if there is one.
        workspace_bytes: Memory for tiles, in bytes. `None`: 32 MiB, on CUDA 512 MiB.
        backend: Code that multiplies tiles. `"torch"` runs everywhere; `"auto"` picks the best.

    Shapes:
        image_features, text_features: (b, D), already normalised if they are to be.
        logit_scale, logit_bias: one value. Returns a scalar in fp32 (float64 for float64).

    Raises:
        ValueError: For arguments or features that cannot be used, on all ranks at once.

    References:
        - CLIP, https://arxiv.org/abs/2103.00020
        - Inf-CL, https://arxiv.org/abs/2410.17243
        - LiT (locked image tower), https://arxiv.org/abs/2111.07991

    Example::

        loss_fn = ContrastiveLoss()
        loss = loss_fn(image_features, text_features, self.logit_scale.exp())
    """

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        workspace_bytes: int | None = None,
        backend: Literal["auto", "torch"] = "auto",
    ) -> None:
        super().__init__()
        if backend not in ("auto", "torch"):
            raise ValueError(
                f"Passed `ContrastiveLoss(backend={backend!r})`. `backend` must be 'auto' or "
                "'torch'. Leave it out to get the best that the device offers."
            )
        if workspace_bytes is not None and workspace_bytes < 2**20:
            raise ValueError(
                f"Passed `ContrastiveLoss(workspace_bytes={workspace_bytes!r})`. A tile needs at "
                "least 1 MiB. Pass bytes, such as `64 * 2**20`, or leave it out."
            )
        self.process_group = process_group
        self.workspace_bytes = workspace_bytes
        self.backend = backend
        self._tiles = TorchTiles(workspace_bytes)

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = ...,
        output_dict: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = ...,
        *,
        output_dict: Literal[True],
    ) -> dict[str, Tensor]: ...

    @torch.compiler.disable
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss of the global batch, as `{"contrastive_loss": loss}` if asked for."""
        problem = find_problem(image_features, text_features, logit_scale, logit_bias)
        if problem is not None:
            self._gather_facts([_UNUSABLE] * 6, image_features)  # the other ranks stop as well
            raise ValueError(problem)
        scale = _as_tensor(logit_scale, image_features)
        bias = None if logit_bias is None else _as_tensor(logit_bias, image_features)
        plan = self._plan(image_features, text_features, scale)
        loss: Tensor = InfoNCE.apply(image_features, text_features, scale, bias, plan)
        return {"contrastive_loss": loss} if output_dict else loss

    def extra_repr(self) -> str:
        """Return what `print(module)` shows between its brackets."""
        return f"backend={self.backend!r}, workspace_bytes={self.workspace_bytes!r}"

    def __deepcopy__(self, memo: dict[int, object]) -> "ContrastiveLoss":
        # Weight averaging copies whole modules, and a process group cannot be copied.
        return type(self)(
            process_group=self.process_group,
            workspace_bytes=self.workspace_bytes,
            backend=self.backend,
        ).train(self.training)

    def _world_size(self) -> int:
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        size = dist.get_world_size(self.process_group)
        if size < 1:
            raise ValueError(
                "This rank is not a member of the `process_group` passed to `ContrastiveLoss`. "
                "Pass the group that this rank belongs to."
            )
        return size

    def _plan(self, image_bD: Tensor, text_bD: Tensor, scale: Tensor) -> Plan:
        """Agree with the other ranks on batch sizes and on the gradients that are needed."""
        grad = torch.is_grad_enabled()
        needs = [grad and tensor.requires_grad for tensor in (image_bD, text_bD, scale)]
        world_size = self._world_size()
        if world_size == 1:
            return Plan(Ring([image_bD.shape[0]]), self._tiles, *needs)
        facts = [*image_bD.shape, FLOAT_DTYPES.index(image_bD.dtype), *needs]
        by_rank = self._gather_facts(facts, image_bD)
        sizes, widths, dtypes, *needs_by_rank = zip(*by_rank, strict=True)
        if _UNUSABLE in sizes:
            raise ValueError(
                f"Rank {sizes.index(_UNUSABLE)} of {world_size} passed arguments that "
                "`ContrastiveLoss` cannot use; its own error says why. Every rank stops here, so "
                "that none waits for it."
            )
        if len(set(widths)) > 1 or len(set(dtypes)) > 1:
            formats = [(width, FLOAT_DTYPES[dtype]) for _, width, dtype, *_ in by_rank]
            raise ValueError(
                f"Passed features of (width, dtype) {formats} on ranks 0 to {world_size - 1}. All "
                "ranks must have the same. Use the same model and precision everywhere."
            )
        ring = Ring(sizes, dist.get_rank(self.process_group), self.process_group)
        return Plan(ring, self._tiles, *(any(needed) for needed in needs_by_rank))

    def _gather_facts(self, facts: list[int], image_features: object) -> list[list[int]]:
        """Return the facts of every rank in the order of ranks."""
        world_size = self._world_size()
        if world_size == 1:
            return [facts]
        device = image_features.device if isinstance(image_features, Tensor) else None
        mine = torch.tensor([int(fact) for fact in facts], device=device)
        by_rank = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(by_rank, mine, group=self.process_group)
        return [tensor.tolist() for tensor in by_rank]


def _as_tensor(value: Tensor | float, like: Tensor) -> Tensor:
    """Return a tensor on the device of `like`; a parameter elsewhere still gets its gradient."""
    if isinstance(value, Tensor):
        return value.to(like.device)
    return torch.tensor(float(value), dtype=accumulation_dtype(like.dtype), device=like.device)
