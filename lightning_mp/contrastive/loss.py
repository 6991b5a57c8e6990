"""`ContrastiveLoss`: CLIP's loss over the global batch in memory that grows with b, not b^2.

Shapes:
    b: this rank's batch. D: feature width.
"""

import copy
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp._arguments import Check, explains_arguments
from lightning_mp.contrastive._call.checks import check_pair_rules, find_problem
from lightning_mp.contrastive._call.first_inputs import FirstInputs
from lightning_mp.contrastive._call.request import RULES, PairArguments, Request
from lightning_mp.contrastive._exchange.failures import CollectiveError
from lightning_mp.contrastive._operator import loss_of
from lightning_mp.contrastive._sums.agreement import device_problem, refuse
from lightning_mp.contrastive._tiles.backends import triton_problem
from lightning_mp.contrastive._tiles.words import (
    Backend,
    Directions,
    Duplicates,
    ExchangeName,
    FalseNegatives,
    TileDtype,
)
from lightning_mp.contrastive.statistics import LossStatistics

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ContrastiveLoss"]


@explains_arguments(
    checks={
        "process_group": Check(fix="A rank outside of the group needs no loss."),
        "workspace_bytes": Check("[2**20, inf)", fix="Pass bytes, such as `64 * 2**20`."),
        "label_smoothing": "[0, 1]",
    },
    hints={
        "temperature": "Pass `1 / temperature` as `logit_scale` in the call.",
        "logit_scale": "Pass it in the call.",
    },
)
class ContrastiveLoss(nn.Module):
    r"""Symmetric contrastive (InfoNCE, CLIP) loss, exact and without a b x b matrix.

    `ClipLoss` is its form for code of open_clip. A dense loss holds four logit matrices at a time:
    4.3 GB at b = 16,384 in fp32 and 1.1 TB at 262,144; this one needs a workspace of a fixed size,
    the gradients of the features and some vectors of length b. Where `torch.distributed` is
    initialised, the negatives are those of all ranks.

    .. math::
        L = \frac{1}{2B} \sum_i \left[
            -\log \frac{e^{S_{ii}}}{\sum_j e^{S_{ij}}}
            -\log \frac{e^{S_{ii}}}{\sum_j e^{S_{ji}}} \right],
        \qquad S = \mathrm{logit\_scale} \cdot \mathrm{image} \, \mathrm{text}^T

    **Work**: two sweeps over the tiles of S, four matrix products of `2 b^2 D` FLOPs with the
    gradients (a dense loss: six). Both come in the forward where a backward can follow; two (b, D)
    matrices wait for it. A locked tower (LiT) saves its product. A part of the workspace
    keeps tiles of the first sweep for the second; where all fit, there are three products. For
    torch tiles that part is half, or all but 32 MiB (512 MiB on CUDA) where this is more. For
    Triton tiles of fp32 features it is half, or all but 128 MiB where this is less, and they are
    kept where a quarter of them fits; those of 16-bit features are not, as a GPU multiplies them
    as fast as it stores and loads them.

    Features of two dtypes, such as those of a locked tower kept in fp32, are taken in the wider
    one. Only first derivatives exist, and no transforms of `torch.func`: both are refused.

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
      products of 16-bit halves for one; the softmax is kept in two halves. 12 units of work, 9
      where all tiles are kept; 6 for 16-bit features.
    - `"tf32"`: fp32 features, logits in tf32 (10 bits); the gradient products are torch's and
      follow `torch.set_float32_matmul_precision`. 16-bit features as `"auto"`.

    The torch tiles multiply in fp32, or float64, whatever `tile_dtype` says.

    **Several ranks**: batch sizes may differ. The value is the loss of the global batch, on every
    rank. Feature gradients come out W times too large and the scale's as the total, so that the
    *mean* over ranks that DDP and FSDP take gives exactly the gradient of one process with the
    whole batch. All ranks of the group must call the loss in the same order. Besides
    the features a rank holds at most `8 b D` values of four bytes and the workspace.

    `logit_bias` shifts all logits by the same amount, which softmax ignores: its gradient is 0.

    **Duplicates**: where an image stands in the batch with several texts, each of these would be a
    negative of the others' rows, and a perfect embedding of two would have a loss of log 2. With
    `ids` in the call, pairs of equal ids, on any ranks, are left out of the sums over j; i itself
    stays. The ids travel with the texts.

    With `duplicates="multi_positive"` all pairs of equal ids are positives instead, as in
    supervised contrastive learning: `S_ii` becomes their mean, and they all stay in the sums.
    That is a product with the mean text of each id, in memory that grows with b, on any tiles.

    **Several texts an image**: `positives` in the call names each image's own among this rank's
    texts, any number, also several images of one text. Then `S_ii` becomes the mean over them, the
    first term that over images with a text and the second over texts with an image.

    **Statistics**: with `statistics=True` in the call it returns `(loss, LossStatistics)`: top-1
    accuracy both ways, mean probability of the positives and the largest logit, of the whole batch,
    from the same sweep.

    **Weights**: with `weights` in the call L is the weighted mean of the terms, over all ranks, and
    text i weighs as much as image i. With 0 neither has a term, and both stay negatives.
    A text of several images weighs as much as they do on average.

    **More texts than images**: the first b texts belong to the images, in order. Any number after
    them, on any ranks, are negatives of all images (hard negatives, mined for these images or not)
    and have no term: the sum over j of the first term goes over all texts of all ranks. With
    `negatives` in the call each image has k more, (b, k, D), that no other image sees.

    **False negatives**: a negative that is nearer than the positive probably fits too (GISTEmbed).
    With `false_negatives` a row leaves out negatives whose similarity is above a limit that its
    positive sets, and a column likewise. Similarities are those of the features, or of a guide's,
    whose products every tile then makes beside its own, in both sweeps. What is nearer by no more
    than rounding, such as a copy of the positive, stays.

    Args:
        process_group: Whose ranks share the batch; `None` is the default group, if there is one.
        workspace_bytes: Memory for tiles, in bytes. `None`: 32 MiB; on CUDA 544 MiB for Triton's
            tiles, 512 MiB for torch's.
        backend: Code that multiplies tiles. `"torch"` runs everywhere, `"triton"` on CUDA devices
            of compute capability 8.0 or higher; `"auto"` picks Triton where it runs.
        tile_dtype: What Triton tiles multiply: `"auto"`, `"bf16"`, `"fp16"`, `"tf32"`, `"fp32"`.
        autotune: Time the Triton tile shapes at the first call and keep the fastest, so
            that rounding may differ from process to process. Otherwise the table's first is used.
        exchange: How the texts of other ranks come. `"slices"`: slice t of every rank's by one
            gather, while the slice before is in use; T slices, as few as fit 5/8 of the workspace,
            mostly one. `"ring"`: a rank's at a time from neighbour to neighbour, as in Inf-CL; W
            turns, each with the kernels and the host's work of a whole sweep.
        directions: Which of the two terms count: `"image_to_text"` is the first alone, each image
            among all texts, as retrieval losses for text have it; `"text_to_image"` the second.
            L is then the mean of B terms, not of 2 B.
        duplicates: What equal `ids` mean: `"mask"` leaves them out of the negatives,
            `"multi_positive"` makes them positives.
        label_smoothing: The part of each target, 0 to 1, that is spread evenly over everything
            in the sum over j, as in torch's `cross_entropy`.
        false_negatives: Which negatives are left out of a sum: `"absolute"` those more similar than
            its positive less `margin`, `"relative"` than its positive times `1 - margin`.
        margin: See `false_negatives`.

    Shapes:
        image_features: (b, D), which the caller normalises where that is wanted.
        text_features: (n, D) with n >= b, or any n with `positives`, (b,) or (b, k).
        ids: (n,), those of the texts. weights: (b,). negatives: (b, k, D).
        guide_image: (b, G). guide_text: (n, G), of any G and dtype.
        logit_scale, logit_bias: one value. Returns a scalar in fp32 (float64 for float64).

    Raises:
        ValueError: For arguments or features that cannot be used, on all ranks at once; for
            `backend="triton"` where it cannot run.

    References:
        - CLIP, https://arxiv.org/abs/2103.00020
        - Inf-CL, https://arxiv.org/abs/2410.17243
        - LiT (locked image tower), https://arxiv.org/abs/2111.07991
        - Supervised contrastive learning, https://arxiv.org/abs/2004.11362
        - GISTEmbed, https://arxiv.org/abs/2402.16829

    Example::

        loss_fn = ContrastiveLoss()
        loss = loss_fn(image_features, text_features, self.logit_scale.exp())
    """

    _is_softmax = True

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
        duplicates: Duplicates = "mask",
        label_smoothing: float = 0.0,
        false_negatives: FalseNegatives = "keep",
        margin: float = 0.0,
    ) -> None:
        super().__init__()
        check_pair_rules(self, duplicates, label_smoothing, false_negatives, margin)
        self.process_group = process_group
        self._first = FirstInputs()
        self.workspace_bytes = workspace_bytes
        self.backend = backend
        self.tile_dtype = tile_dtype
        self.autotune = autotune
        self.exchange = exchange
        self.directions = directions
        self.duplicates = duplicates
        self.label_smoothing = label_smoothing
        self.false_negatives = false_negatives
        self.margin = margin

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = ...,
        output_dict: Literal[False] = ...,
        *,
        statistics: Literal[False] = ...,
        **pairs: "Unpack[PairArguments]",
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
        statistics: Literal[False] = ...,
        **pairs: "Unpack[PairArguments]",
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
        statistics: Literal[True],
        **pairs: "Unpack[PairArguments]",
    ) -> tuple[Tensor, LossStatistics]: ...

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
        *,
        statistics: bool = False,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        positives: Tensor | None = None,
        negatives: Tensor | None = None,
        guide_image: Tensor | None = None,
        guide_text: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor] | tuple[Tensor | dict[str, Tensor], LossStatistics]:
        """Return the loss of the global batch, as `{"contrastive_loss": loss}` if asked for.

        Args:
            image_features: (b, D).
            text_features: (n, D) with n >= b; row i belongs to image i.
            logit_scale: One value.
            logit_bias: One value, or `None`.
            output_dict: Return a dictionary, as open_clip's losses do.
            statistics: Return `LossStatistics` with it.
            ids: What each text shows, integers of shape (n,); those of the images come first.
                `duplicates` says what equal ids mean, on any ranks.
            weights: What each pair counts, (b,) numbers that are not negative; without gradient.
            positives: Which of this rank's texts belong to each image, integers of shape (b,), or
                (b, k) padded with -1. Left out, text i belongs to image i.
            negatives: Features of texts that one image alone sees, (b, k, D).
            guide_image: Another model's features, (b, G), to judge `false_negatives` by.
            guide_text: Of the texts, (n, G).
        """
        loss, found = self.compute(
            image_features, text_features, logit_scale, logit_bias,
            ids=ids, weights=weights, positives=positives, negatives=negatives,
            guide_image=guide_image, guide_text=guide_text, statistics=statistics,
        )  # fmt: skip
        result = {"contrastive_loss": loss} if output_dict else loss
        return (result, LossStatistics(*found.unbind())) if statistics else result

    def __deepcopy__(self, memo: dict[int, object]) -> "ContrastiveLoss":
        # Weight averaging copies whole modules, and a process group cannot be copied.
        memo[id(self.process_group)] = self.process_group
        copied = type(self).__new__(type(self))
        # Before the state, in which it may stand again.
        memo[id(self)] = copied
        # The parent's state: this class's own refuses a group, since a pickle cannot hold one.
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

    def extra_repr(self) -> str:
        """Return what `print(module)` shows between its brackets."""
        names = ("backend", "tile_dtype", "workspace_bytes", "autotune", "exchange")
        options = {name: getattr(self, name) for name in names}
        options |= {name: getattr(self, name) for name in RULES if self._is_softmax}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())

    def problem(self, request: Request) -> str | None:
        """Return what is wrong with the arguments of a call, and the fix; `None` if all is well."""
        problem = find_problem(request) or device_problem(request, self.process_group)
        if problem is None and self.backend == "triton":
            problem = triton_problem(request.image.device, request.image.dtype)
        return problem

    def compute(
        self,
        image: Tensor,
        text: Tensor,
        scale: Tensor | float,
        bias: Tensor | float | None,
        **said: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the values of its statistics; `said` are fields of a `Request`."""
        is_compiling = torch.compiler.is_compiling()
        request = Request.of(self, image, text, scale, bias, **said)
        # What was checked last is all right, and so is what differs from it in values alone.
        kinds = None if is_compiling else request.kinds
        if is_compiling or kinds != self._first.kinds:
            # Not raised here: one rank may be right where another is wrong, and would wait for it.
            problem = self.problem(request)
            if problem is not None:
                refuse(problem, request.owner, image, self.process_group)
        request = request.checked()
        if is_compiling:
            return loss_of(request, self.process_group)
        try:
            found = loss_of(request, self.process_group)
        except CollectiveError as error:
            error.args = (f"{error} This was call {self._first.calls + 1} of the loss.",)
            raise
        self._first.look(request, kinds)
        return found
