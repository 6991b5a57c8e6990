"""Healthy models of other kinds: Whisper, Mixtral, VAE, denoiser, a student of an EMA teacher.

Legend: B batch, T frames or tokens, C width.
"""

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mp import PureFP16
from tests.monitors.language_models import BATCH, TOKENS, VOCABULARY, WIDTH, cross_entropy, text
from tests.monitors.running import Learner

FRAMES, BINS = 32, 8


class Whisper(Learner):
    """Transcribes a spectrogram, in which the bins of six words light up one after the other."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, decays=True)
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        self.network = WhisperForConditionalGeneration(
            WhisperConfig(
                vocab_size=BINS + 3, num_mel_bins=BINS, d_model=WIDTH, encoder_layers=1,
                encoder_attention_heads=2, decoder_layers=1, decoder_attention_heads=2,
                encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=FRAMES // 2,
                max_target_positions=8, decoder_start_token_id=0, pad_token_id=1,
                bos_token_id=0, eos_token_id=2, suppress_tokens=None, begin_suppress_tokens=None,
            )
        )  # fmt: skip
        self.network.train()

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        words = torch.randint(BINS, (BATCH, 6), generator=generator)
        frames = F.one_hot(words, BINS).float().repeat_interleave(5, dim=1)
        noise = 0.6 * torch.randn(BATCH, FRAMES, BINS, generator=generator)
        noise[:, : frames.shape[1]] += frames
        return [noise.mT.contiguous(), words + 3]

    def loss(self, batch: list[Tensor]) -> Tensor:
        logits = self.network(input_features=batch[0], labels=batch[1]).logits
        return cross_entropy(logits, batch[1])


class Mixtral(Learner):
    """Predicts the next word with four experts, two of which a router chooses for each token."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, decays=True)
        from transformers import MixtralConfig, MixtralForCausalLM

        self.network = MixtralForCausalLM(
            MixtralConfig(
                vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48,
                num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=TOKENS,
            )
        )  # fmt: skip
        self.network.train()

    def batch(self, index: int, generator: torch.Generator) -> Tensor:
        return text(generator)

    def loss(self, batch: Tensor) -> Tensor:
        return cross_entropy(self.network(input_ids=batch).logits[:, :-1], batch[:, 1:])


class VAE(Learner):
    """Encodes points near a curve as a mean and a standard deviation."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 16))
        self.register_buffer("mixing", torch.randn(2, 16))

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        latent = torch.randn(64, 2, generator=generator)
        return [latent, torch.randn(64, 4, generator=generator)]

    def loss(self, batch: list[Tensor]) -> Tensor:
        latent, noise = (x.to(self.mixing.dtype) for x in batch)
        x = (latent @ self.mixing).sin()
        mean, log_variance = self.encoder(x).float().chunk(2, dim=1)
        code = mean + noise.float() * (0.5 * log_variance).exp()
        error = F.mse_loss(self.decoder(code.to(x.dtype)).float(), x.float())
        surplus = mean.square() + log_variance.exp() - 1 - log_variance
        return error + 0.01 * surplus.mean()


class Denoiser(Learner):
    """Predicts the noise of points on a circle at a random noise level, like a diffusion model."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.network = nn.Sequential(
            nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)
        )

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        angle = 6.2832 * torch.rand(64, generator=generator)
        level = torch.rand(64, 1, generator=generator)
        noise = torch.randn(64, 2, generator=generator)
        return [torch.stack([angle.sin(), angle.cos()], dim=1), level, noise]

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, level, noise = batch
        mixed = (1 - level).sqrt() * x + level.sqrt() * noise
        return F.mse_loss(self.network(torch.cat([mixed, level], dim=1)).float(), noise.float())


class Student(Learner):
    """Predicts the output of an EMA teacher through one more layer."""

    towers = ("network",)

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.network = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 16)
        )
        self.predictor = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.teacher = copy.deepcopy(self.network).requires_grad_(False)
        self.register_buffer("mixing", torch.randn(2, 4, 16))

    def batch(self, index: int, generator: torch.Generator) -> Tensor:
        latent = torch.randn(64, 4, generator=generator)
        return latent + 0.3 * torch.randn(2, 64, 4, generator=generator)

    def loss(self, batch: Tensor) -> Tensor:
        first, second = torch.einsum("vbd,vdk->vbk", batch.to(self.mixing.dtype), self.mixing)
        with torch.no_grad():
            target = F.normalize(self.teacher(second).float(), dim=1)
        guess = F.normalize(self.predictor(self.network(first)).float(), dim=1)
        return (guess - target).square().sum(dim=1).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        plugin = self.trainer.precision_plugin
        # Otherwise half precision would round the average.
        in_fp32 = plugin.exposed(self) if isinstance(plugin, PureFP16) else nullcontext()
        with torch.no_grad(), in_fp32:
            pairs = zip(self.teacher.parameters(), self.network.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast.to(slow.dtype), 0.02)


GENERATIVE_MODELS: dict[str, Any] = {
    "Whisper": Whisper, "Mixtral": Mixtral, "VAE": VAE, "denoiser": Denoiser,
    "EMA teacher": Student,
}  # fmt: skip
