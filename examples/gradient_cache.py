"""The gradient cache without Lightning: `python -m examples.gradient_cache`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.data import letters
from lightning_mp import ContrastiveLoss, GradientCache


def main() -> tuple[float, float]:
    """Take one step at a batch of 234 pairs, whole and in micro-batches of 32.

    Returns:
        The relative difference of the gradients, and the share of the batch that a tower holds.
    """
    left, right = letters(("DejaVuSans",))[0], letters(("DejaVuSerif",))[0]
    loss_fn, seen, gradients = ContrastiveLoss(), [], []
    for cache in (None, GradientCache(micro_batch_size=32)):
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 32)
        model = nn.ModuleDict({"tower": nn.Sequential(*layers)})
        model["tower"].register_forward_hook(lambda _, x, __: seen.append(len(x[0])))

        def step(model: nn.ModuleDict = model) -> Tensor:
            return loss_fn(*(F.normalize(model["tower"](x)) for x in (left, right)), 20.0)

        if cache is None:
            step().backward()
        else:
            with cache.serving(model, ["tower"]):
                loss = step()
            loss.backward()
            cache.check()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    difference = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    print(f"Gradients differ by {difference:.1e}; towers held {seen[-1]} to {max(seen[2:])} rows.")
    return difference, max(seen[2:]) / len(left)


if __name__ == "__main__":
    main()
