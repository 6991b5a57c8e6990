"""Buffers stay fp32 under PureFP16, and functions accept half weights with fp32 inputs."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_mp.precision.pure_fp16 import PureFP16
from tests.precision.models import Regression, fit, loader, make_trainer, parameters_of

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
halves = pytest.mark.parametrize("half", HALVES)


class Tables(nn.Module):
    """Uses fp32 buffers in sums, products and attention, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("angles", torch.arange(1, 9) / 7)
        self.register_buffer("shift", torch.rand(8), persistent=False)
        self.register_buffer("forwards", torch.zeros(()))
        self.register_buffer("average", torch.zeros(1))
        self.register_buffer("ids", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.forwards += 1
            self.average.lerp_(torch.ones(1, dtype=torch.float32), 1e-3)
        key = self.body(x)
        query = key * self.angles.cos()  # fp32, while keys are half
        x = F.scaled_dot_product_attention(query[None], key[None], key[None])[0] + self.shift
        scores = (key @ query.T).softmax(-1)
        return self.head(self.norm(x) + scores @ key)


@halves
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_fp32_buffers_stay_fp32_and_training_equals_fp32(half: Any, is_checkpointed: bool) -> None:
    class Checkpointed(Tables):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    kind = Checkpointed if is_checkpointed else Tables
    reference, model = Regression(kind), Regression(kind)
    start = parameters_of(model)
    before = {name: b.clone() for name, b in model.network.named_buffers()}
    seen: set[torch.dtype] = set()
    watch = pl.Callback()
    watch.on_train_batch_end = lambda *_: seen.update(b.dtype for b in model.buffers())
    fit(reference, None, loader(8))
    fit(model, PureFP16(half=half), loader(8), callbacks=[watch])
    assert seen == {torch.float32, torch.int64}
    moved = parameters_of(reference) - start
    error = (parameters_of(model) - parameters_of(reference)).norm() / moved.norm()
    assert error < {"fp16": 2**-6, "bf16": 2**-3}[half]
    for name in ("angles", "shift", "ids"):
        assert torch.equal(getattr(model.network, name), before[name])
    for name in ("forwards", "average"):
        assert torch.equal(getattr(model.network, name), getattr(reference.network, name))


def test_buffers_count_beyond_2048_and_follow_slow_averages() -> None:
    model = Regression(Tables)
    model.network.forwards.fill_(2048.0)
    model.network.average.fill_(0.999)
    fit(model, PureFP16(), loader(4))
    assert model.network.forwards == 2052
    assert model.network.average > 0.999  # 1e-6 per step


def test_checkpoints_contain_unchanged_buffers(tmp_path: Path) -> None:
    model = Regression(Tables)
    fit(model, PureFP16(), loader(2)).save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt")["state_dict"]
    assert "network.shift" not in saved
    assert torch.equal(saved["network.angles"], model.network.angles)
    other = Regression(Tables)
    other.network.angles.mul_(1 / 3)
    fit(other, PureFP16(), loader(2), ckpt_path=tmp_path / "run.ckpt", max_epochs=1)
    assert torch.equal(other.network.angles, model.network.angles)


@halves
def test_dtype_of_the_module_is_half_in_training(half: Any) -> None:
    seen: list[Any] = []

    class Inner(pl.LightningModule):
        pass

    class RecordsDtypes(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.extend([self.dtype, self.inner.dtype])
            return super().training_step(batch, batch_idx)

    model = RecordsDtypes()
    model.inner = Inner()
    fit(model, PureFP16(half=half), loader(1))
    assert seen == [HALVES[half]] * 2
    assert model.dtype == model.inner.dtype == torch.float32


# --- functions that take one dtype ---------------------------------------------------------------

TABLE = torch.rand(4, 8, 8, generator=torch.Generator().manual_seed(0))
MIXED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "linear": lambda m, x, wide: m.body(wide),
    "matmul": lambda m, x, wide: x @ wide.mT,
    "bmm": lambda m, x, wide: torch.bmm(wide, x),
    "einsum": lambda m, x, wide: torch.einsum("bij,bkj->bik", x, wide),
    "conv": lambda m, x, wide: m.conv(wide),
    "mha": lambda m, x, wide: m.attention(wide, x, wide)[0],
    "lstm": lambda m, x, wide: m.lstm(wide)[0],
    "layer norm": lambda m, x, wide: m.norm(wide),
    "encoder layer": lambda m, x, wide: m.layer(wide),
    "distance": lambda m, x, wide: torch.cdist(x, wide),
    "class weights": lambda m, x, wide: F.cross_entropy(
        x.flatten(1), torch.zeros(len(x), dtype=torch.long), wide[0].detach().flatten()
    )[None],
    "grid sample": lambda m, x, wide: F.grid_sample(
        x[None], wide[None, ..., :2], align_corners=False
    ),
}


class Parts(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = MIXED[name]
        self.body, self.norm, self.conv = nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv1d(8, 8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.register_buffer("table", TABLE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)[:4, None].expand(4, 8, 8)
        wide = x + self.table
        self.dtypes = x.dtype, wide.dtype
        return self.function(self, x, wide).float().mean()


@pytest.mark.parametrize("name", MIXED)
def test_functions_accept_half_weights_with_fp32_inputs(name: str) -> None:
    class Watched(Regression):
        def loss(self, batch: list[Tensor]) -> Tensor:
            return self.network(batch[0])

    reference, model = Watched(lambda: Parts(name)), Watched(lambda: Parts(name))
    fit(reference, None, loader(2))
    fit(model, PureFP16(), loader(2))
    assert model.network.dtypes == (torch.float16, torch.float32)
    assert model.losses == pytest.approx(reference.losses, rel=2**-7, abs=2**-9)
    # Evaluation may use other kernels, such as the fast path of nn.TransformerEncoderLayer.
    values = [
        make_trainer(plugin).validate(each, loader(1), verbose=False)[0]["val_loss"]
        for plugin, each in ((None, reference), (PureFP16(), model))
    ]
    assert values[1] == pytest.approx(values[0], rel=2**-7, abs=2**-9)


@pytest.mark.parametrize("wrap", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_parametrized_weights_train(wrap: Any) -> None:
    ends = []
    for plugin in (None, PureFP16()):
        model = Regression(lambda: nn.Sequential(wrap(nn.Linear(8, 8)), nn.Linear(8, 1)))
        fit(model, plugin, loader(8))
        ends.append(model.losses)
    assert ends[1] == pytest.approx(ends[0], rel=2**-7)


# --- models of transformers ----------------------------------------------------------------------

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
TOKENS = torch.arange(24).view(4, 6) % 19 + 3


def make_network(name: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    text = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 2}
    if name == "Llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **heads, **text))
    if name == "GPT-2":
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **text))
    if name == "T5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        config = transformers.T5Config(**sizes, **text, decoder_start_token_id=0, dropout_rate=0.0)
        return transformers.T5ForConditionalGeneration(config)
    if name == "BERT":
        return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **heads, **text))
    sizes = {"image_size": 8, "patch_size": 4, "num_labels": 3}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, **heads, **sizes))


