"""Plants weaknesses in models with random weights, and prints what the preflight finds.

    python benchmarks/preflight.py

A cell holds the largest error of a gradient relative to its noise, now and in a second run with
the printed settings; the last column holds the arguments of the plugin that the settings change.
"""

# ruff: noqa: D102
import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_mp
from lightning_mp import PrecisionPreflight
from papers.machine import cpu_name

STEPS = 2
ROWS = 8
TOKENS = 24


class Cancellation(nn.Module):
    """Adds and subtracts 300."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 300.0) - 300.0


class HandWrittenNorm(nn.Module):
    """Squares values near 1000."""

    def forward(self, x: Tensor) -> Tensor:
        y = 1000.0 * (x + 0.5)
        return x + 0.1 * y / (y * y).mean(-1, keepdim=True).sqrt()


class LargeValues(nn.Module):
    """Has intermediate values of 1e6."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1e6) * 1e-6


class TinyGradients(nn.Module):
    """Scales activations by 1e-8 and then by 1e8, and gradients in the reverse order."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1e-4 * 1e-4) * 1e4 * 1e4


class HugeLogits(nn.Module):
    """Takes the softmax of logits near 1e5."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + 10.0 * (x + 1e5).softmax(-1))


class Softmax(nn.Module):
    """Takes the softmax of logits near 1e4, whose differences fp16 rounds to 8."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + 10.0 * (4.0 * x + 1e4).softmax(-1))


class OverflowingTower(nn.Module):
    """Two layers with activations of 1e6 between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LazyLinear(64), nn.LazyLinear(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * 1e6) * 1e-6


class FrozenTower(nn.Module):
    """Multiplies by the mean feature of a frozen tower that was loaded in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = OverflowingTower()

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + self.tower(x).mean(-1, keepdim=True))


class Massive(nn.Module):
    """Sets one value to 1e5, at which the gate saturates."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., :1] * 0 + 1e5, x[..., 1:]], -1)


class Gate(nn.Module):
    """Opens by the normalised value of a massive activation."""

    def __init__(self) -> None:
        super().__init__()
        self.massive = Massive()

    def forward(self, x: Tensor) -> Tensor:
        y = self.massive(x)
        # inf - inf is NaN; any large value gives a gate of 1.
        return x * (y - y[..., :1].detach() + 20.0)[..., :1].sigmoid()


class HalfLoss(nn.Module):
    """Squares differences of 300 in half precision."""

    def forward(self, scores: Tensor) -> Tensor:
        difference = scores - 300.0
        return 1e-4 * (difference * difference).mean()


WEAK: dict[str, Callable[[], nn.Module]] = {
    "logits of 1e5": HugeLogits,
    "softmax at 1e4": Softmax,
    "frozen tower in fp16": FrozenTower,
    "massive activation": Gate,
    "values of 1e6": LargeValues,
    "values of 1e6, five times": lambda: nn.Sequential(*(LargeValues() for _ in range(5))),
    "tiny gradients": TinyGradients,
    "cancellation": Cancellation,
    "hand-written norm": HandWrittenNorm,
}
LOSSES = ("loss in half", "loss in training_step")


def gpt2() -> tuple[nn.Module, str, dict[str, Tensor]]:
    """Return a model, the path of the layer to plant behind, and a batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=3, n_head=4, n_embd=64, vocab_size=100, n_positions=64, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, 100, (ROWS, TOKENS))
    return GPT2LMHeadModel(config), "transformer.h.1.mlp.c_fc", {"input_ids": ids, "labels": ids}


def t5() -> tuple[nn.Module, str, dict[str, Tensor]]:
    """Return a T5."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, vocab_size=100,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, 100, (ROWS, TOKENS))
    path = "encoder.block.1.layer.1.DenseReluDense.wi"
    return T5ForConditionalGeneration(config), path, {"input_ids": ids, "labels": ids.flip(1)}


def vit() -> tuple[nn.Module, str, dict[str, Tensor]]:
    """Return a ViT."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
        image_size=32, patch_size=8, num_labels=10,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.randint(0, 10, (ROWS,))}
    model = ViTForImageClassification(config)
    return model, _linear_in(model, "1", "intermediate", "fc1"), batch


def whisper() -> tuple[nn.Module, str, dict[str, Tensor]]:
    """Return a Whisper."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=100,
        num_mel_bins=16, max_source_positions=32, max_target_positions=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=[],
        begin_suppress_tokens=[],
    )  # fmt: skip
    labels = torch.randint(3, 100, (ROWS, 16))
    batch = {"input_features": torch.randn(ROWS, 16, 64), "labels": labels}
    return WhisperForConditionalGeneration(config), "model.encoder.layers.1.fc1", batch


class CNN(nn.Module):
    """A convolutional network with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(3, 16), (16, 32), (32, 32)]
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())
                for i, o in layers
            )
        )
        self.head = nn.Linear(32, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.body(pixel_values).mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def cnn() -> tuple[nn.Module, str, dict[str, Tensor]]:
    """Return a CNN."""
    batch = {"pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": torch.randint(0, 10, (ROWS,))}
    return CNN(), "body.1.1", batch


def bert() -> tuple[nn.Module, str, dict[str, Tensor]]:
    """Return a BERT."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        vocab_size=100, max_position_embeddings=64,
    )  # fmt: skip
    ids = torch.randint(0, 100, (ROWS, TOKENS))
    return BertForMaskedLM(config), "", {"input_ids": ids, "labels": ids}


