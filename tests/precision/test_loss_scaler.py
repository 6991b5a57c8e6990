"""`LossScaler` equals torch's `GradScaler`, except where `GradScaler` fails."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import LossScaleConfig
from lightning_mp.precision.loss_scaler import LossScaler

# torch has neither floor nor ceiling; no test reaches these limits.
AS_TORCH: dict[str, Any] = {"min_scale": 2.0**-126, "max_scale": 2.0**126}
BAD, GOOD = torch.tensor(1.0), torch.tensor(0.0)
FP16 = LossScaleConfig.parse("dynamic", torch.float16)  # for fp16 gradients
X3 = {
    "init_scale": 64,
    "hysteresis": 3,
    "growth_interval": 2,
}  # two overflows between growths cause no backoff


def _step(scaler: LossScaler, overflows: bool) -> float:
    assert scaler.record(BAD if overflows else GOOD) is not overflows
    scaler.update()
    return scaler.scale


def _overflows(count: int, probability: float, seed: int = 0) -> list[bool]:
    return (torch.rand(count, generator=torch.Generator().manual_seed(seed)) < probability).tolist()


class TorchLoop:
    """One weight under torch's `GradScaler`, with scaled gradients chosen by the test."""

    def __init__(self, **config: Any) -> None:
        self.weight = nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.scaler = torch.amp.GradScaler("cpu", **config)
        self.scaler.scale(torch.ones(1))  # creates its tensors

    def step(self, overflows: bool) -> float:
        self.weight.grad = torch.tensor([math.inf if overflows else 0.0])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(self.scaler.get_scale())


# With this probability, growth and backoff are equally frequent, so the scale stays in fp32.
@pytest.mark.parametrize(("interval", "probability"), [(1, 0.5), (3, 0.2), (7, 0.1)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_scale_over_overflows_equals_torch(interval: int, probability: float, seed: int) -> None:
    ours = LossScaler(LossScaleConfig(growth_interval=interval, **AS_TORCH))
    theirs = TorchLoop(growth_interval=interval)
    overflows = _overflows(400, probability, seed)
    scales = [(_step(ours, bad), theirs.step(bad)) for bad in overflows]
    assert [ours for ours, _ in scales] == [theirs for _, theirs in scales]
    assert len(set(scales)) > 4
    assert ours.skipped_steps == sum(overflows)
    assert ours.good_steps_in_a_row == [*reversed(overflows), True].index(True)


def test_scale_stays_at_the_floor_while_that_of_torch_reaches_zero() -> None:
    """The scale of torch is below 1 after 17 consecutive overflows, and 0.0 after 166."""
    ours, theirs = LossScaler(LossScaleConfig(patience=1000)), TorchLoop()
    scales = [(_step(ours, True), theirs.step(True)) for _ in range(166)]
    assert [theirs for _, theirs in scales].index(0.5) == 16
    assert [theirs for _, theirs in scales].index(0.0) == 165
    assert [ours for ours, _ in scales] == [2.0**e for e in range(15, -1, -1)] + [1.0] * 150


@pytest.mark.parametrize(
    ("config", "steps", "scales"),
    [
        ({"growth_factor": 1.5, "backoff_factor": 0.1}, ".x.xx", [150, 15, 22.5, 2.25, 1]),
        ({"growth_factor": 3, "max_scale": 500}, "...", [300, 500, 500]),
        # Tolerated overflows need not be adjacent; only a growth resets their count.
        (X3, "x.xxx..xxx", [64, 64, 64, 32, 16, 16, 32, 32, 32, 16]),
        ({**X3, "max_scale": 64}, "xx..xxx", [64, 64, 64, 64, 64, 64, 32]),
        ({"dynamic": False}, "xx.x..xx", [100] * 8),
    ],
    ids=["factors", "ceiling", "hysteresis", "hysteresis-at-ceiling", "static"],
)
def test_scale_follows_its_config(config: dict[str, Any], steps: str, scales: list[float]) -> None:
    scaler = LossScaler(LossScaleConfig(**{"init_scale": 100, "growth_interval": 1, **config}))
    assert [_step(scaler, kind == "x") for kind in steps] == pytest.approx(scales)
    assert scaler.skipped_steps == steps.count("x")


def test_scale_for_fp16_gradients_grows_fast_until_the_first_overflow() -> None:
    scaler = LossScaler(FP16)
    scales = [_step(scaler, False) for _ in range(280)]
    assert scales[18:20] == [2.0**10, 2.0**11]
    assert scales[119] == 2.0**16
    assert scales[279] == FP16.max_scale == 2.0**24
    assert _step(scaler, True) == 2.0**23
    assert {_step(scaler, False) for _ in range(1999)} == {2.0**23}
    assert _step(scaler, False) == 2.0**24


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scale_loss_multiplies_in_fp32_or_wider(dtype: torch.dtype) -> None:
    for scale in (2.0**15, 2.0**16):
        loss = torch.tensor(3.1, dtype=dtype, requires_grad=True)
        scaled = LossScaler(LossScaleConfig(init_scale=scale)).scale_loss(loss)
        assert scaled.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert scaled.item() == loss.item() * scale
        scaled.backward()
        # The gradient of an fp16 loss is fp16 nevertheless.
        is_too_large = dtype == torch.float16 and scale == 2.0**16
        assert loss.grad == (math.inf if is_too_large else scale)


def _gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(), (0,), (300,), (17, 9)]
    dtypes = (torch.float32, torch.float64)
    return [torch.randn(s, generator=generator, dtype=d) for s in shapes for d in dtypes]


@pytest.mark.parametrize("scale", [2.0**16, 1.0, 2.0**-20, 2.0**-126, 3.7e4, 0.3])
def test_unscale_divides_every_gradient_in_place(scale: float) -> None:
    gradients = _gradients(0)
    expected = [gradient.double() / scale for gradient in gradients]
    found_inf = LossScaler(LossScaleConfig.parse(scale)).unscale_(gradients)
    assert (found_inf.item(), found_inf.shape, found_inf.dtype) == (0, (), torch.float32)
    is_power_of_two = math.frexp(scale)[0] == 0.5
    for gradient, reference in zip(gradients, expected, strict=True):
        rtol = 0.0 if is_power_of_two else 4 * torch.finfo(gradient.dtype).eps
        torch.testing.assert_close(gradient.double(), reference, rtol=rtol, atol=0.0)


@pytest.mark.parametrize("scale", [2.0**16, 0.5])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 4, 5, 6, 7])
def test_unscale_finds_a_single_non_finite_value_at_any_place(
    where: int, bad: float, scale: float
) -> None:
    gradients = _gradients(1)
    gradients[where].view(-1)[-1] = bad
    assert LossScaler(LossScaleConfig.parse(scale)).unscale_(gradients).item() == 1


