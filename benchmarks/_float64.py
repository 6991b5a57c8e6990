"""A pass of the contrastive loss against float64, at sizes where float64 cannot repeat it all.

Shapes:
    b: batch. D: feature width. k: sampled pairs. c: one chunk of the batch.

For a random sample of pairs, both loss terms and the gradients of image and text are computed again
in float64, from logits with the whole batch:

    term_k = softplus(neg_k - pos_k),   neg_k = log sum_{j != k} exp(S_kj)
    dL/dimage_k = scale / 2b (sum_{j != k} (exp(S_kj - row_lse_k) + exp(S_kj - column_lse_j)) text_j
                              - (sigmoid(row_neg_k - pos_k) + sigmoid(column_neg_k - pos_k)) text_k)

and the same with image and text exchanged. `column_lse_j` of the whole batch cannot be computed
again; it is taken from the pass, and the sample checks it. The loss is compared with the mean of
all terms, made in float64 from the log-sum-exps of the pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._inputs import Inputs

_CHUNK_ROWS = 2**16  # 384 MiB in float64 at D = 768


def log_sum_exps(loss: Tensor, batch: int) -> list[Tensor]:
    """Return the log-sum-exps of rows and columns that a loss keeps for its backward pass.

    Raises:
        RuntimeError: The loss keeps no two such vectors.
    """
    saved = getattr(loss.grad_fn, "saved_tensors", ())
    vectors = [each for each in saved if each is not None and each.shape == (batch,)]
    if len(vectors) < 2:
        raise RuntimeError(
            f"Passed a loss whose backward pass keeps {len(vectors)} vectors of length {batch}. "
            "The log-sum-exps of rows and columns come first among them. Pass the loss of "
            "`ContrastiveLoss`, before its backward pass."
        )
    return vectors[:2]


def errors_of(
    inputs: Inputs, loss: float, lse_2b: list[Tensor], samples: int, chunk_rows: int = _CHUNK_ROWS
) -> dict[str, float]:
    """Compare a pass with float64: a random sample of its terms and gradients, and its mean.

    Args:
        inputs: The features, with their gradients.
        loss: The loss.
        lse_2b: Log-sum-exps of rows and columns.
        samples: Pairs to check.
        chunk_rows: Pairs to hold in float64 at a time.
    """
    scale, batch = float(inputs.scale.detach()), len(inputs.image_bD)
    image_bD, text_bD = inputs.image_bD.detach(), inputs.text_bD.detach()
    pairs = ((image_bD[c].double(), text_bD[c].double()) for c in _chunks(batch, chunk_rows))
    positive_b = torch.cat([scale * (image_cD * text_cD).sum(1) for image_cD, text_cD in pairs])
    mean = (lse_2b[0] + lse_2b[1] - 2 * positive_b).mean() / 2
    generator = torch.Generator().manual_seed(1)
    pair_k = torch.randperm(batch, generator=generator)[:samples].to(image_bD.device)
    sides = [
        _Side(image_bD, text_bD, pair_k, scale, chunk_rows),
        _Side(text_bD, image_bD, pair_k, scale, chunk_rows),
    ]
    negative_2k = torch.stack([side.negatives() for side in sides])
    margin_2k = negative_2k - positive_b[pair_k]
    found_2k = torch.stack([lse_b[pair_k] for lse_b in lse_2b]) - positive_b[pair_k]
    own_2k = torch.logaddexp(negative_2k, positive_b[pair_k])
    errors = {
        "term_error": float((found_2k - F.softplus(margin_2k)).abs().amax()),
        "mean_error": abs(loss / float(mean) - 1),
    }
    weight_k = margin_2k.sigmoid().sum(0)
    others = zip(("image", "text"), sides, own_2k, reversed(lse_2b), inputs.leaves, strict=False)
    for name, side, own_k, other_b, leaf in others:
        unit = scale * inputs.loss_scale / (2 * batch)
        expected_kD = side.gradients(own_k, other_b, weight_k) * unit
        if leaf.grad is None:
            raise RuntimeError("Passed inputs without gradients. Run the backward pass first.")
        difference_k = (leaf.grad[pair_k].double() - expected_kD).norm(dim=1)
        errors[f"{name}_gradient_error"] = float((difference_k / expected_kD.norm(dim=1)).amax())
    return errors


@dataclass(frozen=True)
class _Side:
    """The sampled images among all texts, or the sampled texts among all images."""

    own_bD: Tensor
    other_bD: Tensor
    pair_k: Tensor
    scale: float
    chunk_rows: int

    def negatives(self) -> Tensor:
        """Return the log-sum-exps of the sample's negatives."""
        return torch.stack([logits_kc.logsumexp(1) for _, logits_kc in self._logits()]).logsumexp(0)

    def gradients(self, own_lse_k: Tensor, other_lse_b: Tensor, weight_k: Tensor) -> Tensor:
        """Return the gradients in units of `scale / 2b`, of the positives with their weights."""
        total_kD = self.other_bD[self.pair_k].double() * -weight_k[:, None]
        for rows, logits_kc in self._logits():
            softmax_kc = (logits_kc - own_lse_k[:, None]).exp_()
            softmax_kc.add_((logits_kc - other_lse_b[rows].double()).exp_())
            total_kD.addmm_(softmax_kc, self.other_bD[rows].double())
        return total_kD

    def _logits(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the sample's logits chunk by chunk, -inf at positives."""
        own_kD = self.own_bD[self.pair_k].double() * self.scale
        for rows in _chunks(len(self.other_bD), self.chunk_rows):
            index_c = torch.arange(rows.start, rows.stop, device=own_kD.device)
            logits_kc = own_kD @ self.other_bD[rows].double().T
            yield rows, logits_kc.masked_fill_(self.pair_k[:, None] == index_c, -torch.inf)


def _chunks(batch: int, rows: int) -> Iterator[slice]:
    for start in range(0, batch, rows):
        yield slice(start, min(start + rows, batch))


def theory_loss(inputs: Inputs, *, chunk_rows: int = _CHUNK_ROWS) -> float:
    """Return the loss of these positives among random negatives.

    The cosine of random unit vectors has `E exp(s cos) = sum_n (s^2 / 4)^n / (n! (D/2)_n)`.
    """
    (batch, width), scale = inputs.image_bD.shape, float(inputs.scale.detach())
    log_mean = log_term = 0.0
    for n in range(1, 10_000):
        log_term += math.log(scale**2 / 4) - math.log(n * (width / 2 + n - 1))
        log_mean = max(log_mean, log_term) + math.log1p(math.exp(-abs(log_mean - log_term)))
        if log_term < log_mean - 40 and n > scale:
            break
    total = 0.0
    for rows in _chunks(batch, chunk_rows):
        image_cD, text_cD = (x.detach()[rows].double() for x in inputs.leaves[:2])
        positive_c = scale * (image_cD * text_cD).sum(1)
        total += float(F.softplus(math.log(batch - 1) + log_mean - positive_c).sum())
    return total / batch