def llama() -> tuple[nn.Module, str, dict[str, Tensor]]:
    """Return a LLaMA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, vocab_size=100, max_position_embeddings=64,
    )  # fmt: skip
    ids = torch.randint(0, 100, (ROWS, TOKENS))
    return LlamaForCausalLM(config), "", {"input_ids": ids, "labels": ids}


def clip() -> tuple[nn.Module, str, dict[str, Tensor]]:
    """Return a CLIP."""
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 128}  # fmt: skip
    config = CLIPConfig(
        text_config={**tower, "vocab_size": 100, "max_position_embeddings": TOKENS,
                     "bos_token_id": 0, "eos_token_id": 99, "pad_token_id": 1},
        vision_config={**tower, "image_size": 32, "patch_size": 8}, projection_dim=32,
    )  # fmt: skip
    ids = torch.randint(2, 99, (ROWS, TOKENS))
    ids[:, -1] = 99
    batch = {"input_ids": ids, "pixel_values": torch.randn(ROWS, 3, 32, 32)}
    return _WithLoss(CLIPModel(config)), "", batch


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch, return_loss=True)


def resnet() -> tuple[nn.Module, str, dict[str, Tensor]]:
    """Return a ResNet."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10
    )
    batch = {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.randint(0, 10, (ROWS,))}
    return ResNetForImageClassification(config), "", batch


def convnext() -> tuple[nn.Module, str, dict[str, Tensor]]:
    """Return a ConvNeXt, whose branches begin scaled by 1e-6, with their gradients."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 2], num_stages=2, num_labels=10)
    batch = {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.randint(0, 10, (ROWS,))}
    return ConvNextForImageClassification(config), "", batch


def wav2vec2() -> tuple[nn.Module, str, dict[str, Tensor]]:
    """Return a wav2vec 2.0 that classifies."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    config = Wav2Vec2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        conv_dim=(32, 32), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, num_labels=5,
        mask_time_prob=0.0,
    )  # fmt: skip
    batch = {"input_values": torch.randn(ROWS, 1600), "labels": torch.randint(0, 5, (ROWS,))}
    return Wav2Vec2ForSequenceClassification(config), "", batch


def _linear_in(model: nn.Module, *parts: str) -> str:
    """Return the path of the first linear layer whose path has the first and any other part."""
    layer, *names = parts
    return next(
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and layer in path.split(".")
        and any(name in path for name in names)
    )


MODELS = {"GPT-2": gpt2, "T5": t5, "ViT": vit, "Whisper": whisper, "CNN": cnn}
HEALTHY = {
    "BERT": bert, "LLaMA": llama, "CLIP": clip, "ResNet": resnet, "wav2vec 2.0": wav2vec2,
}  # fmt: skip


# Models that are weak as they are, with the path that must be named first.
WEAK_MODELS = {"ConvNeXt": (convnext, "layers.0.")}


class Task(pl.LightningModule):
    """Trains a model with a weakness planted behind one of its layers, or in the loss.

    Args:
        name: Name of the model.
        weak: Name of the weakness; `None` for the model as it is.
    """

    def __init__(self, name: str, weak: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        make, part = WEAK_MODELS.get(name, ({**MODELS, **HEALTHY}.get(name), None))
        assert make is not None
        self.model, path, self.batch = make()
        self.planted = part
        self.criterion = HalfLoss() if weak == LOSSES[0] else None
        self.squares = weak == LOSSES[1]
        if weak in LOSSES:
            self.planted = "criterion" if self.criterion else "training_step"
        elif weak is not None:
            parent, _, last = path.rpartition(".")
            owner = self.model.get_submodule(parent)
            layer = getattr(owner, last)
            setattr(owner, last, nn.Sequential(layer, WEAK[weak]()))
            if hasattr(layer, "weight"):
                owner.get_submodule(last).weight = layer.weight  # T5 asks for its dtype
            self.planted = f"model.{path}.1"
            if weak == "frozen tower in fp16":
                with torch.no_grad():  # makes the lazy layers
                    self.model(**self.batch)
                owner.get_submodule(last)[1].tower.half().requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch)
        if self.criterion is not None:
            return output["loss"] + self.criterion(output["logits"])
        if self.squares:
            difference = output["logits"] - 300.0
            return output["loss"] + 1e-4 * (difference * difference).mean()
        return output["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([self.batch] * 4, batch_size=None)


def preflight_of(task: Task, plugin: Any) -> PrecisionPreflight:
    """Run the preflight."""
    callback = PrecisionPreflight(steps=STEPS, stops=True)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
        plugins=plugin,
    )  # fmt: skip
    trainer.fit(task)
    if callback.result is None:
        raise SystemExit(f"{callback.failure}")
    return callback