def test_unscale_handles_sparse_strided_and_missing_gradients() -> None:
    sparse = torch.sparse_coo_tensor([[1, 1, 3]], [8.0, 16.0, 4.0], (5,), check_invariants=True)
    strided = torch.ones(4, 6)[:, ::2]
    scaler = LossScaler(LossScaleConfig(init_scale=4))
    assert scaler.unscale_([sparse, strided]).item() == 0
    assert sparse.to_dense().tolist() == [0, 6, 0, 1, 0]
    assert strided.unique().tolist() == [0.25]
    sparse._values()[0] = math.inf
    assert scaler.unscale_([strided, sparse]).item() == 1
    assert scaler.unscale_([]).item() == 0
    assert scaler.unscale_([], device=torch.device("meta")).is_meta


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_unscale_handles_complex_gradients(dtype: torch.dtype) -> None:
    gradients = [torch.randn(5, 3, dtype=dtype), torch.randn(4, dtype=dtype).conj()]
    expected = [gradient.resolve_conj() / 1024 for gradient in gradients]
    scaler = LossScaler(LossScaleConfig(init_scale=1024))
    assert scaler.unscale_(gradients).item() == 0
    for gradient, reference in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, reference)
    gradients[0][2, 1] = complex(0, math.inf)
    assert scaler.unscale_(gradients).item() == 1


@pytest.mark.parametrize(("scale", "gradient"), [(2.0**-128, 1e-30), (2.0**-20, 1e36)])
def test_unscale_finds_inf_that_torch_misses(scale: float, gradient: float) -> None:
    """torch checks gradients before it unscales them; the fp32 inverse of 2^-128 is inf."""
    theirs = TorchLoop(init_scale=scale)
    theirs.weight.grad = torch.full((1,), gradient)
    theirs.scaler.step(theirs.optimizer)
    assert [*theirs.scaler._found_inf_per_device(theirs.optimizer).values()] == [0]
    assert theirs.weight.isinf()

    ours = LossScaler(LossScaleConfig(min_scale=max(scale, 2.0**-126), patience=1000))
    for _ in range(200):
        _step(ours, True)
    unscaled = torch.full((1,), gradient)
    assert ours.unscale_([unscaled]).item() == unscaled.isinf() == (gradient == 1e36)


