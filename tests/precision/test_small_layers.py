"""Small linear layers and convolutions have no half copies: autocast casts their weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_mp import BalancedAMP
from lightning_mp.precision._weights import working_copies
from tests.precision.models import Regression, Transformer, fit, parameters_of, sequences
from tests.precision.working_models import HALVES, Seen, bytes_held, run

# The value of `working_copies._SMALL`, which `conftest.py` sets to 0.
SMALL = 2**16


def trained(half: Any, small: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, int]:
    monkeypatch.setattr(working_copies, "_SMALL", small)
    held = []

    class Counts(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            held.append(bytes_held(plugin._working))
            return loss

    plugin = BalancedAMP(half=half)
    model = Counts(Transformer, lambda p: SGD(p, lr=0.1, momentum=0.9))
    fit(model, plugin, sequences(4), accumulate_grad_batches=2, gradient_clip_val=1.0)
    return parameters_of(model), held[-1]


@pytest.mark.parametrize("half", HALVES)
def test_training_is_bitwise_equal_with_and_without_copies(
    half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_copies, all_bytes = trained(half, 0, monkeypatch)
    without, few_bytes = trained(half, SMALL, monkeypatch)
    assert torch.equal(with_copies, without)
    # Only the position, a parameter of the network itself, has a copy; norms have none.
    assert few_bytes == 2 * Transformer().position.numel() < all_bytes


def test_large_layers_and_layers_that_autocast_does_not_cast_have_copies(
    attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(working_copies, "_SMALL", SMALL)
    large = nn.Linear(256, 257)  # one row above the limit
    modules = nn.ModuleDict(
        {
            "at the limit": nn.Linear(256, 256),
            "convolution": nn.Conv2d(4, 4, 3),
            "large": large,
            "subclass": Seen(256, 8),
            "embedding": nn.Embedding(9, 4),
        }
    )
    copies = attached(modules)
    held = 0
    for name, module in modules.items():
        shapes = {"embedding": (3,), "convolution": (1, 4, 5, 5)}
        x = torch.ones(shapes.get(name, (1, 256)))
        run(module, x.long() if name == "embedding" else x)
        has_copies = name not in ("at the limit", "convolution")
        held += has_copies * 2 * sum(p.numel() for p in module.parameters())
        assert bytes_held(copies) == held, name
