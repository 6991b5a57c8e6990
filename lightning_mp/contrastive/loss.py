"""`ContrastiveLoss`: CLIP's loss over the global batch in memory that grows with b, not b^2.

Shapes:
    b: this rank's batch. D: feature width.
"""

import copy
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp._arguments import explains_arguments
from lightning_mp.contrastive.agreement import agree, report_unusable
from lightning_mp.contrastive.arguments import (
    as_tensor,
    check_derivatives,
    find_problem,
    in_one_dtype,
)
from lightning_mp.contrastive.backends import (
    Backend,
    Directions,
    ExchangeName,
    TileDtype,
    check_choices,
    triton_problem,
)
from lightning_mp.contrastive.infonce import InfoNCE
from lightning_mp.contrastive.input_checks import InputChecks
from lightning_mp.contrastive.library import infonce
from lightning_mp.contrastive.open_clip_arguments import check_ranks, take_open_clip
from lightning_mp.contrastive.statistics import LossStatistics

__all__ = ["ContrastiveLoss"]


@explains_arguments(
    hints={
        "temperature": "Pass `1 / temperature` as `logit_scale` in the call.",
        "logit_scale": "Pass it in the call.",
    }
)
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
    backward (a dense loss: six). A locked tower (LiT) saves its product. The torch tiles keep what
    fits half of the workspace (the rest of it past 64 MiB, on CUDA 1 GiB) until the backward: where
    all tiles fit, three products. Triton tiles are not kept.

    Features of two dtypes, as those of a locked tower that were kept in fp32, are taken in the
    wider one. Only first derivatives exist, and no transforms of `torch.func`: both are refused.

    **Precision**: products are summed in fp32, in float64 for float64 features; log-sum-exps are
    kept in float64. The positive is kept apart from the negatives, so a pair with a loss of 1e-12
    keeps four digits of its loss and gradients. Logits up to +-1e4 are safe. NaN and inf propagate.
    Tiles and ranks are added in a fixed order, so a run repeats bit for bit. Autocast changes
    nothing: features are taken in the dtype that they have.

    **Backends**: on an NVIDIA GPU (A100, RTX 30 or later) Triton kernels multiply on tensor cores
    and take one exponential a logit; everywhere else torch does. The Triton tiles keep the softmax
    between its two products in `tile_dtype`:

    - `"auto"`: fp16 and bf16 features as they are, the softmax in the same dtype (gradients within
      2e-4 and 2e-3 in norm, before they are rounded to the features' dtype); fp32 as `"fp32"`.
    - `"bf16"`, `"fp16"`: the same with the features rounded to it. Three times as fast for fp32
      features; fp16 needs features within +-65504.
    - `"fp32"`: as exact as fp32 arithmetic, gradients within 1e-5. fp32 features take three
      products of 16-bit halves for one; the softmax is kept in two halves, 12 or 6 units of work.
    - `"tf32"`: fp32 features, logits in tf32 (10 bits); the gradient products are torch's and
      follow `torch.set_float32_matmul_precision`. 16-bit features as `"auto"`.

    The torch tiles multiply in fp32, or float64, whatever `tile_dtype` says.

    **Several ranks**: batch sizes may differ. The value is the loss of the global batch, on every
    rank. Feature gradients come out W times too large and the scale's as the total, so that the
    *mean* over ranks that DDP and FSDP take gives exactly the gradient of one process with the
    whole batch. All ranks of the group must call forward and backward in the same order. Beside the
    features a rank holds at most `8 b D` values of four bytes and the workspace.

    `logit_bias` shifts all logits alike, which softmax does not see: its gradient is exactly 0.

    **Duplicates**: where an image stands in the batch with several texts, each of these would be a
    negative of the others' rows, and a perfect embedding of two would have a loss of log 2. With
    `ids` in the call, pairs of equal ids are left out of the sums over j, on whatever ranks they
    are; i itself stays. The ids travel with the texts. torch's tiles do it, also on CUDA.

    **Statistics**: with `statistics=True` in the call it returns `(loss, LossStatistics)`: top-1
    accuracy both ways, mean probability of the positives and the largest logit, of the whole batch,
    from the same sweep.

    **More texts than images**: the first b texts belong to the images, in order. Any number after
    them, on any ranks, are negatives of all images (hard negatives, mined for these images or not)
    and look for no image: the sum over j of the first term goes over all texts of all ranks.

    Args:
        process_group: Whose ranks share the batch; `None` is the default group, if there is one.
        workspace_bytes: Memory for tiles, in bytes. `None`: 32 MiB, on CUDA 512 MiB.
        backend: Code that multiplies tiles. `"torch"` runs everywhere, `"triton"` on CUDA devices
            of compute capability 8.0 or higher; `"auto"` picks Triton where it runs.
        tile_dtype: What Triton tiles multiply: `"auto"`, `"bf16"`, `"fp16"`, `"tf32"`, `"fp32"`.
        autotune: Time the Triton tile shapes at the first call and keep the fastest. The table's
            own choice is used without; a process may then differ from the last in rounding.
        exchange: How the texts of other ranks come. `"slices"`: slice t of every rank's by one
            gather, while the slice before is in use; T slices, as few as fit 5/8 of the workspace,
            mostly one. `"ring"`: a rank's at a time from neighbour to neighbour, as in Inf-CL; W
            turns, each with the kernels and the host's work of a whole sweep.
        directions: Which of both terms count: `"image_to_text"` is the first alone, each image
            among all texts, as retrieval losses for text have it; `"text_to_image"` the second.
            L is then the mean of B terms, not of 2 B.
        local_loss: As all that follow, for calls written for open_clip's `ClipLoss`. There it keeps
            each rank to its own rows; here every rank has the loss of the whole batch, from its
            own rows.
        gather_with_grad: Gradients are always those of the whole batch. With False and several
            ranks open_clip's are W times too small, and a warning says what that means.
        cache_labels: There are no labels to keep.
        rank: Of this process; the process group knows, and another one is refused.
        world_size: Ranks; likewise.
        use_horovod: Only False is accepted.

    Shapes:
        image_features: (b, D), already normalised if they are to be.
        text_features: (n, D) with n >= b. ids: (n,), those of the texts.
        logit_scale, logit_bias: one value. Returns a scalar in fp32 (float64 for float64).

    Raises:
        ValueError: For arguments or features that cannot be used, on all ranks at once; for
            `backend="triton"` where it cannot run.

    References:
        - CLIP, https://arxiv.org/abs/2103.00020
        - Inf-CL, https://arxiv.org/abs/2410.17243
        - LiT (locked image tower), https://arxiv.org/abs/2111.07991

    Example::

        loss_fn = ContrastiveLoss()
        loss = loss_fn(image_features, text_features, self.logit_scale.exp())
    """

    _pairs: type[torch.autograd.Function] = InfoNCE  # what a pair contributes

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        workspace_bytes: int | None = None,
        backend: Backend = "auto",
        tile_dtype: TileDtype = "auto",
        autotune: bool = False,
        exchange: ExchangeName = "slices",
        directions: Directions = "both",
        local_loss: bool = True,
        gather_with_grad: bool = True,
        cache_labels: bool = True,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
    ) -> None:
        super().__init__()
        check_choices(backend, tile_dtype, exchange, directions, workspace_bytes)
        take_open_clip(gather_with_grad, world_size, use_horovod)
        self._said = None if world_size == 1 else (rank, world_size)
        self._checks = InputChecks()
        self.process_group = process_group
        self.workspace_bytes = workspace_bytes
        self.backend = backend
        self.tile_dtype = tile_dtype
        self.autotune = autotune
        self.exchange = exchange
        self.directions = directions

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = ...,
        output_dict: Literal[False] = ...,
        *,
        ids: Tensor | None = ...,
        statistics: Literal[False] = ...,
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
        ids: Tensor | None = ...,
        statistics: Literal[False] = ...,
    ) -> dict[str, Tensor]: ...

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = ...,
        output_dict: Literal[False] = ...,
        *,
        ids: Tensor | None = ...,
        statistics: Literal[True],
    ) -> tuple[Tensor, LossStatistics]: ...

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
        *,
        ids: Tensor | None = None,
        statistics: bool = False,
    ) -> Tensor | dict[str, Tensor] | tuple[Tensor | dict[str, Tensor], LossStatistics]:
        """Return the loss of the global batch, as `{"contrastive_loss": loss}` if asked for.

        Args:
            image_features: (b, D).
            text_features: (n, D) with n >= b; row i belongs to image i.
            logit_scale: One value.
            logit_bias: One value, or `None`.
            output_dict: Return a dictionary, as open_clip's losses do.
            ids: What each text shows, integers of shape (n,); those of the images come first.
                Images and texts of equal ids, on whatever ranks, are no negatives.
            statistics: Return `LossStatistics` beside the loss.
        """
        if not torch.compiler.is_compiling():
            check_derivatives(image_features, text_features, logit_scale)
        image_features, text_features = in_one_dtype(image_features, text_features)
        check_ranks(self._said, self.process_group)
        loss_of = self._loss_of_one if self._world_size() == 1 else self._loss_of_ranks
        loss, found = loss_of(
            image_features, text_features, logit_scale, logit_bias, ids, statistics
        )
        if not torch.compiler.is_compiling():
            self._checks.look(image_features, text_features, logit_scale)
        result = {"contrastive_loss": loss} if output_dict else loss
        return (result, LossStatistics(*found.unbind())) if statistics else result

    def extra_repr(self) -> str:
        """Return what `print(module)` shows between its brackets."""
        options = {**self._options, "exchange": self.exchange, "directions": self.directions}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())

    def __deepcopy__(self, memo: dict[int, object]) -> "ContrastiveLoss":
        # Weight averaging copies whole modules, and a process group cannot be copied.
        memo[id(self.process_group)] = self.process_group
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(super().__getstate__(), memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "Passed `ContrastiveLoss(process_group=...)` to be pickled. A group belongs to its "
                "process. Set `loss.process_group = None` first, and pass the group again where "
                "the loss is loaded."
            )
        state: dict[str, Any] = super().__getstate__()
        return state

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "tile_dtype": self.tile_dtype,
            "workspace_bytes": self.workspace_bytes,
            "autotune": self.autotune,
        }

    def _options_with(self, ids_b: Tensor | None) -> dict[str, Any]:
        """Return the options of the tiles: those of Triton know no ids."""
        return self._options if ids_b is None else {**self._options, "backend": "torch"}

    def _problem(
        self, image: object, text: object, scale: object, bias: object, ids: object
    ) -> str | None:
        if ids is not None and self.backend == "triton":
            return (
                "Passed `ids` to `ContrastiveLoss(backend='triton')`, whose kernels know no ids. "
                "Leave `backend` out: with `ids` torch multiplies the tiles."
            )
        return find_problem(image, text, scale, bias, ids)

    def _scalars(
        self,
        image_bD: Tensor,
        text_bD: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None,
        ids_b: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return scale and bias on the features' device; refuse what cannot be used."""
        problem = self._problem(image_bD, text_bD, logit_scale, logit_bias, ids_b)
        if problem is not None:
            raise ValueError(problem)
        bias = None if logit_bias is None else as_tensor(logit_bias, image_bD)
        return as_tensor(logit_scale, image_bD), bias

    def _loss_of_one(
        self,
        image_bD: Tensor,
        text_bD: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None,
        ids_b: Tensor | None,
        statistics: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return loss and statistics of one process, by an operator that compilers take in."""
        scale, bias = self._scalars(image_bD, text_bD, logit_scale, logit_bias, ids_b)
        keeps = torch.is_grad_enabled() and (
            image_bD.requires_grad or text_bD.requires_grad or scale.requires_grad
        )
        swept = infonce(
            image_bD, text_bD, scale, bias, **self._options_with(ids_b), keeps=keeps, ids=ids_b,
            directions=self.directions, statistics=statistics,
        )  # fmt: skip
        return swept[0], swept[4]

    @torch.compiler.disable
    def _loss_of_ranks(
        self,
        image_bD: Tensor,
        text_bD: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None,
        ids_b: Tensor | None,
        statistics: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of all ranks and its statistics, who first agree on what they have."""
        problem = self._problem(image_bD, text_bD, logit_scale, logit_bias, ids_b)
        if problem is None and self.backend == "triton":
            problem = triton_problem(image_bD.device, image_bD.dtype)
        if problem is not None:
            report_unusable(image_bD, self.process_group)
            raise ValueError(problem)
        scale = as_tensor(logit_scale, image_bD)
        bias = None if logit_bias is None else as_tensor(logit_bias, image_bD)
        plan = agree(
            image_bD, text_bD, scale, bias if self._pairs is not InfoNCE else None, ids_b,
            exchange=self.exchange, directions=self.directions, statistics=statistics,
            options=self._options_with(ids_b), group=self.process_group,
        )  # fmt: skip
        loss, found = self._pairs.apply(image_bD, text_bD, scale, bias, plan)
        return loss, found

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
