"""`AdamStateMonitor`: decayed moments, moments below epsilon, updates too large or too small."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from lightning_mp import BalancedAMP, PureFP16
from lightning_mp.callbacks import AdamStateMonitor
from lightning_mp.callbacks._rules.adam_statistics import AdamField, adam_statistics
from tests.callbacks.models import (
    SparseWatched,
    Watched,
    bag_of_tokens,
    first,
    kinds,
    watch,
)
from tests.monitors.planted import Fit
from tests.monitors.running import train

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.InstabilityWarning")


def steady(parameters: Any, **kwargs: Any) -> Adam:
    return Adam(parameters, **{"lr": 1e-6, **kwargs})


def monitor(**kwargs: Any) -> AdamStateMonitor:
    return AdamStateMonitor(**{"every_n_steps": 5, "baseline_samples": 5, **kwargs})


def hooked(name: str, change: Any) -> Any:
    """Set all gradients to 1, then change the gradient of one parameter in each step."""

    def sabotage(module: Any, step: int) -> None:
        if step == 0:
            module.now = 0
            for path, parameter in module.named_parameters():
                bend = change if path == name else lambda g, _: torch.ones_like(g)
                parameter.register_hook(lambda g, bend=bend: bend(g, module.now))
        module.now = step

    return sabotage


def reference(p: Tensor, g: Tensor, state: dict[str, Tensor], lr: float, eps: float) -> list[float]:
    """Return the columns by the formulas in float64, with Adam's default betas."""
    g, m, v = g.double(), state["exp_avg"].double(), state["exp_avg_sq"].double()
    step = float(state["step"]) + 1
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    m, v = m / (1 - 0.9**step), v / (1 - 0.999**step)
    update = lr * m / (v.sqrt() + eps)
    ratios = g * g / v.clamp(min=eps * eps)
    below = ((v.sqrt() < eps) & (g != 0)).sum()
    numbers = g.numel(), (g != 0).sum(), ratios.sum(), below, (update**2).sum()
    numbers = *numbers, (p.double() ** 2).sum(), (g * g).sum(), (v * (1 - 0.999**step)).sum()
    return [float(x) for x in (*numbers, 0, 0, 0, step)]


def test_statistics_equal_a_float64_reference() -> None:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((7, 5), (3,), ())]
    optimizer = AdamW(parameters, lr=0.003, eps=1e-3)
    for _ in range(4):
        for p in parameters:
            p.grad = torch.randn_like(p) * 10 ** torch.randn_like(p).mul(2)
        optimizer.step()
    gradients = [torch.randn_like(p).relu() * 10 ** torch.randn_like(p).mul(3) for p in parameters]
    sums = adam_statistics(optimizer, parameters, [64 * g for g in gradients], 1 / 64)
    for p, g, row in zip(parameters, gradients, sums, strict=True):
        expected = reference(p.detach(), g, optimizer.state[p], 0.003, 1e-3)
        assert row.tolist() == pytest.approx(expected, rel=1e-4)
    assert sums.dtype == torch.float64
    bad = adam_statistics(optimizer, parameters[:1], [gradients[0] * torch.nan], 1.0)
    assert bad[0].tolist() == [35.0] + [0.0] * 8 + [1.0, 0.0, 5.0]
    optimizer.state[parameters[0]]["exp_avg_sq"][0] = torch.inf
    bad = adam_statistics(optimizer, parameters[:1], gradients[:1], 1.0)
    assert bad[0].tolist() == [35.0] + [0.0] * 8 + [1.0, 1.0, 5.0]
    assert list(AdamField)[-1] == 11


def test_update_of_amsgrad_is_that_of_its_step() -> None:
    parameter = nn.Parameter(torch.randn(50))
    optimizer, row, before = Adam([parameter], lr=0.1, amsgrad=True), Tensor(), parameter
    for size in (10.0, *[0.01] * 200):  # its second moment does not decay
        parameter.grad = torch.randn(50) * size
        (row,) = adam_statistics(optimizer, [parameter], [parameter.grad], 1.0)
        before = parameter.detach().clone()
        optimizer.step()
    update = (parameter.detach() - before).double().square().sum()
    assert row[AdamField.SQUARED_UPDATE].item() == pytest.approx(update.item(), rel=1e-3)


