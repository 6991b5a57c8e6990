"""The demo's CLIP trained with BalancedAMP, and models that are made in `configure_model`."""

import unicodedata
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.glyph_clip.glyphs import encode_names
from examples.glyph_clip.model import GlyphCLIP
from lightning_mp.precision.balanced_amp import BalancedAMP
from tests.precision.models import Regression, fit, loader, parameters_of, perceptron

PAIRS, BATCH, EPOCHS = 192, 64, 8


def glyphs(seed: int) -> list[dict[str, Tensor]]:
    """Names of letters with a blot each for a glyph, in batches."""
    generator = torch.Generator().manual_seed(seed)
    names = [unicodedata.name(chr(0xC0 + index)) for index in range(PAIRS)]
    coarse = torch.rand(PAIRS, 1, 8, 8, generator=generator)
    image = nn.functional.interpolate(coarse, size=(32, 32), mode="bilinear").squeeze(1)
    pairs = {
        "image": (255 * image).to(torch.uint8),
        "text": torch.from_numpy(encode_names(names)),
        "name_id": torch.arange(PAIRS),
    }
    return [
        {name: values[rows] for name, values in pairs.items()}
        for rows in torch.randperm(PAIRS, generator=generator).split(BATCH)
    ]


def train(seed: int, plugin: Any) -> tuple[float, float]:
    """Return the loss over all pairs in fp32, before and after training."""
    torch.manual_seed(seed)
    model = GlyphCLIP(width=32, feature_width=32, jitter=0.0, lr=5e-4)
    data = glyphs(seed)

    def loss() -> float:
        model.eval()
        with torch.no_grad():
            pairs = [(*model(batch), model.logit_scale.exp()) for batch in data]
            return sum(model.loss(*pair).item() for pair in pairs) / len(pairs)

    start = loss()
    torch.manual_seed(seed)  # dropout
    fit(model, plugin, DataLoader(data, batch_size=None), max_epochs=EPOCHS)
    return start, loss()


# Later, when it knows the pairs by heart, rounding alone moves the loss of so small a batch by
# several percent, up as often as down.
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clip_ends_at_the_loss_of_fp32(seed: int) -> None:
    start, expected = train(seed, None)
    assert expected < 0.85 * start  # it has learnt
    for half in ("fp16", "bf16"):
        _, value = train(seed, BalancedAMP(half=half))
        assert abs(value / expected - 1) < 0.01, f"{half}: {value} instead of {expected}"


class _MadeLate(Regression):
    """Makes its network where Lightning asks for it, on no device at first if so wanted."""

    def __init__(self, is_meta: bool) -> None:
        super().__init__(nn.Identity)
        self.is_meta = is_meta

    def configure_model(self) -> None:
        if not isinstance(self.network, nn.Identity):
            return
        torch.manual_seed(0)
        if self.is_meta:
            with torch.device("meta"):
                network = perceptron()
            values = perceptron().state_dict()
            network.to_empty(device=self.device).load_state_dict(values)
        else:
            network = perceptron()
        self.network = network


@pytest.mark.parametrize("is_meta", [False, True])
def test_network_made_in_configure_model_gets_working_weights(is_meta: bool) -> None:
    torch.manual_seed(0)
    reference, model = _MadeLate(False), _MadeLate(is_meta)
    fit(reference, None, loader(6))
    seen: list[set[torch.dtype]] = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append({p.dtype for p in pl_module.parameters()})

    fit(model, BalancedAMP(), loader(6), callbacks=[Watch()])
    assert seen == [{torch.float16, torch.float32}] * 6  # the norm stays in fp32
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    moved = parameters_of(reference) - parameters_of(_start())
    assert (parameters_of(model) - parameters_of(reference)).norm() < 0.005 * moved.norm()


def _start() -> nn.Module:
    torch.manual_seed(0)
    return perceptron()
