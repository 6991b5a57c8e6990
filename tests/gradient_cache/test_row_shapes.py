"""Outputs whose row shape depends on the number of rows raise in the first call of a tower."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mp import GradientCache

BATCH, WIDTH = 12, 6


class Scores(nn.Module):
    """Returns features and, like `CLIPModel`, pairwise scores of the micro-batch."""

    def __init__(self, score: Any) -> None:
        super().__init__()
        self.linear, self.score = nn.Linear(WIDTH, WIDTH), score
        self.register_buffer("queue", torch.ones(5, WIDTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.linear(x)
        return {"features": x, "logits": self.score(x, self.queue)}


SCORES = {
    "all pairs": lambda x, queue: x @ x.T,
    "images only, several texts": lambda x, queue: x @ torch.cat([x, x]).T,
    "and a queue": lambda x, queue: x @ torch.cat([x, queue]).T,
    "pairs": lambda x, queue: (x[:, None] - x).reshape(len(x), -1, 2),
    "three dimensions": lambda x, queue: (x @ x.T)[:, None],
}


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_pairwise_scores_raise(score: Any, rows: int) -> None:
    tower, x = Scores(score), torch.randn(BATCH, WIDTH)
    message = r"`logits` of shape \[2, .* for 2 rows and of \[3, .*roles=\{'logits': 'left out'\}"
    with pytest.raises(ValueError, match=message):
        GradientCache(micro_batch_size=rows).call(tower, x)
    cache = GradientCache(micro_batch_size=rows, roles={"logits": "left out"})
    assert torch.allclose(cache.call(tower, x)["features"], tower.linear(x), atol=1e-6)


@pytest.mark.parametrize("rows", [5, 12, 100])
def test_micro_batches_of_different_sizes_need_no_shape_check(rows: int) -> None:
    tower, x = Scores(SCORES["all pairs"]), torch.randn(BATCH, WIDTH)
    cache = GradientCache(micro_batch_size=rows)
    if rows >= BATCH:  # the scores of a single micro-batch are those of the batch
        assert cache.call(tower, x)["logits"].shape == (BATCH, BATCH)
        x = torch.cat([x] * 20)
        x = x[: len(x) // rows * rows]
    with pytest.raises(ValueError, match=r"`logits` of shape"):
        cache.call(tower, x)


class Noisy(nn.Module):
    """Uses all state that a shape check could change: generators, statistics, writes, counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.generator = torch.Generator().manual_seed(3)
        self.rows: list[int] = []

    def forward(self, x: Tensor, names: list[str]) -> Tensor:
        self.rows.append(len(x))
        assert len(names) == len(x)
        noise = torch.rand(x.shape, generator=self.generator)
        return F.dropout(self.norm(self.linear(x.mul_(2))) + noise, 0.4)


def test_shape_check_changes_no_generator_buffer_or_batch() -> None:
    results = []
    for is_known in (False, True):
        tower, cache = Noisy(), GradientCache(micro_batch_size=4)
        names = [str(n) for n in range(BATCH)]
        if is_known:  # an earlier call has checked the shapes
            before = copy.deepcopy(tower.state_dict())
            cache.call(tower, torch.randn(BATCH, WIDTH), names)
            tower.load_state_dict(before)
            tower.generator.manual_seed(3)
            tower.rows.clear()
        torch.manual_seed(1)
        x = torch.randn(BATCH, WIDTH)
        features = cache.call(tower, x, names)
        features.square().sum().backward()
        gradients = [p.grad for p in tower.parameters()]
        buffers = [b.clone() for b in tower.buffers()]
        drawn = [torch.rand(3), torch.rand(3, generator=tower.generator)]
        results.append([features.detach(), x, *gradients, *buffers, *drawn])
        assert tower.rows == ([4] * 6 if is_known else [2, 3] + [4] * 6)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_shape_check_repeats_rows_of_numpy_arrays_and_does_not_change_them() -> None:
    def scale(x: np.ndarray) -> Tensor:
        x *= 2
        return torch.from_numpy(x).clone()

    x = np.random.default_rng(0).random((BATCH, WIDTH))
    expected = torch.from_numpy(2 * x)
    assert torch.equal(GradientCache(micro_batch_size=4).call(scale, x), expected)
    assert np.array_equal(x, expected)


def test_shape_check_does_not_recompile_a_compiled_tower() -> None:
    sizes: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        sizes.extend(len(x) for x in inputs if x.shape[1:] == (WIDTH,) and len(x) != WIDTH)
        return graph

    tower = Plain()
    tower.compile(backend=backend, dynamic=False)
    cache = GradientCache(micro_batch_size=4)
    cache.call(tower, torch.randn(BATCH, WIDTH)).sum().backward()
    torch.compiler.reset()
    assert set(sizes) == {4}