@pytest.mark.slow
def test_unscaling_in_fp16_underflows_where_fp32_does_not() -> None:
    """Errors and docstrings state these shares of underflow for gradients from N(0, 1e-7)."""
    gradient = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0)) * 1e-7

    def share_of_zeros(values: Tensor) -> float:
        return (values == 0).double().mean().item()

    half = (gradient * 2**16).half()
    full = half.float()
    LossScaler(LossScaleConfig()).unscale_([full])
    for flushed in (half / 2**16, gradient.half()):  # unscaled in fp16, or not scaled at all
        assert share_of_zeros(flushed) == pytest.approx(0.234, abs=0.001)
    assert share_of_zeros(full) < 1e-5
    start = FP16.init_scale
    assert share_of_zeros((gradient * start).half()) == pytest.approx(0.0002, abs=0.00005)
    for value, scale, fits in ((63.9, start, True), (64.0, start, False), (1.0, 2**16, False)):
        assert torch.tensor(value * scale).half().isfinite() == fits
    assert torch.tensor([3e-11 * start, 2.9e-11 * start]).half().sign().tolist() == [1, 0]


def test_unscale_of_half_gradients_raises_before_any_change() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        gradients = [torch.ones(2), torch.ones(3, dtype=dtype)]
        with pytest.raises(ValueError, match=rf"gradient of {dtype} and shape \[3\].*23\.4%"):
            LossScaler(LossScaleConfig()).unscale_(gradients)
        assert gradients[0].tolist() == [1, 1]


def test_optimizers_skip_independently_and_the_scale_changes_once() -> None:
    scaler = LossScaler(LossScaleConfig(growth_interval=1))
    assert [scaler.record(found_inf) for found_inf in (GOOD, BAD, GOOD)] == [True, False, True]
    assert scaler.last_step_skipped
    assert (scaler.scale, scaler.skipped_steps) == (2.0**16, 0)
    assert [scaler.update() for _ in range(3)] == [0.5, 1, 1]  # the other steps have no record
    assert scaler.last_step_skipped
    assert (scaler.scale, scaler.skipped_steps, scaler.good_steps_in_a_row) == (2.0**15, 1, 0)
    assert scaler.record(GOOD)
    assert not scaler.last_step_skipped  # the skip was one step before
    assert scaler.record(GOOD)
    assert scaler.update() == 2
    assert (scaler.scale, scaler.skipped_steps, scaler.good_steps_in_a_row) == (2.0**16, 1, 1)


def _train_two(scale: Callable[[Tensor], Tensor], step: Callable[..., Any]) -> list[float]:
    """Step two weights at 0 with two optimizers of lr 1; return step / gradient of both."""
    weights = [nn.Parameter(torch.zeros(())) for _ in range(2)]
    scale(0.7 * torch.stack(weights)).sum().backward()
    for weight in weights:
        step(torch.optim.SGD([weight], lr=1.0), weight)
    return [weight.item() / -0.7 for weight in weights]


