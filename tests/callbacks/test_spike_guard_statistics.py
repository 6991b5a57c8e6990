"""The robust window of `SpikeGuard` equals a reference in NumPy."""

import numpy as np
import pytest
import torch

from lightning_mp.callbacks._rules.spikes import RobustWindow, SignalVerdict, is_slight
from tests.reference.spikes import SpikeRule


def judge_all(window: RobustWindow, values_tk: torch.Tensor) -> SignalVerdict:
    verdicts = [window.judge(values_k) for values_k in values_tk]
    return SignalVerdict(*map(torch.stack, zip(*verdicts, strict=True)))


def draw(seed: int, steps: int = 400) -> torch.Tensor:
    """Return a loss, a norm, and a loss that is sometimes negative, with spikes and NaN."""
    rng = np.random.default_rng(seed)
    values = np.stack(
        [
            (0.2 + 3 * np.exp(-np.arange(steps) / 40)) * np.exp(0.1 * rng.standard_normal(steps)),
            rng.chisquare(6, steps),
            rng.standard_normal(steps),
        ],
        axis=1,
    )
    values[rng.random(values.shape) < 0.02] *= 40
    values[rng.random(values.shape) < 0.01] = np.nan
    values[rng.random(values.shape) < 0.01] = np.inf
    values[150:190, 0] *= 30  # a new level
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "min_values", "patience"), [(33, 17, 5), (128, 64, 16)])
def test_window_on_spikes_and_nan_follows_the_float64_rule(
    size: int, min_values: int, patience: int
) -> None:
    floors = (0.05, 0.12, 0.05)
    options = {"size": size, "min_values": min_values, "patience": patience}
    values = draw(seed=size)
    report = judge_all(RobustWindow(floors, z_threshold=6.0, **options), values)
    spikes = 0
    for k, floor in enumerate(floors):
        rule = SpikeRule(floor=floor, z_threshold=6.0, **options)
        expected = [rule.judge(float(value)) for value in values[:, k]]
        z = torch.tensor([z for _, z in expected])
        torch.testing.assert_close(
            report.z[:, k], z.clamp(-1e4, 1e4).float(), equal_nan=True, rtol=1e-3, atol=1e-3
        )
        assert report.is_spike[:, k].tolist() == [spike for spike, _ in expected]
        spikes += sum(spike for spike, _ in expected)
    assert spikes > 3


def test_windows_of_arrays_and_tensors_agree() -> None:
    """The host judges arrays; to skip a step, the device judges tensors."""
    values = draw(seed=7)
    on_device, on_host = (RobustWindow((0.05, 0.12, 0.05)) for _ in range(2))
    expected = judge_all(on_device, values)
    verdicts = [on_host.judge(values_k.numpy()) for values_k in values]
    found = SignalVerdict(*map(np.stack, zip(*verdicts, strict=True)))
    assert expected.is_spike.any()
    for name in ("is_spike", "is_finite", "is_new_level", "value", "highest"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name).numpy())
    for name in ("median", "limit", "z"):  # logarithms differ in the last bits
        ours, theirs = getattr(found, name), getattr(expected, name).numpy()
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    # A window saved by one continues as the other.
    on_device.load_state_dict(on_host.state_dict())
    state = on_host.state_dict()
    again = on_device.judge(values[0])
    assert again.is_spike.tolist() == on_host.judge(values[0].numpy()).is_spike.tolist()
    assert all(isinstance(each, torch.Tensor) for each in state.values())


@pytest.mark.sweep
def test_healthy_streams_of_2000_steps_raise_no_alarm() -> None:
    """Noise of many kinds, steep starts and warm-ups; 4 streams of each."""
    rng = np.random.default_rng(3)
    steps = np.arange(2000)[:, None]
    shape = (2000, 4)
    streams = [
        np.full(shape, 0.693),
        np.zeros(shape),
        1 + 1e-3 * rng.standard_normal(shape),
        np.exp(0.05 * rng.standard_normal(shape)),
        np.exp(0.2 * rng.standard_normal(shape)),
        rng.chisquare(1, shape),  # a loss of one sample
        rng.chisquare(4, shape),
        rng.exponential(1, shape),
        (0.2 + 3 * np.exp(-steps / 60)) * np.exp(0.1 * rng.standard_normal(shape)),
        (10 * 0.1 ** (steps / 300)) * np.exp(0.05 * rng.standard_normal(shape)),
        np.minimum(1, (steps + 1) / 200) * np.exp(0.1 * rng.standard_normal(shape)),
        rng.standard_normal(shape),
        -3 + rng.standard_normal(shape),
        np.maximum(0, rng.standard_normal(shape) - 1.5),  # a hinge loss, mostly zero
    ]
    values = torch.tensor(np.concatenate(streams, axis=1), dtype=torch.float32)
    report = judge_all(RobustWindow((0.05,) * values.shape[1]), values)
    spikes = report.is_spike.sum(0).view(len(streams), 4).sum(1)
    assert spikes.tolist() == [0] * len(streams)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.01, 0.1, 0.2])
