"""The gradient cache without Lightning: `python -m examples.gradient_cache`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.data import letters
from lightning_mp import ContrastiveLoss, GradientCache


def main() -> tuple[float, float]:
    """Compute the gradients of 234 pairs, as a whole and in micro-batches of 32.

    Returns:
        The relative difference of the gradients, and the largest share of the batch in a tower.
    """
    torch.manual_seed(0)
    left, right = letters(("DejaVuSans",))[0], letters(("DejaVuSerif",))[0]
    layers = nn.Flatten(), nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 32)
    model, rows = nn.ModuleDict({"tower": nn.Sequential(*layers)}), []
    loss_fn, cache = ContrastiveLoss(), GradientCache(micro_batch_size=32)

    def loss() -> Tensor:
        return loss_fn(*(F.normalize(model["tower"](x)) for x in (left, right)), 20.0)

    whole = torch.autograd.grad(loss(), list(model.parameters()))
    # After the forward of the whole batch, which holds all rows.
    model["tower"].register_forward_hook(lambda _, x, __: rows.append(len(x[0])))
    with cache.serving(model, ["tower"]):
        value = loss()
    # Outside `serving`: the backward replays the calls made inside.
    value.backward()
    # On a GPU, replays are compared later: the last one here.
    cache.check()
    expected = torch.cat([gradient.flatten() for gradient in whole])
    cached = torch.cat([p.grad.flatten() for p in model.parameters()])
    difference = float((cached - expected).norm() / expected.norm())
    print(f"Gradients differ by {difference:.1e}; a tower held {max(rows)} rows of {len(left)}.")
    return difference, max(rows) / len(left)


if __name__ == "__main__":
    main()