class Foreign(pl.LightningModule):
    """A model of transformers without dropout."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.network = make_network(name).eval()
        self.losses: list[float] = []
        self.buffers_in_training: dict[str, torch.dtype] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.network.eval()
        self.buffers_in_training = {n: b.dtype for n, b in self.network.named_buffers()}
        loss = self.network(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5", "BERT", "ViT"])
def test_transformers_models_train_as_in_fp32(name: str) -> None:
    if name == "ViT":
        pixels = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        batch = {"pixel_values": pixels, "labels": torch.arange(4) % 3}
    else:
        mask = torch.ones_like(TOKENS)
        mask[:, -2:] = 0
        batch = {"input_ids": TOKENS, "attention_mask": mask, "labels": TOKENS}
    data = DataLoader([batch] * 6, batch_size=None)
    reference, model = Foreign(name), Foreign(name)
    before = copy.deepcopy(dict(model.network.named_buffers()))
    fit(reference, None, data)
    fit(model, PureFP16(), data)
    assert reference.losses[-1] < 0.99 * reference.losses[0]
    assert model.losses == pytest.approx(reference.losses, rel=2**-9)
    for buffer, value in before.items():
        assert model.buffers_in_training[buffer] == value.dtype
        assert torch.equal(model.network.get_buffer(buffer), value)


def test_rotary_embeddings_of_llama_are_correct_at_every_position() -> None:
    network = make_network("Llama")
    positions = torch.arange(8192)[None]
    expected = network.model.rotary_emb(torch.zeros(1, dtype=torch.float64), positions)
    got: list[Tensor] = []

    class RecordsRotaryEmbedding(Foreign):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            got.extend(self.network.model.rotary_emb(torch.zeros(1), positions))
            return super().training_step(batch, batch_idx)

    batch = {"input_ids": TOKENS, "labels": TOKENS}
    fit(RecordsRotaryEmbedding("Llama"), PureFP16(), DataLoader([batch], batch_size=None))
    for mine, right in zip(got, expected, strict=True):
        assert mine.dtype == torch.float16
        assert (mine - right).abs().max() <= 2.0**-12  # half a ULP below 1