def test_alarm_names_the_epsilon_of_the_group() -> None:
    def two_groups(parameters: Any) -> Adam:
        weight, *others = parameters
        return steady([{"params": [weight]}, {"params": others, "eps": 1e3}])

    watcher = monitor()
    watch(Watched(None, two_groups, steps=10), [watcher])
    alarm = first(watcher, "below_epsilon")
    assert alarm.tensor != "network.0.weight"
    assert "eps=1000," in alarm.message or "eps=1000." in alarm.message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stagnant_weights_are_those_that_a_step_does_not_change(
    dtype: torch.dtype,
) -> None:
    weights = torch.randn(200, 50) * 10 ** torch.randn(200, 50)
    p = nn.Parameter(weights.to(dtype))
    optimizer = AdamW([p], lr=1e-3, weight_decay=0.0, foreach=False)
    # Moments in fp32, as with an optimizer that keeps fp32 states.
    fp32 = {"exp_avg": torch.randn(200, 50), "exp_avg_sq": torch.rand(200, 50) + 0.1}
    optimizer.state[p] = {"step": torch.tensor(500.0), **fp32}
    gradient = torch.randn(200, 50).to(dtype)
    (row,) = adam_statistics(optimizer, [p], [gradient], 1.0)
    m = (0.9 * fp32["exp_avg"].double() + 0.1 * gradient.double()) / (1 - 0.9**501)
    v = (0.999 * fp32["exp_avg_sq"].double() + 0.001 * gradient.double() ** 2) / (1 - 0.999**501)
    stepped = (p.detach().double() - 1e-3 * m / (v.sqrt() + 1e-8)).to(dtype)
    expected = ((stepped == p) & (gradient != 0)).sum().item()
    assert 1000 < expected < 9000
    assert abs(row[AdamField.STAGNANT].item() - expected) <= 20  # ties of rounding in fp32
    kept = adam_statistics(optimizer, [p], [gradient], 1.0, keeps_rounding=True)
    assert kept[0, AdamField.STAGNANT] == 0
    optimizer.param_groups[0]["write_back"] = "kahan"
    assert adam_statistics(optimizer, [p], [gradient], 1.0)[0, AdamField.STAGNANT] == 0


@pytest.mark.parametrize(
    ("plugin", "lr", "warned"),
    [
        (lambda: HalfPrecision("bf16-true"), 1e-5, True),
        (lambda: HalfPrecision("bf16-true"), 3e-2, False),
        (lambda: PureFP16(half="bf16"), 1e-5, False),
        (lambda: BalancedAMP(half="bf16"), 1e-5, False),
    ],
    ids=["bf16-true", "large steps", "PureFP16", "BalancedAMP"],
)
def test_stagnant_weights_raise_an_alarm_if_rounding_removes_updates(
    plugin: Any, lr: float, warned: bool
) -> None:
    alarms = train(Fit(steps=40, lr=lr), plugin()).alarms
    assert ("stagnant_weights" in {alarm.kind for alarm in alarms}) == warned


def test_small_tensors_measured_together_have_the_rows_of_each_alone() -> None:
    sizes = [1, 300, 4096, 4097, 70_000, 17, 4000, 4000, *[3000] * 30]
    half = [torch.float32, torch.bfloat16]
    parameters = [nn.Parameter(torch.randn(n).to(half[i % 5 == 1])) for i, n in enumerate(sizes)]
    groups = [{"params": parameters[:9]}, {"params": parameters[9:], "lr": 1e-5, "eps": 1e-3}]
    optimizer = AdamW(groups, lr=1e-3)
    for step in range(3):
        for index, p in enumerate(parameters):  # step counts differ; one tensor has no state
            p.grad = torch.randn_like(p) if index > 0 and step <= index % 3 else None
        optimizer.step()
    gradients = [torch.randn_like(p) * (torch.rand_like(p) > 0.3) for p in parameters]
    gradients[5] = torch.full_like(gradients[5], torch.nan)
    optimizer.state[parameters[6]]["exp_avg"][0] = torch.inf
    together = adam_statistics(optimizer, parameters, gradients, 0.25)
    pairs = zip(parameters, gradients, strict=True)
    alone = torch.cat([adam_statistics(optimizer, [p], [g], 0.25) for p, g in pairs])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=0)
    counts = [
        field
        for field in AdamField
        if "SQUARED" not in field.name and field != AdamField.SECOND_MOMENT
    ]
    assert together[:, counts].equal(alone[:, counts])
    assert together[:, AdamField.BAD_STATE].nonzero().flatten().tolist() == [6]
    assert together[:, AdamField.NON_FINITE].nonzero().flatten().tolist() == [5, 6]


