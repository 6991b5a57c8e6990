"""Small models reach the loss of fp32 with every precision plugin, optimizer and wrapper."""

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
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RAdam
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from examples.glyph_clip.data import GlyphData
from examples.glyph_clip.glyphs import encode_names
from examples.glyph_clip.model import GlyphCLIP
from lightning_mp import BalancedAMP, LossScaleConfig, PureFP16
from tests.parity import Parity
from tests.precision.char_gpt import CharGPT, char_batches, held_out_loss
from tests.precision.models import Regression, Transformer, fit, sequences
from tests.precision.test_balanced_amp_leaves_the_model_alone import Lookahead

pytestmark = pytest.mark.slow  # runs in `make test`

# At this initial scale no step overflows, because a run with skipped steps trains less.
LOW = LossScaleConfig(init_scale=2.0**8)
PLUGINS: dict[str, Callable[[], Any]] = {
    "fp16 O2": lambda: BalancedAMP(loss_scale=LOW),
    "fp16 O1": lambda: BalancedAMP(weights="full", loss_scale=LOW),
    "bf16 O2": lambda: BalancedAMP(half="bf16"),
    "bf16 O1": lambda: BalancedAMP(half="bf16", weights="full"),
    "pure fp16": lambda: PureFP16(loss_scale=LOW),
    "pure bf16": lambda: PureFP16(half="bf16"),
}
O2, PURE = ("fp16 O2", "bf16 O2"), ("pure fp16", "pure bf16")

# Each function trains from a seed with a plugin and returns the final loss in fp32, over all or
# held-out data. `max_epochs=0` returns the loss at the start.

# --- a tiny transformer, with every optimizer ----------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.01, momentum=0.9),
    "fused sgd": lambda p: SGD(p, lr=0.01, momentum=0.9, fused=True),
    "adagrad": lambda p: Adagrad(p, lr=0.03),
    "radam": lambda p: RAdam(p, lr=3e-3),
    "adamw": lambda p: AdamW(p, lr=3e-3),
    "foreach adamw": lambda p: AdamW(p, lr=3e-3, foreach=True),
    "fused adamw": lambda p: AdamW(p, lr=3e-3, fused=True),
    "adamw of many groups": lambda p: AdamW([{"params": [each]} for each in p], lr=3e-3),
}
# Optimizers with equal steps share the fp32 runs of one of them.
SAME_STEPS = {
    "fused sgd": "sgd",
    **dict.fromkeys(("foreach adamw", "fused adamw", "adamw of many groups"), "adamw"),
}


def train_transformer(optimizer: str, seed: int, plugin: Any, max_epochs: int = 2) -> float:
    model, data = Regression(Transformer, OPTIMIZERS[optimizer], seed=seed), sequences(8)
    trainer = fit(model, plugin, data, max_epochs=max_epochs)
    states = trainer.optimizers[0].state_dict()["state"].values()
    tensors = [v for state in states for v in state.values() if isinstance(v, Tensor)]
    assert {each.dtype for each in (*model.parameters(), *tensors)} == {torch.float32}
    with torch.no_grad():
        return statistics.fmean(model.loss(batch).item() for batch in data)


# --- a character GPT, also averaged, wrapped, and with accumulated batches -----------------------

ACCUMULATED = 64


class Averaged(CharGPT):
    """Maintains an exponential average of its weights."""

    average: AveragedModel

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self)


def train_gpt(kind: str, seed: int, plugin: Any, max_epochs: int = 1) -> float:
    steps = 6 if kind == "accumulated" else 60
    options: dict[str, Any] = {"steps": steps, "seed": seed}
    if kind == "lookahead":
        options["make_optimizer"] = lambda p: Lookahead(AdamW(list(p), lr=3e-3))
    model = (Averaged if kind == "averaged" else CharGPT)(**options)
    if kind == "averaged":
        average = AveragedModel(CharGPT(**options), multi_avg_fn=get_ema_multi_avg_fn(0.9))
        object.__setattr__(model, "average", average)  # not a submodule of the model
    batches, data = 1, char_batches(steps, seed=seed)
    if kind == "accumulated":
        batches, data = ACCUMULATED, char_batches(steps * ACCUMULATED, batch_size=2, seed=seed)
    fit(model, plugin, data, accumulate_grad_batches=batches, max_epochs=max_epochs)
    return held_out_loss(model.average.module if kind == "averaged" else model)


# --- the demo's CLIP, on small data and on its own glyphs at its own width ------------------------

PAIRS = 192


def train_small_clip(seed: int, plugin: Any, max_epochs: int = 4) -> float:
    """Train a small CLIP on letter names and blurred spots in place of glyphs."""
    generator = torch.Generator().manual_seed(seed)
    names = [unicodedata.name(chr(0xC0 + index)) for index in range(PAIRS)]
    coarse = torch.rand(PAIRS, 1, 8, 8, generator=generator)
    image = F.interpolate(coarse, size=(32, 32), mode="bilinear").squeeze(1)
    pairs = {
        "image": (255 * image).to(torch.uint8),
        "text": torch.from_numpy(encode_names(names)),
        "name_id": torch.arange(PAIRS),
    }
    data = [
        {name: values[rows] for name, values in pairs.items()}
        for rows in torch.randperm(PAIRS, generator=generator).split(64)
    ]
    torch.manual_seed(seed)
    model = GlyphCLIP(width=32, feature_width=32, jitter=0.0, lr=1e-3)
    torch.manual_seed(seed)  # seeds dropout
    fit(model, plugin, DataLoader(data, batch_size=None), max_epochs=max_epochs)
    return clip_loss(model, data)