class Diagnosis(NamedTuple):
    """Result of the preflight of one model."""

    before: str  # largest error of a gradient, relative to its noise
    after: str  # the same in a second run with the printed settings
    remedy: str  # arguments of the plugin that the settings change
    is_first: bool  # whether the planted weakness is named first
    is_clean: bool  # whether the second run is clean, or the only one of a healthy model
    seconds: float  # CPU time of the first run


def diagnosed(name: str, weak: str | None, kind: str, half: str) -> Diagnosis:
    """Run the preflight on a model, and again with the settings that it prints."""
    task, plugin = Task(name, weak), getattr(lightning_mp, kind)
    start = time.process_time()
    found = preflight_of(task, plugin(half=half))
    seconds = time.process_time() - start
    result = found.result
    assert result is not None
    before = f"{result.ratio:.2%}" if result.ratio < 1e6 else "not finite"
    if task.planted is None:
        return Diagnosis(before, "", "", True, result.is_clean, seconds)
    callers = [each or "training_step" for some in result.callers.values() for each in some]
    is_first = str(task.planted) in result.modules[0].path or task.planted in callers
    if not found.settings:
        return Diagnosis(before, "no settings", "", is_first, False, seconds)
    (entry,) = yaml.safe_load(found.settings)["trainer"]["plugins"]
    plugin, arguments = getattr(lightning_mp, entry["class_path"]), entry["init_args"]
    if isinstance(arguments.get("loss_scale"), dict):
        arguments["loss_scale"] = lightning_mp.LossScaleConfig(**arguments["loss_scale"])
    cured = preflight_of(Task(name, weak), plugin(**arguments)).result
    assert cured is not None
    after, remedy = f"{cured.ratio:.2%}", remedy_of(result.remedy)
    return Diagnosis(before, after, remedy, is_first, cured.is_clean, seconds)


def remedy_of(remedy: Any) -> str:
    """Return the arguments of the plugin that a remedy changes."""
    if remedy.half is not None:
        return f"`half={str(remedy.half).removeprefix('torch.')}`"
    if remedy.loss_scale is not None:
        return "`loss_scale`"
    return " and ".join(f"`{kind}`" for kind in dict.fromkeys(kind for kind, _ in remedy.names))


def table(outcomes: dict[tuple[str, str | None], Diagnosis]) -> Iterator[str]:
    """Yield the lines of a table with a row for each weakness and a column for each model."""
    names = [name for name in MODELS if (name, None) in outcomes]
    if not names:
        return
    yield f"| planted | {' | '.join(names)} | settings |"
    yield f"|---{'|---' * len(names)}|---|"
    for weak in (None, *WEAK, *LOSSES):
        row = [outcomes[name, weak] for name in names]
        cells = [f"{o.before} -> {o.after}" if o.after else o.before for o in row]
        remedies = ", ".join(dict.fromkeys(o.remedy for o in row))
        yield f"| {weak or 'nothing'} | {' | '.join(cells)} | {remedies} |".replace("|  |", "| |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [*MODELS, *HEALTHY, *WEAK_MODELS]
    parser.add_argument("--models", choices=names, nargs="+", default=names)
    parser.add_argument("--plugin", choices=["BalancedAMP", "PureFP16"], default="BalancedAMP")
    parser.add_argument("--half", choices=["fp16", "bf16"], default="fp16")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    outcomes = {}
    for name in args.models:
        for weak in (None, *WEAK, *LOSSES) if name in MODELS else (None,):
            found = outcomes[name, weak] = diagnosed(name, weak, args.plugin, args.half)
            print(name, weak, *found, sep=", ", file=sys.stderr, flush=True)
    print("\n".join(table(outcomes)), "\n")
    weak_ones = {key: o for key, o in outcomes.items() if key[1] or key[0] in WEAK_MODELS}
    healthy = {key[0]: o for key, o in outcomes.items() if key not in weak_ones}
    clean = [name for name, o in healthy.items() if o.is_clean]
    first, cured = (
        sum(getattr(o, f) for o in weak_ones.values()) for f in ("is_first", "is_clean")
    )
    print(f"{len(clean)} of {len(healthy)} healthy models are clean:", end=" ")
    print(", ".join(f"{name} {o.before}" for name, o in healthy.items()), end=".\n")
    print(f"{first} of {len(weak_ones)} weaknesses are named first, {cured} are clean with the")
    print("printed settings; the others:", end=" ")
    wrong = [key for key, o in weak_ones.items() if not (o.is_first and o.is_clean)]
    print(", ".join(f"{name}, {weak}" for name, weak in wrong) or "none", end=".\n")
    for name in [name for name in WEAK_MODELS if (name, None) in outcomes]:
        found = outcomes[name, None]
        print(f"{name}: {found.before} -> {found.after} with {found.remedy}.")
    for name, some in (("healthy", healthy), ("weak", weak_ones)):
        seconds = [o.seconds for o in some.values()] or [0.0]
        print(f"CPU seconds, {name}: median {median(seconds):.1f}, at most {max(seconds):.1f}.")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {cpu_name()}.")


if __name__ == "__main__":
    main()