def test_statistics_of_complex_weights_equal_those_of_real_and_imaginary_parts() -> None:
    weight = torch.randn(6, 5, dtype=torch.complex64)
    both = (weight, torch.view_as_real(weight).clone())
    optimizers = [AdamW([nn.Parameter(w)], lr=0.003) for w in both]
    for _ in range(3):
        gradient = torch.randn_like(weight)
        found = []
        for optimizer, g in zip(optimizers, (gradient, torch.view_as_real(gradient)), strict=True):
            (parameter,) = optimizer.param_groups[0]["params"]
            found.append(adam_statistics(optimizer, [parameter], [g], 1.0))
            parameter.grad = g
            optimizer.step()
    torch.testing.assert_close(*found)
    assert found[0][0, AdamField.NUMEL] == 60


@pytest.mark.slow
def test_long_run_without_gradient_raises_an_alarm_before_the_gradient_returns() -> None:
    change = lambda g, step: torch.full_like(g, float(not 100 <= step < 700))  # noqa: E731
    watcher = AdamStateMonitor()
    model = Watched(None, steady, steps=702, sabotage=hooked("network.2.weight", change))
    watch(model, [watcher])
    runs = [alarm for alarm in watcher.alarms if alarm.kind == "zero_run"]
    assert [(a.step, a.tensor, a.value) for a in runs] == [(600, "network.2.weight", 500)]
    # In 500 steps, v decays to 0.999^501 + 0.001 = 0.607; updates grow by its inverse root.
    assert "1.28 times as large as before; after a longer run, up to 31.6" in runs[0].message
    assert "clip_update_rms" in runs[0].remedy
    column = dict(watcher.history.maps["update_rms"]["columns"])
    row = watcher.history.maps["update_rms"]["names"].index("network.2.weight")
    v = (1 - 0.999**100) * 0.999**601 + 0.001
    assert column[700][row] == pytest.approx(((1 - 0.999**701) / v) ** 0.5, rel=1e-3)
    assert column[600][row] == 0


@pytest.mark.slow
def test_gradient_that_grows_tenfold_raises_update_rms() -> None:
    change = lambda g, step: torch.full_like(g, 10.0 if step >= 161 else 1.0)  # noqa: E731
    watcher = monitor()
    model = Watched(None, steady, steps=200, sabotage=hooked("network.2.weight", change))
    watch(model, [watcher])
    alarm = first(watcher, "update_rms")
    # Sampled at 165, confirmed at 166: v is 1 + 99 * 0.001 * 6 of the steps since, corrected.
    assert (alarm.step, alarm.tensor) == (166, "network.2.weight")
    v = (1 - 0.999**161) * 0.999**6 + 100 * (1 - 0.999**6)
    assert alarm.value == pytest.approx(10 / (v / (1 - 0.999**167)) ** 0.5, rel=1e-3)
    assert len([a for a in watcher.alarms if a.kind == "update_rms"]) == 1


@pytest.mark.slow
def test_embedding_is_named_first_among_several_tensors() -> None:
    def change(module: Any, step: int) -> None:
        for p in module.parameters() if step == 0 else []:
            big = 20.0 if p.shape == (48, 64) else 10.0
            p.register_hook(lambda g, b=big: torch.ones_like(g) * (b if module.now >= 160 else 1.0))
        module.now = step

    watcher = monitor()
    model = SparseWatched(bag_of_tokens, steady, steps=175, sabotage=change)
    watch(model, [watcher])
    alarm = first(watcher, "update_rms")
    assert alarm.tensor == "network.0.weight"
    assert "4 such tensors" in alarm.message


