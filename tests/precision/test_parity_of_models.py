"""The demo's CLIP, with every precision plugin, and a T5 end at the loss of fp32."""

import functools
import statistics
import unicodedata
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader

from examples.glyph_clip.glyphs import encode_names
from examples.glyph_clip.model import GlyphCLIP
from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.pure_fp16 import PureFP16
from tests.parity import Parity
from tests.precision.models import fit

# --- the demo's CLIP -----------------------------------------------------------------------------

PAIRS, BATCH, CLIP_EPOCHS = 192, 64, 4


def glyphs(seed: int) -> list[dict[str, Tensor]]:
    """Names of letters with a blot each for a glyph, in batches."""
    generator = torch.Generator().manual_seed(seed)
    names = [unicodedata.name(chr(0xC0 + index)) for index in range(PAIRS)]
    coarse = torch.rand(PAIRS, 1, 8, 8, generator=generator)
    image = F.interpolate(coarse, size=(32, 32), mode="bilinear").squeeze(1)
    pairs = {
        "image": (255 * image).to(torch.uint8),
        "text": torch.from_numpy(encode_names(names)),
        "name_id": torch.arange(PAIRS),
    }
    return [
        {name: values[rows] for name, values in pairs.items()}
        for rows in torch.randperm(PAIRS, generator=generator).split(BATCH)
    ]


def train_clip(seed: int, plugin: Any, epochs: int = CLIP_EPOCHS) -> float:
    """Return the loss over all pairs after training, in fp32."""
    torch.manual_seed(seed)
    model = GlyphCLIP(width=32, feature_width=32, jitter=0.0, lr=1e-3)
    data = glyphs(seed)
    torch.manual_seed(seed)  # dropout
    fit(model, plugin, DataLoader(data, batch_size=None), max_epochs=epochs)
    model.eval()
    with torch.no_grad():
        triples = [(*model(batch), model.logit_scale.exp()) for batch in data]
        return statistics.fmean(model.loss(*triple).item() for triple in triples)


# --- T5 ------------------------------------------------------------------------------------------

T5_EPOCHS = 4


class Reverses(pl.LightningModule):
    """A tiny T5 that learns to write words backwards."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        torch.manual_seed(seed)
        config = T5Config(
            vocab_size=20, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4,
            dropout_rate=0.0, decoder_start_token_id=0, is_gated_act=True,
            feed_forward_proj="gated-gelu",
        )  # fmt: skip
        self.network = T5ForConditionalGeneration(config)

    def loss(self, words: Tensor) -> Tensor:
        target = words.flip(1)
        logits = self.network(input_ids=words, labels=target).logits
        return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=3e-3)


def train_t5(seed: int, plugin: Any, epochs: int = T5_EPOCHS) -> float:
    """Return the loss over all words after training, in fp32."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(2, 20, (128, 6), generator=generator)
    model = Reverses(seed)
    fit(
        model, plugin, DataLoader([[w] for w in words.split(32)], batch_size=None),
        max_epochs=epochs,
    )  # fmt: skip
    with torch.no_grad():
        return model.eval().loss(words).item()


# --- the tests -----------------------------------------------------------------------------------

TRAINERS: dict[str, Callable[..., float]] = {"clip": train_clip, "t5": train_t5}
# Many small operations are slow to round. A T5 scatters little, so that four runs suffice.
PARITY = {"clip": Parity(train_clip, references=6), "t5": Parity(train_t5, references=4)}
PLUGINS: dict[str, Callable[[str], Any]] = {
    "balanced": lambda half: BalancedAMP(half=half),
    "pure": lambda half: PureFP16(half=half),
}


# Each half, plugin and model; `make sweep` has the other half of each.
GATE = [("clip", "balanced", "fp16"), ("clip", "pure", "fp16")]
SWEEP = [
    *(("clip", plugin, "bf16") for plugin in ("balanced", "pure")),
    *(("t5", "pure", half) for half in ("fp16", "bf16")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plugin", "half"), [*GATE, *(pytest.param(*c, marks=pytest.mark.sweep) for c in SWEEP)]
)
def test_training_ends_at_the_loss_of_fp32(name: str, plugin: str, half: str) -> None:
    verdict = PARITY[name].judge(functools.partial(PLUGINS[plugin], half), half)
    assert verdict.holds, verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_training_in_fp32_learns(name: str) -> None:
    ends = PARITY[name].in_fp32()
    starts = [TRAINERS[name](seed, None, epochs=0) for seed in range(len(ends))]
    assert statistics.fmean(ends) < 0.85 * statistics.fmean(starts)
