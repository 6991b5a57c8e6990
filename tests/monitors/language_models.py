"""Healthy language models: GPT-2, BERT, T5, an LSTM, a mixture of experts with rare ones.

Legend: B batch, T tokens, C width, V vocabulary.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.monitors.running import Learner

VOCABULARY, TOKENS, BATCH, WIDTH = 26, 16, 8, 32
MASK, NOISE = 1, 0.1
FIRST_WORD = 2  # 0 pads, 1 masks


def text(generator: torch.Generator, tokens: int = TOKENS) -> Tensor:
    """Return sequences in which a word determines the next one, except for 10% noise.

    Args:
        generator: Generator of the random numbers.
        tokens: Number of tokens, T.

    Returns:
        Tokens of shape [B, T].
    """
    words = VOCABULARY - FIRST_WORD
    word_B = torch.randint(words, (BATCH,), generator=generator)
    column = [word_B]
    for _ in range(tokens - 1):
        word_B = (5 * word_B + 7) % words
        other_B = torch.randint(words, (BATCH,), generator=generator)
        is_noise_B = torch.rand(BATCH, generator=generator) < NOISE
        word_B = torch.where(is_noise_B, other_B, word_B)
        column.append(word_B)
    return torch.stack(column, dim=1) + FIRST_WORD


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


class GPT2(Learner):
    """Predicts the next word."""

    def __init__(self, steps: int, lr: float = 3e-3) -> None:
        super().__init__(steps, lr, decays=True)
        from transformers import GPT2Config, GPT2LMHeadModel

        self.network = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=2, n_head=2,
                bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
        self.network.train()

    def batch(self, index: int, generator: torch.Generator) -> Tensor:
        return text(generator)

    def loss(self, batch: Tensor) -> Tensor:
        return cross_entropy(self.network(input_ids=batch).logits[:, :-1], batch[:, 1:])


class BERT(Learner):
    """Predicts the 20% of words that are masked."""

    def __init__(self, steps: int) -> None:
        # At 5e-3 the run would be unstable: a change of weights by 1e-6 would decide its end.
        super().__init__(steps, decays=True)
        from transformers import BertConfig, BertForMaskedLM

        self.network = BertForMaskedLM(
            BertConfig(
                vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2,
                num_attention_heads=2, intermediate_size=64, max_position_embeddings=TOKENS,
            )
        )  # fmt: skip
        self.network.train()

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        words = text(generator)
        is_masked = torch.rand(words.shape, generator=generator) < 0.2
        is_masked[:, 1] = True  # at least one masked word
        return [words.masked_fill(is_masked, MASK), words.masked_fill(~is_masked, -100)]

    def loss(self, batch: list[Tensor]) -> Tensor:
        return cross_entropy(self.network(input_ids=batch[0]).logits, batch[1])


class T5(Learner):
    """Writes six words in reverse order."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, decays=True)
        from transformers import T5Config, T5ForConditionalGeneration

        self.network = T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=1, num_heads=4,
                decoder_start_token_id=0, feed_forward_proj="gated-gelu",
            )
        )  # fmt: skip
        self.network.train()

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        words = text(generator, 6)
        return [words, words.flip(1)]

    def loss(self, batch: list[Tensor]) -> Tensor:
        return cross_entropy(self.network(input_ids=batch[0], labels=batch[1]).logits, batch[1])


class LSTM(Learner):
    """Predicts the next word from the previous words, without attention."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def batch(self, index: int, generator: torch.Generator) -> Tensor:
        return text(generator)

    def loss(self, batch: Tensor) -> Tensor:
        # oneDNN has no fp16 LSTM on most CPUs, and torch then raises an error. Disabling oneDNN
        # warns about TF32 even without a GPU.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.backends.mkldnn.flags(enabled=False):
                states_BTC, _ = self.lstm(self.embed(batch[:, :-1]))
        return cross_entropy(self.head(states_BTC), batch[:, 1:])


class Experts(nn.Module):
    """A layer with one expert per word; an expert without words in the batch gets zeros.

    The words of the last experts are rare: one in 300 batches has a word of the last expert.
    """

    SHARES = (0.5, 0.3, 0.12, 0.06, 0.015, 0.004, 0.0008, 2.6e-5)

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
            for _ in self.SHARES
        )

    def forward(self, x_NC: Tensor, expert_N: Tensor) -> Tensor:
        out_NC = torch.zeros_like(x_NC)
        for index, expert in enumerate(self.experts):
            rows = (expert_N == index).nonzero().flatten()
            out_NC = out_NC.index_add(0, rows, expert(x_NC[rows]).to(out_NC.dtype))
        return x_NC + out_NC


class MoE(Learner):
    """Predicts the output of each word's expert; words are as rare as their experts."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.embed = nn.Embedding(8 * len(Experts.SHARES), WIDTH)
        self.norm, self.layer = nn.LayerNorm(WIDTH), Experts()
        self.head = nn.Linear(WIDTH, 8)

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        shares = torch.tensor(Experts.SHARES)
        expert = torch.multinomial(shares, BATCH * TOKENS, replacement=True, generator=generator)
        word = torch.randint(8, expert.shape, generator=generator)
        other = torch.randint(8, expert.shape, generator=generator)
        is_noise = torch.rand(expert.shape, generator=generator) < NOISE
        return [expert, word, torch.where(is_noise, other, (3 * word + expert) % 8)]

    def loss(self, batch: list[Tensor]) -> Tensor:
        expert, word, target = batch
        logits = self.head(self.layer(self.norm(self.embed(8 * expert + word)), expert))
        return F.cross_entropy(logits.float(), target)


LANGUAGE_MODELS: dict[str, Any] = {
    "GPT-2": GPT2, "BERT": BERT, "T5": T5, "LSTM": LSTM, "MoE": MoE,
}  # fmt: skip