@pytest.mark.slow
def test_epsilon_above_the_second_moment_raises_an_alarm() -> None:
    change = lambda g, step: torch.full_like(g, 3e-3 * 0.8 ** max(step - 40, 0))  # noqa: E731
    make = lambda p: steady(p, eps=1e-4, betas=(0.9, 0.9))  # noqa: E731
    watcher = monitor()
    watch(Watched(None, make, steps=120, sabotage=hooked("network.0.weight", change)), [watcher])
    alarm = first(watcher, "below_epsilon")
    assert (alarm.tensor, alarm.value) == ("network.0.weight", 1.0)
    assert 40 < alarm.step < 120
    assert "Lower epsilon to 1e-08" in alarm.remedy


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "is_high"), [(1e-10, False), (10.0, True)])
def test_update_too_large_or_small_for_its_weight_raises_an_alarm(lr: float, is_high: bool) -> None:
    ones = hooked("", None)

    def pin(module: Any, step: int) -> None:
        ones(module, step)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(0.5)

    watcher = monitor()
    watch(Watched(None, lambda p: Adam(p, lr=lr), steps=40, sabotage=pin), [watcher])
    alarm = next(a for a in watcher.alarms if a.tensor == "network.0.weight")
    # A low ratio needs no baseline: it is judged in the first sample with a state, or in the second
    # sample, which shows that the learning rate does not rise.
    assert (alarm.kind, alarm.step) == ("update_to_weight", 10 if is_high else 2)
    assert alarm.value == pytest.approx(lr / 0.5, rel=1e-4)
    assert alarm.threshold == (10.0 if is_high else 1e-8)


@pytest.mark.slow
def test_schedule_that_ends_near_zero_raises_no_alarm() -> None:
    class Model(Watched):
        def configure_optimizers(self) -> Any:
            optimizer = Adam(self.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5**s)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    watcher = monitor()
    watch(Model(steps=60), [watcher])
    assert kinds(watcher) == []


@pytest.mark.slow
def test_master_weights_are_reported_under_the_names_of_parameters() -> None:
    change = lambda g, step: torch.full_like(g, float(step < 10))  # noqa: E731
    watcher = monitor(zero_run_steps=20)
    model = Watched(None, steady, steps=40, sabotage=hooked("network.2.weight", change))
    watch(model, [watcher], PureFP16(loss_scale=1.0))
    assert kinds(watcher) == [(30, "zero_run", "network.2.weight")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_reached", "expected"),
    [(lambda step: step % 30 == 7, []), (lambda step: step < 150, ["zero_run"])],
    ids=["rare", "dead"],
)
def test_rare_expert_is_judged_by_how_often_it_had_a_gradient(
    is_reached: Any, expected: list[str]
) -> None:
    """Few batches reach the expert, so runs of 29 steps without a gradient are usual."""
    change = lambda g, step: torch.full_like(g, float(is_reached(step)))  # noqa: E731
    watcher = monitor(zero_run_steps=15)
    sabotage = hooked("network.2.weight", change)
    watch(Watched(None, steady, steps=300, sabotage=sabotage), [watcher])
    assert [kind for _, kind, _ in kinds(watcher) if kind == "zero_run"] == expected


@pytest.mark.slow
def test_adam_monitor_ignores_non_finite_gradients() -> None:
    watcher = monitor(baseline_samples=1)
    factor = lambda step: torch.inf if step % 2 else 1.0  # noqa: E731
    watch(Watched(None, steady, steps=40, factor=factor), [watcher], BalancedAMP(loss_scale=64.0))
    assert kinds(watcher) == []


@pytest.mark.slow
def test_state_survives_a_resume(tmp_path: Any) -> None:
    def make() -> tuple[Watched, AdamStateMonitor]:
        return Watched(None, steady, steps=23), monitor()

    (model, whole), (early, before), (late, after) = make(), make(), make()
    watch(model, [whole], max_epochs=2)
    watch(early, [before]).save_checkpoint(tmp_path / "run.ckpt")
    watch(late, [after], max_epochs=2, ckpt_path=tmp_path / "run.ckpt")
    assert after.state_dict() == whole.state_dict()


@pytest.mark.parametrize("argument", [{"max_update_rms": 0}, {"zero_run_steps": -1}])
def test_arguments_out_of_range_are_refused(argument: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(argument))):
        AdamStateMonitor(**argument)
