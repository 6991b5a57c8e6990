"""CLIP, SigLIP and ViT + BERT of transformers train like without the cache."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp import ContrastiveLoss, InfCLStrategy
from tests.averages import weight_averaging
from tests.processes import run_ranks
from tests.quiet import parameters_of
from tests.reference.contrastive import relative_error
from tests.strategies.models import make_trainer

transformers = pytest.importorskip("transformers")

ROWS, STEPS, PIXELS, TOKENS = 8, 4, 16, 7
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
LAYERS = {"num_hidden_layers": 2}
VISION = {**SMALL, **LAYERS, "image_size": PIXELS, "patch_size": 8}


def _clip() -> nn.Module:
    text = {**SMALL, **LAYERS, "vocab_size": 50, "max_position_embeddings": TOKENS}
    config = transformers.CLIPConfig(
        text_config={**text, "eos_token_id": 49}, vision_config=VISION, projection_dim=24
    )
    return transformers.CLIPModel(config)


def _siglip() -> nn.Module:
    text = {**SMALL, **LAYERS, "vocab_size": 50, "max_position_embeddings": TOKENS}
    return transformers.SiglipModel(
        transformers.SiglipConfig(text_config=text, vision_config=VISION)
    )


def _vit_and_bert() -> nn.Module:
    vision = transformers.ViTConfig(**VISION, hidden_dropout_prob=0.0)
    text = transformers.BertConfig(
        **SMALL, **LAYERS, vocab_size=50, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        vision, text, projection_dim=24
    )
    return transformers.VisionTextDualEncoderModel(config)


class _LoRA(nn.Module):
    """`W x + B A x` with W frozen and B zero at the start."""

    def __init__(self, linear: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.down.T @ self.up.T


def _clip_with_lora() -> nn.Module:
    clip = _clip().requires_grad_(False)
    for layer in [*clip.vision_model.encoder.layers, *clip.text_model.encoder.layers]:
        layer.self_attn.q_proj = _LoRA(layer.self_attn.q_proj)
        layer.self_attn.v_proj = _LoRA(layer.self_attn.v_proj)
    return clip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "CLIP": _clip,
    "SigLIP": _siglip,
    "ViT and BERT": _vit_and_bert,
    "CLIP with LoRA": _clip_with_lora,
}


class RealCLIP(pl.LightningModule):
    """Image and text features of a transformers model, and the contrastive loss of them."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = make().train()
        self.log_scale = nn.Parameter(torch.tensor(2.0))
        self.loss = ContrastiveLoss()

    def training_step(self, batch: tuple[Tensor, Any], batch_idx: int) -> Tensor:
        image, text = batch
        features = [
            self.model.get_image_features(pixel_values=image),
            self.model.get_text_features(**text),
        ]
        # transformers 4 returns the features, transformers 5 all outputs of the model.
        tensors = [f if isinstance(f, Tensor) else f.pooler_output for f in features]
        image_features, text_features = (F.normalize(f, dim=-1) for f in tensors)
        return self.loss(image_features, text_features, self.log_scale.exp())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)


class Pairs(torch.utils.data.IterableDataset):
    """Batches of images and of `BatchEncoding`s, as a tokenizer makes them."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype, self.seed = dtype, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(STEPS):
            image = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator).to(self.dtype)
            tokens = torch.randint(0, 49, (ROWS, TOKENS), generator=generator)
            lengths = torch.randint(2, TOKENS + 1, (ROWS, 1), generator=generator)
            mask = (torch.arange(TOKENS) < lengths).long()
            tokens = tokens.scatter(1, lengths - 1, 49)  # the end of the text
            encoding = {"input_ids": tokens, "attention_mask": mask}
            yield image, transformers.BatchEncoding(encoding)


def _train(make: Callable[[], nn.Module], strategy: Any, **kwargs: Any) -> RealCLIP:
    module = RealCLIP(make)
    options = {"precision": "64-true", "max_epochs": 1, **kwargs}
    trainer = make_trainer(strategy, **options)
    pairs = Pairs(torch.float64, seed=5 + trainer.global_rank)
    trainer.fit(module, DataLoader(pairs, batch_size=None))
    return module


def _cached() -> InfCLStrategy:
    towers = ["model.get_image_features", "model.get_text_features"]
    return InfCLStrategy(towers=towers, micro_batch_size=3)


# Unused outputs draw one warning with their names and bytes.
UNUSED = pytest.mark.filterwarnings("ignore:.*last_hidden_state")


def _compare(rank: int, world_size: int, name: str, **kwargs: Any) -> tuple[float, float]:
    start = parameters_of(RealCLIP(MODELS[name]))
    expected = _train(
        MODELS[name], DDPStrategy(find_unused_parameters=True), devices=world_size, **kwargs
    )
    module = _train(MODELS[name], _cached(), devices=world_size, **kwargs)
    moved = relative_error(parameters_of(expected), start)
    return relative_error(parameters_of(module), parameters_of(expected)), moved


def _check(error: float, moved: float) -> None:
    # float64: only the order of sums differs.
    assert error < 1e-11, f"weights differ by {error:.1e}"
    assert moved > 1e-4, "the weights did not move"


@pytest.mark.slow
@UNUSED
@pytest.mark.parametrize("name", MODELS)
def test_inf_cl_real_towers_train_like_without_the_cache(name: str) -> None:
    _check(*_compare(0, 1, name))


@pytest.mark.distributed
@UNUSED
def test_inf_cl_real_towers_train_on_two_ranks_like_without_the_cache() -> None:
    for result in run_ranks(_compare, 2, 2, "CLIP"):
        _check(*result)


AVERAGES: dict[str, Callable[[], pl.Callback]] = {
    "EMA": lambda: weight_averaging().EMAWeightAveraging(decay=0.5),
    "SWA": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
}


@pytest.mark.sweep
@UNUSED
@pytest.mark.parametrize("average", AVERAGES)
def test_inf_cl_averaged_weights_equal_those_without_the_cache(average: str) -> None:
    options = {"max_epochs": 3, "callbacks": [AVERAGES[average]()]}
    expected = _train(_clip, DDPStrategy(find_unused_parameters=True), **options)
    last = _train(_clip, DDPStrategy(find_unused_parameters=True), max_epochs=3)
    module = _train(_clip, _cached(), **{**options, "callbacks": [AVERAGES[average]()]})
    _check(
        relative_error(parameters_of(module), parameters_of(expected)),
        relative_error(parameters_of(last), parameters_of(expected)),  # the average differs
    )


@pytest.mark.slow
@UNUSED
def test_inf_cl_cache_costs_one_forward_of_the_towers() -> None:
    """A backward costs two forwards, so the cache costs 4/3 of the FLOPs."""
    plain, cached = (
        _flops_of_a_run(strategy)
        for strategy in (DDPStrategy(find_unused_parameters=True), _cached())
    )
    module = RealCLIP(_clip).double()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for batch in Pairs(torch.float64, seed=5):
            module.model.get_image_features(pixel_values=batch[0])
            module.model.get_text_features(**batch[1])
    assert cached - plain == counter.get_total_flops()


def _flops_of_a_run(strategy: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        _train(_clip, strategy)
    return counter.get_total_flops()
