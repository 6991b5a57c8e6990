"""`ContrastiveLoss`: CLIP's loss over the global batch, in O(b) memory instead of O(b^2)."""

import copy
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp._arguments import Check, explains_arguments
from lightning_mp.contrastive._call.checks import check_rules, find_problem
from lightning_mp.contrastive._call.first_inputs import FirstInputs
from lightning_mp.contrastive._call.request import RULES, PairArguments, Request
from lightning_mp.contrastive._exchange.exchange import CollectiveError
from lightning_mp.contrastive._operator import loss_of
from lightning_mp.contrastive._sums.agreement import device_problem, refuse_on_all_ranks
from lightning_mp.contrastive._tiles.backends import tiles_problem
from lightning_mp.contrastive._tiles.literals import (
    Backend,
    Directions,
    Duplicates,
    ExchangeName,
    FalseNegatives,
    Partition,
    TileDtype,
    Within,
)
from lightning_mp.contrastive.statistics import LossStatistics

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lightning_mp._arguments import typed_as

__all__ = ["ContrastiveLoss"]


@explains_arguments(
    checks={
        "process_group": Check(fix="Ranks outside of the group do not call the loss."),
        "workspace_bytes": Check("[2**20, inf)", fix="Pass bytes, such as `64 * 2**20`."),
        "label_smoothing": "[0, 1]",
        "hardness": "[0, inf)",
    },
    hints={
        "temperature": "Pass `1 / temperature` as `logit_scale` to the call.",
        "logit_scale": "Pass it to the call.",
    },
)
class ContrastiveLoss(nn.Module):
    r"""Symmetric contrastive (InfoNCE, CLIP) loss over all ranks, exact, without a b x b matrix.

    A dense loss holds four logit matrices at its peak, 4.3 GB at b = 16,384 in fp32. This loss has
    a fixed workspace and 4 matrix products instead of 6; results repeat bit for bit. Its value is
    that of the global batch, and so are its gradients after DDP has averaged them.

    .. math::
        L = -\frac{1}{2B} \sum_i \left[ \log \frac{e^{S_{ii}}}{\sum_j e^{S_{ij}}} + \log
            \frac{e^{S_{ii}}}{\sum_j e^{S_{ji}}} \right], \quad S = \mathrm{scale} \; I T^T

    Args:
        process_group: Ranks that share the batch; `None` is the default group, if there is one.
        workspace_bytes: Memory for tiles. `None`: 32 MiB; on CUDA 544 (Triton) or 512 (torch).
        backend: `"torch"` runs on every device, `"triton"` from compute capability 8.0 on, `"auto"`
            takes Triton where it runs.
        tile_dtype: Precision of products in Triton tiles. `"auto"`: 16-bit features unchanged, fp32
            as `"fp32"` (gradients within 1e-5); `"tf32"`; `"bf16"` and `"fp16"` round features.
        autotune: Time the shapes of Triton tiles at the first call.
        exchange: `"slices"` gathers slices of all ranks' texts, `"ring"` sends rank by rank.
        directions: `"image_to_text"` keeps only the first term, `"text_to_image"` the second.
        duplicates: Pairs with equal `ids` are no negatives (`"mask"`), or are positives.
        label_smoothing: Part of each target, 0 to 1, that is spread evenly over all candidates.
        false_negatives: Mask negatives whose similarity exceeds the positive's minus `margin`
            (`"absolute"`) or minus `margin` times its magnitude (`"relative"`), as in GISTEmbed.
        margin: Margin of `false_negatives`.
        partition: `"joint"` puts both directions of a pair into one softmax.
        within: With `"joint"`, also contrast images with images, texts with texts, or `"both"`.
        hardness: Add `hardness` times its similarity, without gradient, to each image's negative.

    Shapes:
        image_features: (b, D), normalized. text_features: (n, D), n >= b. logit_scale,
        logit_bias: one value. Returns a scalar in fp32; in float64 for float64 features.

    Raises:
        ValueError: If arguments are invalid, on all ranks at once.

    References: CLIP, arXiv:2103.00020; Inf-CL, arXiv:2410.17243; GISTEmbed, arXiv:2402.16829.

    Example:
        `loss = ContrastiveLoss()(image_features, text_features, self.logit_scale.exp())`
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
        partition: Partition = "each",
        within: Within = "none",
        hardness: float = 0.0,
    ) -> None:
        super().__init__()
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
        self.partition = partition
        self.within = within
        self.hardness = hardness
        check_rules(self)

    @overload
    def forward(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = ..., output_dict: Literal[False] = ..., *,
        statistics: Literal[False] = ..., **pairs: "Unpack[PairArguments]",
    ) -> Tensor: ...  # fmt: skip

    @overload
    def forward(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = ..., *, output_dict: Literal[True],
        statistics: Literal[False] = ..., **pairs: "Unpack[PairArguments]",
    ) -> dict[str, Tensor]: ...  # fmt: skip

    @overload
    def forward(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = ..., output_dict: Literal[False] = ..., *,
        statistics: Literal[True], **pairs: "Unpack[PairArguments]",
    ) -> tuple[Tensor, LossStatistics]: ...  # fmt: skip

    @overload
    def forward(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = ..., output_dict: bool = ..., *,
        statistics: bool = ..., **pairs: "Unpack[PairArguments]",
    ) -> (
        Tensor | dict[str, Tensor] | tuple[Tensor | dict[str, Tensor], LossStatistics]
    ): ...  # fmt: skip

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
        """Return the loss of the global batch.

        Args:
            image_features: (b, D).
            text_features: (n, D) with n >= b; text i belongs to image i, the rest are negatives.
            logit_scale: One value.
            logit_bias: One value, or `None`.
            output_dict: Return `{"contrastive_loss": loss}`, as open_clip's losses do.
            statistics: Return a tuple of the loss and its `LossStatistics`.
            ids: Integers of shape (n,) that are equal for duplicates, on any ranks; see
                `duplicates`. The first b also belong to the images.
            weights: Weights of the pairs, shape (b,), not negative; they receive no gradient.
            positives: Row numbers of this rank's texts that belong to each image: integers of shape
                (b,), or (b, k) padded with -1. By default text i belongs to image i.
            negatives: Features of texts that are negatives of one image only, (b, k, D).
            guide_image: Image features of a guide, (b, G), whose similarities decide which
                negatives `false_negatives` masks.
            guide_text: Text features of the guide, (n, G).
        """
        loss, found = self._compute(
            image_features, text_features, logit_scale, logit_bias,
            ids=ids, weights=weights, positives=positives, negatives=negatives,
            guide_image=guide_image, guide_text=guide_text, statistics=statistics,
        )  # fmt: skip
        result = {"contrastive_loss": loss} if output_dict else loss
        return (result, LossStatistics(*found.unbind())) if statistics else result

    if TYPE_CHECKING:  # `nn.Module` declares that a call takes and returns anything

        @typed_as(forward)
        def __call__(self) -> Any: ...  # noqa: D102

    def __deepcopy__(self, memo: dict[int, object]) -> "ContrastiveLoss":
        # Weight averaging copies whole modules, and a process group cannot be copied.
        memo[id(self.process_group)] = self.process_group
        copied = type(self).__new__(type(self))
        # The state may contain the module again.
        memo[id(self)] = copied
        # This class's own `__getstate__` refuses a group, because a pickle cannot hold one.
        copied.__setstate__(copy.deepcopy(super().__getstate__(), memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "Pickled `ContrastiveLoss(process_group=...)`. A group belongs to its process. Set "
                "`loss.process_group = None` first, and pass the group again after loading."
            )
        state: dict[str, Any] = super().__getstate__()
        return state

    def extra_repr(self) -> str:
        """Return the arguments that `print(module)` shows."""
        names = ("backend", "tile_dtype", "workspace_bytes", "autotune", "exchange")
        options = {name: getattr(self, name) for name in names}
        options |= {name: getattr(self, name) for name in RULES if self._is_softmax}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())

    def _problem(self, request: Request) -> str | None:
        """Return the error and the fix if the arguments of a call are invalid, `None` otherwise."""
        problem = find_problem(request) or device_problem(request, self.process_group)
        # Dynamo cannot trace the launch of a kernel that the check needs; the operator repeats it.
        if problem is None and self.backend == "triton" and not torch.compiler.is_compiling():
            problem = tiles_problem(request.image.device, request.image.dtype)
        return problem

    def _compute(
        self,
        image: Tensor,
        text: Tensor,
        scale: Tensor | float,
        bias: Tensor | float | None,
        **fields: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the values of its statistics; `fields` are those of `Request`."""
        is_compiling = torch.compiler.is_compiling()
        # A compiled graph would be recompiled for each new value.
        read = {} if is_compiling else self._first.read
        request = Request.of(self, image, text, scale, bias, **fields, **read)
        # Inputs that differ from the last checked ones in values alone need no check.
        signature = None if is_compiling else request.signature
        if is_compiling or signature != self._first.signature:
            # The other ranks are told, which would wait for this rank after a plain `raise`.
            problem = self._problem(request)
            if problem is not None:
                refuse_on_all_ranks(problem, request.owner, image, self.process_group)
        request = request.checked()
        if is_compiling:
            return loss_of(request, self.process_group)
        try:
            found = loss_of(request, self.process_group)
        except CollectiveError as error:
            error.args = (f"{error} This was call {self._first.calls + 1} of the loss.",)
            raise
        self._first.check(request, signature)
        return found