class Forces(nn.Module):
    """Differentiates an energy with respect to positions, as encoders of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad(self.linear(x).pow(3).sum(), x, create_graph=True)
        return forces


def test_shape_check_of_a_tower_that_differentiates() -> None:
    tower, x = Forces(), torch.randn(BATCH, WIDTH)
    GradientCache(micro_batch_size=4).call(tower, x).square().sum().backward()
    (expected,) = torch.autograd.grad(tower(x).square().sum(), tower.linear.weight)
    torch.testing.assert_close(tower.linear.weight.grad, expected)


class Rotary(nn.Module):
    """Caches factors, and the length that they are for in an attribute, as older Llamas do."""

    def __init__(self, grows: bool) -> None:
        super().__init__()
        self.linear, self.length, self.grows = nn.Linear(WIDTH, WIDTH), 2, grows
        self.register_buffer("cosines", self.cosines_of(2), persistent=False)

    def cosines_of(self, length: int) -> Tensor:
        # NTK scaling makes all frequencies depend on the length.
        return torch.cos(torch.arange(length if self.grows else 9)[:, None] * WIDTH / length)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.cosines = self.cosines_of(self.length)
        return (self.linear(x) * self.cosines[: x.shape[1]]).mean(1)


@pytest.mark.parametrize("grows", [True, False])
def test_shape_check_keeps_caches_that_a_forward_replaces(grows: bool) -> None:
    tower, x = Rotary(grows), torch.randn(BATCH, 5, WIDTH)
    plain = copy.deepcopy(tower)
    plain(x).square().sum().backward()
    GradientCache(micro_batch_size=4).call(tower, x).square().sum().backward()
    torch.testing.assert_close(tower.linear.weight.grad, plain.linear.weight.grad)


class Counts(Plain):
    def forward(self, x: Tensor, names: list[str]) -> dict[str, Any]:  # type: ignore[override]
        return {"features": self.linear(x), "rows": len(x), "names": names, "kind": "image"}


def test_number_of_rows_as_an_output_raises() -> None:
    arguments = Counts(), torch.randn(BATCH, WIDTH), ["name"] * BATCH
    with pytest.raises(ValueError, match="`rows` of type int, which differs between micro-batches"):
        GradientCache(micro_batch_size=4).call(*arguments)
    out = GradientCache(micro_batch_size=4, roles={"rows": "left out"}).call(*arguments)
    assert (out["rows"], out["names"], out["kind"]) == (None, ["name"] * BATCH, "image")


class Flattens(Plain):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.linear(x)
        return {"features": x.mean(1), "router_logits": x.flatten(0, 1)}


def test_flattened_tokens_of_changing_length_are_concatenated() -> None:
    tower, cache = Flattens(), GradientCache(micro_batch_size=4)
    for length in (5, 7):
        x = torch.randn(BATCH, length, WIDTH)
        logits = cache.call(tower, x)["router_logits"]
        torch.testing.assert_close(logits, tower(x)["router_logits"])


class Spectra(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.linear(x))


class SkipsEmpty(Plain):
    """Trains nothing in a micro-batch without any image, as towers of one modality do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.any() else torch.zeros(len(x), WIDTH)


@pytest.mark.parametrize("tower", [Spectra(), SkipsEmpty()])
def test_complex_features_and_skipped_micro_batches_have_exact_gradients(tower: Plain) -> None:
    x = torch.randn(BATCH, WIDTH)
    tower.linear.bias.requires_grad_(False).zero_()
    for first in (0, 8):
        x[first : first + 4] = 0
        (expected,) = torch.autograd.grad(tower(x).abs().exp().sum(), tower.linear.weight)
        loss = GradientCache(micro_batch_size=4).call(tower, x).abs().exp().sum()
        (found,) = torch.autograd.grad(loss, tower.linear.weight)
        torch.testing.assert_close(found, expected)


def test_left_out_key_value_cache_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model, ids = transformers.LlamaModel(config), torch.randint(0, 9, (BATCH, 5))
    (name,) = set(model(ids, use_cache=True)) - {"last_hidden_state"}  # as the version calls it
    cache = GradientCache(micro_batch_size=4, roles={name: "left out"})
    out = cache.call(model, ids, use_cache=True)
    assert getattr(out, name) is None
    torch.testing.assert_close(out.last_hidden_state, model(ids).last_hidden_state)


def test_whole_clip_model_of_transformers_as_one_tower_raises() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**small, "num_hidden_layers": 1, "vocab_size": 50, "eos_token_id": 49},
        vision_config={**small, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8},
        projection_dim=24,
    )
    model = transformers.CLIPModel(config)
    batch = {
        "input_ids": torch.randint(0, 49, (BATCH, 7)),
        "pixel_values": torch.randn(BATCH, 3, 16, 16),
    }
    with pytest.raises(ValueError, match=r"`logits_per_(image|text)` of shape \[2, 2\]"):
        GradientCache(micro_batch_size=6).call(model, **batch)
    scores = ["logits_per_image", "logits_per_text"]
    out = GradientCache(micro_batch_size=6, roles=dict.fromkeys(scores, "left out")).call(
        model, **batch
    )
    assert out.logits_per_image is None
    assert torch.allclose(out.image_embeds, model(**batch).image_embeds, atol=1e-6)


def test_replay_with_another_number_of_rows_is_refused_in_words() -> None:
    class Grows(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            y = super().forward(x)
            return torch.cat([y, y[:1]]) if self.calls > 4 else y  # after the check and two runs

    out = GradientCache(micro_batch_size=4).call(Grows(4, 3), torch.randn(8, 4))
    with pytest.raises(ValueError, match=r"of shape \[5, 3\] .* 4 rows were expected"):
        out.sum().backward()