@pytest.mark.parametrize("updates_between", [False, True])
def test_second_optimizer_gets_correct_gradients_when_the_scale_grows(
    updates_between: bool,
) -> None:
    """With `update` after each optimizer, torch halves the second gradients (accelerate#439)."""
    theirs = torch.amp.GradScaler("cpu", growth_interval=1)
    sizes = _train_two(theirs.scale, lambda opt, _: (theirs.step(opt), theirs.update()))
    assert sizes == pytest.approx([1, 0.5])
    scaler, ratios = LossScaler(LossScaleConfig(growth_interval=1)), [1.0]

    def step(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> None:
        weight.grad *= ratios[-1]
        assert scaler.record(scaler.unscale_([weight.grad]))
        optimizer.step()
        ratios.append(scaler.update() if updates_between else 1.0)

    assert _train_two(scaler.scale_loss, step) == pytest.approx([1, 1])
    scaler.update()
    assert scaler.scale == (2.0**18 if updates_between else 2.0**17)


def test_error_after_patience_at_the_floor_names_a_gradient_and_remedies() -> None:
    scaler = LossScaler(LossScaleConfig(init_scale=4, patience=3))
    bad = torch.tensor([[math.nan, 1.0], [math.inf, -math.inf]])
    named = {"body.weight": torch.randn(3), "head.weight": bad, "head.bias": bad[1]}
    for kind in "xxxx.xx":  # 4 -> 2 -> 1, two at the floor; a good step resets the count
        _step(scaler, kind == "x")
    message = (
        r"^Gradients .* in 3 consec.* lowest loss scale of 1\. The first non-finite gradient is "
        r"`head.weight` of shape \[2, 2\] \(1 NaN and 2 inf among 4 values\)\. .* or lower `Loss"
    )
    with pytest.raises(FloatingPointError, match=message):
        scaler.record(BAD, named_gradients=named.items)
    assert scaler.last_step_skipped
    assert _step(LossScaler(LossScaleConfig(init_scale=2, patience=1)), True) == 1  # no error yet


def test_patience_counts_training_steps_and_requests_names_once() -> None:
    calls = []

    def named() -> list[tuple[str, Tensor]]:
        calls.append(scaler.skipped_steps)
        return [("weight", torch.ones(3))]

    scaler = LossScaler(LossScaleConfig(init_scale=512, patience=2, dynamic=False))
    for _ in range(3):  # optimizers
        assert not scaler.record(BAD, named_gradients=named)
    scaler.update()
    assert scaler.record(GOOD, named_gradients=named)
    message = r"the static loss scale of 512\. The .* is on another rank\. .* or a lower numb"
    with pytest.raises(FloatingPointError, match=message):
        scaler.record(BAD, named_gradients=named)
    assert calls == [1]
    with pytest.raises(FloatingPointError, match=r"the static loss scale of 512\. A lower scale"):
        scaler.record(BAD)


@pytest.mark.slow
def test_resumed_scaler_continues_exactly() -> None:
    limits = {"init_scale": 8, "min_scale": 4, "warmup_interval": 2, "growth_interval": 4}
    config = LossScaleConfig(**limits, hysteresis=2, patience=1000)
    overflows = _overflows(300, 0.3)
    for cut in range(60):
        straight, resumed = LossScaler(config), LossScaler(config)
        for bad in overflows[:cut]:
            _step(straight, bad)
        if cut % 2:
            straight.record(BAD)  # saved between step and update
        state = straight.state_dict()
        assert all(type(value) in (int, float, bool) for value in state.values())
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        for bad in overflows[cut:]:
            assert _step(resumed, bad) == _step(straight, bad)
            assert resumed.state_dict() == straight.state_dict()


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 40])
def test_state_of_a_torch_scaler_loads_and_continues_like_torch(steps: int) -> None:
    # The state contains no warm-up, so the warm-up is over.
    ours = LossScaler(LossScaleConfig(growth_interval=4, warmup_interval=1, **AS_TORCH))
    theirs = TorchLoop(growth_interval=4)
    overflows = _overflows(100, 0.2, seed=steps)
    for bad in overflows[:steps]:
        theirs.step(bad)
    ours.load_state_dict(theirs.scaler.state_dict())
    assert ours.scale == theirs.scaler.get_scale()
    later = overflows[steps:]
    assert [_step(ours, bad) for bad in later] == [theirs.step(bad) for bad in later]


def test_loaded_scale_is_clamped_to_the_configured_limits() -> None:
    zero = {"scale": 0, "_growth_tracker": 0}  # the state of torch after 166 overflows
    wide = LossScaleConfig(init_scale=2.0**30, max_scale=2.0**30, hysteresis=5)
    for state, scale in ((zero, 2.0), (LossScaler(wide).state_dict(), 2.0**20)):
        scaler = LossScaler(LossScaleConfig(min_scale=2, max_scale=2.0**20, hysteresis=2))
        scaler.load_state_dict(state)
        assert (scaler.scale, type(scaler.scale)) == (scale, float)
        assert [_step(scaler, True) for _ in range(2)] == [scale, max(scale / 2, 2)]
        static = LossScaler(LossScaleConfig.parse(8.0))
        static.load_state_dict(state)
        assert static.scale == 8


def test_invalid_state_raises_and_changes_nothing() -> None:
    scaler = LossScaler(LossScaleConfig())
    _step(scaler, True)
    before = scaler.state_dict()
    for change, message in (
        ({"scale": None, "recorded": None}, "`scale=None` and the keys"),  # keys without values
        ({"scale": None, "_growth_tracker": 0}, "`scale=None` and the keys"),
        ({"scale": math.nan}, "`scale=nan`.* finite float of at least 0"),
        ({"scale": math.inf}, "`scale=inf`"),
        ({"scale": True}, "`scale=True`"),
        ({"skipped_steps": 1.5}, "`skipped_steps=1.5`.* int of at least 0"),
        ({"hysteresis_left": True}, "`hysteresis_left=True`"),
        ({"warming_up": 1}, "`warming_up=1`.* bool"),
        ({"_growth_tracker": -2}, "`_growth_tracker=-2`"),
    ):
        state = {key: value for key, value in {**before, **change}.items() if value is not None}
        with pytest.raises(ValueError, match=message):
            scaler.load_state_dict(state)
        assert scaler.state_dict() == before
