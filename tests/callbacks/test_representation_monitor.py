"""`RepresentationMonitor` equals a float64 reference and reports collapse."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mp import BalancedAMP, InfCLStrategy, PureFP16
from lightning_mp.callbacks import RepresentationMonitor
from lightning_mp.callbacks._rules.representation import RepresentationRule
from lightning_mp.contrastive import ContrastiveLoss, MatryoshkaLoss, SigmoidContrastiveLoss
from tests.callbacks.models import Watched, watch
from tests.precision.models import make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.InstabilityWarning")


class Clip(pl.LightningModule):
    """Two linear towers; stores the features of the last step."""

    def __init__(self, loss: nn.Module, count: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(8, 24), nn.Linear(8, 24)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.loss, self.count = loss, count
        self.features: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self.scales: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        image = F.normalize(self.image(batch), dim=1)
        text = F.normalize(self.text(batch + 0.1), dim=1)
        self.features = image.detach().double(), text.detach().double()
        self.scales.append(float(self.scale.detach().exp()))
        more = (0.0,) if isinstance(self.loss, SigmoidContrastiveLoss) else ()
        return self.loss(image, text, self.scale.exp(), *more)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(3 * self.count, 8), batch_size=self.count)


@pytest.mark.parametrize("count", [1, 5, 48, 300])
@pytest.mark.parametrize(
    "loss",
    [ContrastiveLoss(), SigmoidContrastiveLoss(), MatryoshkaLoss(widths=[24, 8])],
    ids=["softmax", "sigmoid", "matryoshka"],
)
def test_measurements_equal_a_float64_reference(loss: nn.Module, count: int) -> None:
    monitor, model = RepresentationMonitor(every_n_steps=1), Clip(loss, count)
    make_trainer(callbacks=monitor).fit(model)
    image, text = model.features
    spreads, ranks = [], []
    for x in (image, text):
        spreads.append((1 - x.mean(dim=0).square().sum()).clamp(min=0).sqrt())
        some = x[:: -(-len(x) // 256)]
        values = torch.linalg.svdvals(some - some.mean(dim=0)).square()
        ranks.append(values.sum() ** 2 / values.square().sum().clamp(min=1e-30))
    logits = image @ text.T
    others = logits[~torch.eye(count, dtype=torch.bool)]
    expected = {
        "positive_similarity": float(logits.diag().mean()),
        "negative_similarity": float(others.mean()) if count > 1 else 0.0,
        "logit_scale": model.scales[-1],
    }
    if count > 1:
        expected |= {"feature_spread": float(min(spreads)), "feature_rank": float(min(ranks))}
    curves = {name: points[-1][1] for name, points in monitor.history.curves.items()}
    assert {name: curves[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_hooks_are_removed_after_each_step_and_validation_is_not_measured() -> None:
    monitor, model = RepresentationMonitor(every_n_steps=1), Clip(ContrastiveLoss())
    make_trainer(callbacks=monitor).fit(model)
    assert not model.loss._forward_pre_hooks
    assert monitor._rows == {}


# `PureFP16` changes the default dtype of torch during a step.
@pytest.mark.parametrize("plugin", [BalancedAMP, PureFP16])
@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_half_precision_features_are_measured_in_fp32(plugin: Any, half: str) -> None:
    monitor, model = RepresentationMonitor(every_n_steps=1), Clip(ContrastiveLoss())
    make_trainer(plugin(half=half), callbacks=monitor).fit(model)
    (spread,) = {len(points) for n, points in monitor.history.curves.items() if "spread" in n}
    assert spread == 3
    image, text = (F.normalize(x, dim=1) for x in model.features)
    others = float((image @ text.T)[~torch.eye(len(image), dtype=torch.bool)].mean())
    assert monitor.history.curves["negative_similarity"][-1][1] == pytest.approx(others, abs=1e-6)


def test_towers_in_micro_batches_are_measured_as_one_batch() -> None:
    monitor, model = RepresentationMonitor(every_n_steps=1), Clip(ContrastiveLoss())
    strategy = InfCLStrategy(towers=["image", "text"], micro_batch_size=8)
    make_trainer(strategy=strategy, callbacks=monitor).fit(model)
    assert monitor.samples == 3
    image, text = model.features
    positive = float((image * text).sum(dim=1).mean())
    curve = monitor.history.curves["positive_similarity"]
    assert curve[-1][1] == pytest.approx(positive, abs=1e-5)


class Collapsing(Clip):
    """Has a new batch each step; from step `collapse` on, images have nearly equal features."""

    def __init__(self, collapse: int, steps: int) -> None:
        super().__init__(ContrastiveLoss(), count=16)
        self.collapse, self.steps = collapse, steps

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        image = self.image(batch)
        if batch_idx >= self.collapse:
            image = 0.007 * image + torch.ones_like(image)
        return self.loss(F.normalize(image, dim=1), F.normalize(self.text(batch), dim=1), 10.0)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(self.steps * self.count, 8), batch_size=self.count)


@pytest.mark.parametrize("collapse", [121, 140, 159])
def test_late_collapse_is_named_within_fifty_steps_of_the_default(collapse: int) -> None:
    monitor = RepresentationMonitor()
    make_trainer(callbacks=monitor).fit(Collapsing(collapse, steps=220))
    (alarm,) = monitor.alarms
    assert (alarm.kind, alarm.tensor) == ("feature_collapse", "loss.image_features")
    assert collapse < alarm.step <= collapse + 50


def test_model_without_a_known_loss_raises_a_warning() -> None:
    monitor = RepresentationMonitor()
    with pytest.warns(UserWarning, match="modules="):
        make_trainer(callbacks=monitor).fit(Clip(_Plain()))


class _Plain(nn.Module):
    def forward(self, image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        return F.mse_loss(image, text) * scale


def test_named_towers_are_measured_by_their_outputs() -> None:
    monitor = RepresentationMonitor(modules=["image", "text"], every_n_steps=1)
    make_trainer(callbacks=monitor).fit(Clip(_Plain()))
    assert monitor.history.maps["feature_spread"]["names"] == ["image", "text"]


# --- the rule ------------------------------------------------------------------------------------


def feed(spreads: list[float], ranks: list[float] | None = None) -> list[tuple[int, str]]:
    rule = RepresentationRule(0.1)
    ranks = ranks or [20.0] * len(spreads)
    return [
        (at, verdict.kind)
        for at, pair in enumerate(zip(spreads, ranks, strict=True))
        for verdict in rule.features("tower", *pair)
    ]


def test_tower_inside_vmap_is_not_measured() -> None:
    class Ensemble(Clip):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return torch.vmap(self.image)(batch.view(2, -1, 8)).square().mean()

    monitor = RepresentationMonitor(modules=["image"], every_n_steps=1)
    with pytest.warns(UserWarning, match="`RepresentationMonitor` measured no module"):
        make_trainer(callbacks=monitor).fit(Ensemble(ContrastiveLoss()))
    assert not monitor.history.curves


def test_collapse_needs_two_samples() -> None:
    assert feed([0.9, 0.8, 0.05, 0.7, 0.05, 0.04]) == [(5, "feature_collapse")]


def test_narrow_cone_at_the_start_is_no_collapse() -> None:
    assert feed([0.08, 0.08, 0.09, 0.2, 0.5, 0.9]) == []
    assert feed([0.08] * 21)[0] == (19, "feature_collapse")


def test_falling_rank_raises_an_alarm() -> None:
    assert feed([0.9] * 5, [20.0, 19.0, 10.0, 2.0, 1.5]) == [(4, "feature_rank")]
    assert feed([0.9] * 5, [4.0, 4.0, 3.0, 0.4, 0.4]) == []  # the rank was always small


@pytest.mark.parametrize(
    ("spreads", "ranks", "wants"),
    [
        ([0.9, 0.05], [20.0, 20.0], True),
        ([0.9, 0.2], [20.0, 20.0], False),  # lower, but above the limit
        ([0.9, 0.05, 0.9], [20.0, 20.0, 20.0], True),
        ([0.05, 0.05], [20.0, 20.0], False),  # never above the limit
        ([0.9, 0.9], [20.0, 2.0], True),
        ([0.9, 0.9], [20.0, 3.0], False),
        ([0.9, 0.9], [4.0, 0.4], False),  # the rank was always small
    ],
)
def test_first_low_sample_asks_for_a_second_one_soon(
    spreads: list[float], ranks: list[float], wants: bool
) -> None:
    rule = RepresentationRule(0.1)
    for spread, rank in zip(spreads, ranks, strict=True):
        assert [*rule.features("tower", spread, rank)] == []
    assert rule.wants_more == wants


def sketches(moves: dict[str, float], samples: int = 12) -> set[str]:
    """Return the towers with an alarm, given the shift of each tower in standard errors."""
    rule, rng = RepresentationRule(0.1), torch.Generator().manual_seed(0)
    said = set()
    for step in range(samples):
        means = {n: step * move + torch.randn(32, generator=rng) for n, move in moves.items()}
        found = rule.unchanged({n: [(m, 1.0) for m in x.tolist()] for n, x in means.items()})
        said |= {verdict.tensor for verdict in found}
    return said


def test_unchanged_tower_is_named_if_another_tower_changes() -> None:
    assert sketches({"image": 3.0, "text": 0.0}) == {"text"}
    assert sketches({"image": 3.0, "text": 1.0}) == set()
    assert sketches({"image": 0.0, "text": 0.0}) == set()  # for example during warm-up
    assert sketches({"image": 3.0, "text": 0.0}, samples=8) == set()  # seven after the first
    assert sketches({"image": 3.0, "text": 0.0}, samples=9) == {"text"}


class Locked(Clip):
    """Trains only its image tower.

    Args:
        is_frozen: Whether the text tower is frozen on purpose, as in LiT; else it is detached.
        is_looked_at: Whether the loss is one that the monitor knows.
    """

    def __init__(self, is_frozen: bool, is_looked_at: bool) -> None:
        super().__init__(ContrastiveLoss(), count=64)
        self.is_looked_at = is_looked_at
        self.text.requires_grad_(not is_frozen)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        image, text = self.image(batch), self.text(batch).detach()
        image, text = F.normalize(image, dim=1), F.normalize(text, dim=1)
        loss = self.loss if self.is_looked_at else self.loss.forward
        return loss(image, text, 10.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.image.parameters(), *self.text.parameters()], lr=0.1)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(64 * 30, 8), batch_size=64)


@pytest.mark.parametrize("modules", [None, ["image", "text"]], ids=["loss", "towers"])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["detached", "frozen"])
def test_unchanged_tower_is_named_unless_it_is_frozen(
    is_frozen: bool, modules: list[str] | None
) -> None:
    monitor = RepresentationMonitor(modules=modules, every_n_steps=1)
    make_trainer(callbacks=monitor).fit(Locked(is_frozen, modules is None))
    named = [alarm.tensor for alarm in monitor.alarms if alarm.kind == "tower_unchanged"]
    tower = "text" if modules else "loss.text_features"
    assert named == ([] if is_frozen else [tower])


def test_scale_at_its_limit_is_a_note() -> None:
    rule = RepresentationRule(0.1)
    said = [v for value in (14.0, 50.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0)
            for v in rule.scale("loss", value)]  # fmt: skip
    assert [(v.kind, v.severity, v.value) for v in said] == [("temperature_clamped", "info", 100.0)]
    assert [v for _ in range(9) for v in rule.scale("other", 20.0)] == []
    assert [v for step in range(9) for v in rule.scale("moves", 20.0 + step)] == []


def test_tokens_of_a_single_sample_are_measured() -> None:
    def tokens() -> nn.Module:
        return nn.Sequential(nn.Unflatten(0, (1, 32)), nn.Linear(16, 8), nn.Linear(8, 1))

    monitor = RepresentationMonitor(modules=["network.1"], every_n_steps=1)
    watch(Watched(tokens, steps=5), [monitor])
    assert len(monitor.history.curves["feature_spread"]) == 5