def test_tenfold_value_is_a_spike_and_a_tenth_is_not(noise: float) -> None:
    rng = np.random.default_rng(1)
    values = np.exp(noise * rng.standard_normal((200, 64)))
    values[150] *= 10
    values[180] /= 10
    report = judge_all(RobustWindow((0.12,) * 64), torch.tensor(values, dtype=torch.float32))
    caught = report.is_spike.sum(1)
    assert caught[150] == 64
    assert caught.sum() == 64


@pytest.mark.slow
def test_new_level_is_accepted_after_patience_steps() -> None:
    values = torch.ones(300, 1)
    values[100:] = 10.0
    values[250] = 200.0
    report = judge_all(RobustWindow((0.05,), patience=16), values)
    spikes = report.is_spike.flatten().nonzero().flatten().tolist()
    assert spikes == [*range(100, 116), 250]
    assert report.is_new_level.flatten().nonzero().flatten().tolist() == [115]


@pytest.mark.slow
@pytest.mark.parametrize("saved", [160, 170], ids=["while it spikes", "behind a new level"])
def test_window_continues_identically_from_its_state(saved: int) -> None:
    values = draw(seed=5)
    values[150:] *= 1e6  # a new level, after 16 spikes
    whole, first, second = (RobustWindow((0.05, 0.12, 0.05)) for _ in range(3))
    expected = [part[saved:] for part in judge_all(whole, values)]
    judge_all(first, values[:saved])
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(
        list(judge_all(second, values[saved:])), expected, rtol=0, atol=0, equal_nan=True
    )


def test_spread_divides_the_score() -> None:
    values = torch.tensor([[1.0, 1.1, 0.9, 1.0, 1.05, 0.95]]).T
    whole, half = (RobustWindow((0.05,), min_values=4, size=8) for _ in range(2))
    for window in (whole, half):
        judge_all(window, values)
    z = [window.judge(torch.tensor([1.5]), spread).z for window, spread in ((whole, 1), (half, 2))]
    torch.testing.assert_close(z[0], 2 * z[1])


def test_absent_signal_does_not_enter_the_window() -> None:
    window = RobustWindow((0.05, 0.05), min_values=4, size=8)
    for _ in range(8):
        window.judge(torch.tensor([1.0, 1.0]))
    columns = window.judge(torch.tensor([0.0, 9.0]))
    loss, norm = (SignalVerdict(*row) for row in zip(*columns, strict=True))
    assert loss.is_finite
    assert not loss.is_spike
    assert norm.is_spike
    assert float(norm.median) == pytest.approx(1.0)
    assert float(norm.limit) == pytest.approx(float(np.exp(0.3)), rel=1e-5)
    assert window.state_dict()["values"].isfinite().sum(dim=1).tolist() == [8, 8]


@pytest.mark.parametrize(
    ("loss", "norm", "expected"),
    [
        (0.12, 1.1, True),  # 8% of the improvement
        (0.16, 1.1, False),  # 11%
        (0.12, 30.0, False),
        (0.12, float("nan"), False),
    ],
)
def test_small_spike_near_zero_loss_is_slight_if_gradients_are_usual(
    loss: float, norm: float, expected: bool
) -> None:
    window = RobustWindow((0.05, 0.12))
    rng = np.random.default_rng(0)
    level = np.repeat([1.4, 0.003], 200)[:, None] * [1.0, 0.0] + [0.0, 1.0]
    values = level * np.exp(0.1 * rng.standard_normal((400, 2)))
    judge_all(window, torch.tensor(values, dtype=torch.float32))
    verdict = window.judge(torch.tensor([loss, norm]))
    assert verdict.is_spike[0]
    assert is_slight(verdict, window.highest_k[0]).item() is expected


def test_spike_before_any_improvement_is_never_slight() -> None:
    window = RobustWindow((0.05, 0.12), min_values=4, size=8)
    for _ in range(8):
        assert not is_slight(window.judge(torch.tensor([1.0, 1.0])), window.highest_k[0])
    verdict = window.judge(torch.tensor([1.5, 1.0]))
    assert verdict.is_spike[0]
    assert not is_slight(verdict, window.highest_k[0])
