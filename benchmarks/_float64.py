"""A pass of the contrastive loss against float64, at sizes where float64 cannot repeat it all.

Shapes:
    b: batch. D: feature width. k: sampled pairs.

For a random sample of pairs, the log-sum-exps of both directions and the gradients of image and
text are computed again in float64, from logits with the whole batch:

    dL/dimage_k = scale / 2b (sum_j (exp(S_kj - row_lse_k) + exp(S_kj - column_lse_j)) text_j
                              - 2 text_k)

and the same with image and text exchanged. `column_lse_j` of the whole batch cannot be computed
again; it is taken from the pass, and the sample checks it. The loss is compared with the mean of
all its terms, made in float64 from the log-sum-exps of the pass.
"""

import torch
from torch import Tensor

from benchmarks._contenders import Inputs, LossFunction

# Log-sum-exps of fp32 logits near 100 are off by about 2e-5.
TOLERANCES = {"term_error": 5e-4, "mean_error": 1e-5}
# The softmax and the result are stored in the dtype.
GRADIENT_TOLERANCES = {"fp32": 1e-3, "bf16": 1e-2, "fp16": 2e-3}


def sampled_errors(inputs: Inputs, loss_function: LossFunction, samples: int) -> dict[str, float]:
    """Run a pass of ours and compare it: some of its terms and gradients, and its mean."""
    loss = loss_function(*inputs.leaves)
    lses = log_sum_exps(loss, len(inputs.image_bD))
    loss.backward(torch.full_like(loss, inputs.loss_scale))
    return errors_of(inputs, float(loss.detach()), lses, samples)


def log_sum_exps(loss: Tensor, batch: int) -> list[Tensor]:
    """Return the log-sum-exps of rows and columns that a loss keeps for its backward pass."""
    saved = getattr(loss.grad_fn, "saved_tensors", ())
    vectors = [each for each in saved if each is not None and each.shape == (batch,)]
    if len(vectors) < 2:
        raise RuntimeError(
            f"Passed a loss whose backward pass keeps {len(vectors)} vectors of length {batch}, "
            "not the log-sum-exps of rows and columns. Pass the loss of `ContrastiveLoss`."
        )
    return vectors[:2]


def errors_of(inputs: Inputs, loss: float, lses: list[Tensor], samples: int) -> dict[str, float]:
    """Return how far gradients on the inputs, a loss and its log-sum-exps are from float64."""
    scale, batch = float(inputs.scale.detach()), len(inputs.image_bD)
    image_bD, text_bD = (side_bD.detach() for side_bD in inputs.leaves[:2])
    positive_b = scale * torch.einsum("bd,bd->b", image_bD.double(), text_bD.double())
    mean = float((lses[0] + lses[1] - 2 * positive_b).mean()) / 2
    generator = torch.Generator().manual_seed(1)
    pair_k = torch.randperm(batch, generator=generator)[:samples].to(image_bD.device)
    terms: list[Tensor] = []
    gradients: list[Tensor] = []
    for own_bD, other_bD, (own_lse_b, other_lse_b), leaf in (
        (image_bD, text_bD, lses, inputs.image_bD),
        (text_bD, image_bD, lses[::-1], inputs.text_bD),
    ):
        wide_bD = other_bD.double()
        logits_kb = scale * own_bD[pair_k].double() @ wide_bD.T
        own_lse_k = logits_kb.logsumexp(1)
        terms.append((own_lse_b[pair_k] - own_lse_k).abs())
        softmax_kb = (logits_kb - own_lse_k[:, None]).exp() + (logits_kb - other_lse_b).exp()
        unit = scale * inputs.loss_scale / (2 * batch)
        right_kD = unit * (softmax_kb @ wide_bD - 2 * wide_bD[pair_k])
        found_kD = leaf.grad[pair_k]  # type: ignore[index]  # a pass was run
        gradients.append((found_kD - right_kD).norm(dim=1) / right_kD.norm(dim=1))
    return {
        "term_error": float(torch.cat(terms).amax()),
        "mean_error": abs(loss / mean - 1),
        "gradient_error": float(torch.cat(gradients).amax()),
    }


def problems_of(errors: dict[str, float], dtype: str) -> list[str]:
    """Return what is not as it should be."""
    limits = TOLERANCES | {"gradient_error": GRADIENT_TOLERANCES[dtype]}
    return [
        f"Wrong: {name.replace('_', ' ')} is {errors[name]:.1e}, more than {limit:.0e}."
        for name, limit in limits.items()
        if not errors[name] <= limit  # NaN too
    ]
