"""`ContrastiveRecall`: recall and ranks of image-text retrieval.

Shapes: `N` images, `M` texts, `D` feature width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics.utilities import rank_zero_warn
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_mp._arguments import explains_arguments
from lightning_mp.metrics._checks import TOP_K, check_features, check_ids, check_value
from lightning_mp.metrics._stored_rows import StoredRows, with_keys, without_repeats
from lightning_mp.metrics._tiled_ranks import full_precision, retrieval_ranks
from lightning_mp.numerics.floats import FLOAT_DTYPES

__all__ = ["ContrastiveRecall"]

_DIRECTIONS = ("image_to_text", "text_to_image")


@explains_arguments(checks={"top_k": TOP_K, "workspace_bytes": "[1, inf)"})
class ContrastiveRecall(StoredRows):
    r"""Recall@k and ranks of image-text retrieval, exact over all processes, in O(N) memory.

    A dense N x M similarity matrix takes 32 GB in fp32 for 40,000 images and 200,000 texts; this
    metric computes one tile at a time. A collapsed model, whose recall@1 is 1.0 under strict
    comparison, and a diverged model get a recall of 0. With the score :math:`s_{qc}` of query q and
    candidate c (cosine or dot product) and its rounding error
    :math:`\tau = (2 + \sqrt D / 2)\,\epsilon`,

    .. math::
        b_q = \max_{c \in \text{matches}(q)} (s_{qc} - \tau), \qquad
        \text{rank}_q = 1 + |\{c \notin \text{matches}(q) : \lnot (s_{qc} + \tau < b_q)\}|

    Ties count against the model, other matches of a query do not count, and queries without
    a match are left out. docs/metrics/recall.md explains ids, keys and repeats.

    Args:
        top_k: Values of k for recall@k.
        normalize: Whether scores are cosine similarities (True) or dot products (False).
        value: Name of a single value for `compute()` to return, such as
            `"image_to_text_recall@1"`, for `self.log(name, metric)` and `MetricTracker`.
        workspace_bytes: Memory budget for tiles in `compute()`, in bytes; it changes no result.
        **kwargs: Passed to `torchmetrics.Metric`.

    Shapes:
        image_features: (n, D). text_features: (m, D). image_ids: (n,) and text_ids: (m,), integers
        that are unique in the data set; equal ids match. Without ids, row i matches row i.
        image_keys: (n,) and text_keys: (m,), an index of each item, to remove repeated items.
        Returns scalars, `{image_to_text,text_to_image}_{recall@k,median_rank,mean_rank,queries}`.

    Raises:
        ValueError: On invalid arguments, if ranks disagree, or if no ids match.
        RuntimeError: If `compute()` finds no images or no texts on any rank.

    References: CLIP, arXiv:2103.00020; recall@k, arXiv:1412.2306; rounding, doi:10.1137/18M1226312.

    Example:
        >>> recall = ContrastiveRecall(top_k=(1,))
        >>> recall.update(torch.eye(4), torch.eye(4)[[0, 1, 3, 2]])
        >>> float(recall.compute()["image_to_text_recall@1"])
        0.5
    """

    is_differentiable = False
    # Batches are independent, so torchmetrics needs one update per `forward` instead of two.
    full_state_update = False

    image_features: list[Tensor]
    text_features: list[Tensor]
    image_ids: list[Tensor]
    text_ids: list[Tensor]

    def __init__(
        self,
        *,
        top_k: Sequence[int] = (1, 5, 10),
        normalize: bool = True,
        value: str | None = None,
        workspace_bytes: int = 64 * 2**20,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        names = [*(f"recall@{k}" for k in top_k), "median_rank", "mean_rank", "queries"]
        check_value(self, value, [f"{d}_{name}" for d in _DIRECTIONS for name in names])
        self.top_k = tuple(top_k)
        self.value = value
        self.normalize = normalize
        self.workspace_bytes = workspace_bytes
        self._has_warned_about_unmatched = False
        for name in ("image_features", "text_features", "image_ids", "text_ids"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    @property
    def higher_is_better(self) -> bool | None:  # type: ignore[override]
        """Whether a larger `value` is better: True for recall, False for ranks, `None` for all."""
        return None if self.value is None else not self.value.endswith("_rank")

    def update(
        self,
        image_features: Tensor,
        text_features: Tensor,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
        image_keys: Tensor | None = None,
        text_keys: Tensor | None = None,
    ) -> None:
        """Add a batch; with ids, the numbers of images and texts may differ."""
        self._check(image_features, text_features, image_ids, text_ids, image_keys, text_keys)
        # Copies, because a CUDA graph or a reused buffer may overwrite the tensors later.
        self.image_features.append(image_features.detach().clone())
        self.text_features.append(text_features.detach().clone())
        if image_ids is not None and text_ids is not None:
            device = image_features.device
            self.image_ids.append(with_keys(image_ids, image_keys, device))
            self.text_ids.append(with_keys(text_ids, text_keys, device))

    def _compute(self) -> dict[str, Tensor]:
        # A state is an empty list if no rank has seen a batch.
        image_ND, text_MD = (
            dim_zero_cat(state) if len(state) else torch.empty(0, 0)
            for state in (self.image_features, self.text_features)
        )
        if not len(image_ND) or not len(text_MD):
            raise RuntimeError(
                f"Called `ContrastiveRecall.compute()` with {len(image_ND)} images and "
                f"{len(text_MD)} texts. It needs at least one image and one text on any rank: call "
                "`update(image_features, text_features)` first."
            )
        if len(self.image_ids):
            image_ND, image_ids_N = without_repeats(image_ND, dim_zero_cat(self.image_ids))
            text_MD, text_ids_M = without_repeats(text_MD, dim_zero_cat(self.text_ids))
        else:
            image_ids_N = text_ids_M = torch.arange(len(image_ND), device=image_ND.device)
        with full_precision(image_ND.device):
            options: Any = {"normalize": self.normalize, "workspace_bytes": self.workspace_bytes}
            ranks = retrieval_ranks(image_ND, text_MD, image_ids_N, text_ids_M, **options)
        # If no image has a match, no text has one either.
        if not len(ranks[0]):
            raise ValueError(
                f"Passed ids of {len(image_ND)} images and {len(text_MD)} texts without any equal "
                "ids. An image and its texts must have equal ids: pass the image's index in the "
                "data set for both."
            )
        n_images, n_texts = len(image_ND) - len(ranks[0]), len(text_MD) - len(ranks[1])
        if (n_images or n_texts) and not self._has_warned_about_unmatched:
            self._has_warned_about_unmatched = True
            rank_zero_warn(
                f"`ContrastiveRecall` found {n_images} images without a text of equal id and "
                f"{n_texts} texts without an image of equal id. They are candidates but not "
                "queries. If they are not distractors, pass ids that are unique in the data set, "
                "and update with all of it."
            )
        candidates = len(text_MD), len(image_ND)
        return {
            f"{direction}_{name}": value
            for direction, found, n_candidates in zip(_DIRECTIONS, ranks, candidates, strict=True)
            for name, value in _recalls_and_ranks(found, n_candidates, self.top_k).items()
        }

    def _check(
        self,
        image_features: Tensor,
        text_features: Tensor,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
        image_keys: Tensor | None = None,
        text_keys: Tensor | None = None,
    ) -> None:
        """Raise ValueError if a batch is invalid or does not fit the state."""
        name = type(self).__name__
        check_features(name, image_features, text_features)
        if self.image_features:
            seen = self.image_features[0]
            if (seen.shape[1], seen.dtype) != (image_features.shape[1], image_features.dtype):
                raise ValueError(
                    f"Passed features of width {image_features.shape[1]} and dtype "
                    f"{image_features.dtype} after width {seen.shape[1]} and dtype {seen.dtype}. "
                    "`ContrastiveRecall` needs one width and dtype in all updates: call `reset()` "
                    "between models, or cast the features."
                )
        if (image_ids is None) != (text_ids is None):
            given, missing = ("text", "image") if image_ids is None else ("image", "text")
            raise ValueError(
                f"Passed `{given}_ids` without `{missing}_ids`. `ContrastiveRecall` accepts both "
                f"or neither: pass `{missing}_ids` too."
            )
        has_ids = image_ids is not None
        if self.image_features and bool(self.image_ids) != has_ids:
            now, then = ("with", "without") if has_ids else ("without", "with")
            raise ValueError(
                f"Passed features {now} ids after an update {then} ids. Positions and ids cannot "
                "be mixed: pass ids in every update or in none, or call `reset()` first."
            )
        if not has_ids and len(image_features) != len(text_features):
            raise ValueError(
                f"Passed {len(image_features)} images and {len(text_features)} texts without ids. "
                "Without ids, image i matches text i, so there must be equally many: pass "
                "`image_ids` and `text_ids`."
            )
        for modality, features, ids, keys in (
            ("image", image_features, image_ids, image_keys),
            ("text", text_features, text_ids, text_keys),
        ):
            if keys is not None and ids is None:
                raise ValueError(
                    f"Passed `{modality}_keys` without `{modality}_ids`. If repeated rows are "
                    "removed, row positions no longer define pairs: pass `image_ids` and "
                    "`text_ids`, too."
                )
            for kind, numbers in (("ids", ids), ("keys", keys)):
                if numbers is not None:
                    check_ids(name, f"{modality}_{kind}", numbers, len(features))

    def _sync_dist(
        self,
        dist_sync_fn: Callable[..., list[Tensor]] = gather_all_tensors,
        process_group: Any | None = None,
    ) -> None:
        """Gather the state, after the ranks have agreed on its layout.

        In torchmetrics a rank without data sends a 1-D fp32 tensor, and a gather together with
        (n, D) features of another dtype hangs or fails.
        """
        seen = self.image_features[0] if self.image_features else None
        own = [0, 0, 0]
        if seen is not None:
            own = [seen.shape[1], FLOAT_DTYPES.index(seen.dtype), int(bool(self.image_ids))]
        group = process_group or self.process_group
        layouts = dist_sync_fn(torch.tensor(own, device=self.device), group=group)
        by_rank = [tuple(layout.tolist()) for layout in layouts]
        # Width 0 marks a rank without data; `check_rows` rejects features of width 0.
        present = {layout for layout in by_rank if layout[0]}
        if len(present) > 1:
            named = "; ".join(
                f"rank {rank}: width {w}, {FLOAT_DTYPES[d]}, {'ids' if i else 'no ids'}"
                for rank, (w, d, i) in enumerate(by_rank)
                if w
            )
            raise ValueError(
                f"Ranks passed different features to `ContrastiveRecall` ({named}). All ranks must "
                "pass the same width and dtype, and all or none must pass ids."
            )
        if not present:
            return
        ((width, dtype_index, has_ids),) = present
        ids_of = functools.partial(torch.zeros, dtype=torch.int64, device=self.device)
        if seen is None:
            dtype = FLOAT_DTYPES[dtype_index]
            self.image_features = [torch.empty(0, width, dtype=dtype, device=self.device)]
            self.text_features = [torch.empty(0, width, dtype=dtype, device=self.device)]
            self.image_ids, self.text_ids = [ids_of(0, 2)], [ids_of(0, 2)]
        if not has_ids:  # a placeholder, because not every backend gathers empty lists
            self.image_ids, self.text_ids = [ids_of(1, 2)], [ids_of(1, 2)]
        super()._sync_dist(dist_sync_fn, process_group=process_group)
        if not has_ids:
            self.image_ids, self.text_ids = [], []


def _recalls_and_ranks(
    ranks: Tensor, n_candidates: int, top_k: tuple[int, ...]
) -> dict[str, Tensor]:
    n_queries = len(ranks)
    # k may exceed the number of candidates; the rank n_candidates + 1 is never a hit.
    values = {f"recall@{k}": (ranks <= min(k, n_candidates)).sum().float() for k in top_k}
    # Summed as integers, because fp32 sums round above 2^24.
    values["mean_rank"] = ranks.sum().float()
    # Explicitly fp32: integer division uses the default dtype, fp16 under Lightning's "16-true".
    values = {name: value / n_queries for name, value in values.items()}
    # `Tensor.median` would return the lower of the two middle values.
    ordered = ranks.sort().values
    values["median_rank"] = (ordered[(n_queries - 1) // 2] + ordered[n_queries // 2]).float() / 2
    values["queries"] = torch.tensor(n_queries, dtype=torch.float32, device=ranks.device)
    return values