@functools.cache
def glyphs() -> GlyphData:
    """Return the rendered glyphs, rendered once; losses are computed on the test set."""
    # CPUs without half-precision convolutions take ten times as long in half precision.
    data = GlyphData(batch_size=32, progress=False)
    data.prepare_data()
    data.setup()
    return data


def train_demo(seed: int, plugin: Any, max_epochs: int = 1) -> float:
    """Train the demo for 60 steps of 32 pairs instead of 320 steps of 2048."""
    data = glyphs()
    torch.manual_seed(seed)
    model = GlyphCLIP()
    data.seed = seed
    torch.manual_seed(seed)  # seeds the distortion of glyphs
    fit(model, plugin, data.train_dataloader(), max_epochs=max_epochs, max_steps=60)
    return clip_loss(model, data.test_dataloader())


@torch.no_grad()
def clip_loss(model: GlyphCLIP, data: Any) -> float:
    model.eval()
    scale = model.logit_scale.exp()
    return statistics.fmean(model.loss(*model(batch), scale).item() for batch in data)


# --- a T5 ----------------------------------------------------------------------------------------


class Reverses(pl.LightningModule):
    """A small T5 that learns to reverse words."""

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


def train_t5(seed: int, plugin: Any, max_epochs: int = 4) -> float:
    words = torch.randint(2, 20, (128, 6), generator=torch.Generator().manual_seed(seed))
    model = Reverses(seed)
    data = DataLoader([[each] for each in words.split(32)], batch_size=None)
    fit(model, plugin, data, max_epochs=max_epochs)
    with torch.no_grad():
        return model.eval().loss(words).item()


# --- the tests -----------------------------------------------------------------------------------

GPT = ("plain", "averaged", "lookahead", "accumulated")
TRAIN: dict[str, Callable[..., float]] = {
    **{name: functools.partial(train_transformer, name) for name in OPTIMIZERS},
    **{f"gpt, {kind}": functools.partial(train_gpt, kind) for kind in GPT},
    "small clip": train_small_clip,
    "demo": train_demo,
    "t5": train_t5,
}
# If losses vary little between seeds, few runs suffice.
REFERENCES = {"radam": 5, "small clip": 6, "demo": 4, "t5": 4} | {f"gpt, {k}": 4 for k in GPT}
PARITY = {name: Parity(train, references=REFERENCES.get(name, 8)) for name, train in TRAIN.items()}
# O1 does not change the optimizers, so two of them suffice.
CASES = [
    *((name, each) for name in ("sgd", "adamw", "gpt, plain", "demo") for each in (*PLUGINS,)),
    *((name, each) for name in ("adagrad", "fused adamw", "small clip") for each in (*O2, *PURE)),
    *(
        (name, each)
        for name in ("gpt, averaged", "gpt, lookahead", "gpt, accumulated")
        for each in O2
    ),
    *((name, each) for name in ("fused sgd", "radam", "t5") for each in PURE),
    *((name, each) for name in ("foreach adamw", "adamw of many groups") for each in PURE),
]
# SGD, because Adam hides a wrong gradient scale. `make sweep` runs the other cases.
GATE = [
    *(("sgd", "fp16 O2"), ("sgd", "pure bf16")),
    *(("small clip", "fp16 O2"), ("small clip", "pure fp16")),
]


def case(name: str, setting: str) -> Any:
    marks = [] if (name, setting) in GATE else [pytest.mark.sweep]
    return pytest.param(name, setting, marks=marks)


@pytest.mark.parametrize(("name", "setting"), [case(*each) for each in CASES])
def test_training_reaches_the_loss_of_fp32(name: str, setting: str) -> None:
    parity, half = PARITY[SAME_STEPS.get(name, name)], setting.replace("pure ", "")[:4]
    verdict = parity.judge(PLUGINS[setting], half, train=TRAIN[name])
    print(f"{name}, {setting}: {verdict}")
    assert verdict.holds, verdict
    assert not set(verdict.losses) & set(verdict.in_fp32)  # the plugin changes the result


# Largest ratio of final to initial loss in fp32: training must lower the loss by far more than
# the effect of rounding.
LEFT = {"small clip": 0.85, "t5": 0.85, "demo": 0.95, "gpt, accumulated": 0.99}
LEFT |= {f"gpt, {kind}": 0.9 for kind in GPT if kind != "accumulated"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in dict(GATE) else [pytest.mark.sweep])
        for name in TRAIN
        if name not in SAME_STEPS
    ],
)
def test_training_in_fp32_learns(name: str) -> None:
    ends = PARITY[name].in_fp32()
    starts = [TRAIN[name](seed, None, max_epochs=0) for seed in range(len(ends))]
    assert statistics.fmean(ends) < LEFT.get(name, 0.6) * statistics.fmean(starts)
