"""Models with random weights, and weaknesses to plant in them, for the preflight."""

# ruff: noqa: D102
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["HEALTHY", "LOSSES", "MODELS", "WEAK", "WEAK_MODELS", "HalfLoss"]

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
    """Opens by the normalized value of a massive activation."""

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
