"""`ActivationRangeMonitor` reports activations near a limit of their dtype, and clamped values."""

import dataclasses
import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from lightning_mp import BalancedAMP, LossScaleConfig, PureFP16
from lightning_mp.callbacks import ActivationRangeMonitor
from lightning_mp.callbacks._step.batches import tensors_in
from lightning_mp.callbacks._step.outputs import OutputSampler
from lightning_mp.numerics.tensor_stats import StatField
from tests.callbacks.models import Watched, first, kinds, perceptron, watch

pytestmark = pytest.mark.filterwarnings("ignore::lightning_mp.callbacks.InstabilityWarning")


def still(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.0)


def monitor(**kwargs: Any) -> ActivationRangeMonitor:
    return ActivationRangeMonitor(**{"every_n_steps": 5, "baseline_samples": 3, **kwargs})


def growing(from_step: int, per_step: float, path: str = "0") -> Any:
    """Return a `sabotage` that grows the weights of a module from a step on."""

    def sabotage(module: Any, step: int) -> None:
        if step >= from_step:
            with torch.no_grad():
                module.network.get_submodule(path).weight.mul_(per_step)

    return sabotage


@pytest.mark.slow
def test_growing_activations_raise_an_alarm_before_they_overflow() -> None:
    watcher = monitor(repeat_after_steps=1000)
    model = Watched(None, still, steps=90, sabotage=growing(10, 1.2))
    scale = LossScaleConfig(init_scale=1e-6, dynamic=False, patience=99)
    watch(model, [watcher], BalancedAMP(loss_scale=scale))
    low = first(watcher, "activation_headroom")
    bad = first(watcher, "activation_non_finite")
    assert (low.tensor, bad.tensor, bad.severity) == ("network.0", "network.0", "error")
    assert low.step < bad.step
    column = dict(watcher.history.maps["activation_headroom_bits"]["columns"])
    row = watcher.history.maps["activation_headroom_bits"]["names"].index("network.0")
    assert low.value == column[low.step][row] < 2
    assert column[low.step - 5][row] >= 2
    assert "`BalancedAMP(fp32_modules=['norm', 'network.0'])`" in low.remedy
    assert 2.0**-low.value * 65504 == pytest.approx(
        float(low.message.split("reaches ")[1].split(",")[0]), rel=1e-3
    )  # noqa: E501


@pytest.mark.slow
def test_fp32_activations_of_the_same_size_raise_no_alarm() -> None:
    watcher = monitor()
    watch(Watched(None, still, steps=30, sabotage=growing(5, 1.5)), [watcher])
    assert kinds(watcher) == []


@pytest.mark.slow
def test_clamped_values_are_counted_by_module() -> None:
    def overflow(module: Any, step: int) -> None:
        if step == 20:
            with torch.no_grad():
                module.network[2].bias.fill_(65504.0)
                module.network[2].weight.fill_(60000.0)

    watcher = monitor()
    plugin = PureFP16(inf_clamp=["network.2"], loss_scale=1e-6)
    watch(Watched(None, still, steps=40, sabotage=overflow), [watcher], plugin)
    alarm = first(watcher, "activation_clamped")
    assert (alarm.step, alarm.tensor) == (20, "network.2")
    counts = dict(watcher.history.curves["clamped_values"])
    assert alarm.value == counts[20] > 0 == counts[15]
    assert plugin.inf_clamp.counted()["network.2"] == counts[35] + 4 * alarm.value


@pytest.mark.parametrize("plugin_type", [BalancedAMP, PureFP16])
def test_dynamic_loss_scale_that_rises_to_the_limit_raises_no_alarm(plugin_type: Any) -> None:
    watcher = ActivationRangeMonitor(every_n_steps=1, backward=True)
    plugin = plugin_type(loss_scale=LossScaleConfig(warmup_interval=2))
    watch(Watched(perceptron, still, steps=60), [watcher], plugin)
    bits = [bits for _, bits in watcher.history.curves["output_gradient_headroom_bits"]]
    # The scale doubles every second step, until the first overflow ends its warm-up.
    assert min(bits) < 2 < bits[0]
    assert plugin.scaler.scale < LossScaleConfig.max_scale
    assert kinds(watcher) == []


def test_static_loss_scale_near_the_limit_raises_an_alarm_whose_remedy_is_accepted() -> None:
    watcher = monitor(backward=True)
    model = Watched(perceptron, still, steps=6, factor=lambda _: 1e5)
    watch(model, [watcher], PureFP16(loss_scale=2.0))
    alarm = first(watcher, "output_gradient_headroom")
    advice = alarm.remedy.split("`")[1]
    assert advice == "PureFP16(loss_scale=LossScaleConfig(min_scale=0.5, max_scale=0.5))"
    assert eval(advice).scaler.scale == 0.5


def test_remedy_for_gradients_of_a_lost_loss_is_no_lower_loss_scale() -> None:
    watcher = ActivationRangeMonitor(every_n_steps=1, backward=True)
    model = Watched(perceptron, still, steps=6, factor=lambda step: [1.0, math.nan][step > 3])
    watch(model, [watcher], BalancedAMP(half="fp16"))
    assert "NonFiniteLocator()" in first(watcher, "output_gradient_non_finite").remedy


@pytest.mark.slow
def test_gradients_of_outputs_are_measured_on_request() -> None:
    watcher = monitor(backward=True)
    factor = lambda step: 1e6 if step >= 20 else 1.0  # noqa: E731
    watch(Watched(None, still, steps=30, factor=factor), [watcher], PureFP16(loss_scale=1.0))
    alarm = next(a for a in watcher.alarms if a.kind.startswith("output_gradient"))
    assert alarm.step == 20
    assert alarm.tensor == "network.4"
    assert "activation_headroom_bits" in watcher.history.maps
    quiet = monitor()
    watch(Watched(None, still, steps=30, factor=factor), [quiet], PureFP16(loss_scale=1.0))
    assert kinds(quiet) == []


@pytest.mark.slow
def test_activations_that_underflow_in_fp16_raise_an_alarm() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(16, 48, bias=False), nn.Linear(48, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x))

    def shrink(module: Any, step: int) -> None:
        if step >= 15:
            with torch.no_grad():
                module.network.inner.weight.mul_(0.7)

    watcher = monitor()
    model = Watched(Shifted, still, steps=70, sabotage=shrink)
    watch(model, [watcher], BalancedAMP(loss_scale=1.0, fp32_modules=["network.last"]))
    alarm = first(watcher, "activation_underflow")
    assert alarm.tensor == "network.inner"
    assert "fp32_modules=['network.last', 'network.inner']" in alarm.remedy


@dataclasses.dataclass
class Output:
    hidden: Tensor
    rest: Any = None


@pytest.mark.parametrize(
    "wrap",
    [lambda t: (t, 3), lambda t: {"a": [t]}, Output, lambda t: Output(t[:0], {"b": (None, t)})],
    ids=["tuple", "dict", "dataclass", "nested"],
)
def test_outputs_in_any_container_are_measured(wrap: Any) -> None:
    class Wrapping(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return wrap(2 * x)

    module, x = Wrapping(), torch.tensor([1.0, -8.0, 0.0])
    sampler = OutputSampler(modules={"m": module}, backward=False, max_calls=2)
    with ExitStack() as hooks:
        sampler.start(hooks)
        module(x)
        module(x * 2)
        module(x * 4)  # beyond `max_calls`
        sampled = sampler.take()
    assert sampled is not None
    ((key, row),) = sampled.items()
    assert (key.name, key.kind, key.dtype) == ("m", "activation", torch.float32)
    assert row[StatField.AMAX] == 32
    assert row[StatField.ZEROS] == 2
    assert row[-1] == 6  # values
    module(x)
    assert sampler.take() is None
    assert [t.shape for t in tensors_in(wrap(x))][-1] == (3,)


def test_hooks_exist_only_in_sampled_steps() -> None:
    hooks: list[int] = []

    class Model(Watched):
        def on_train_batch_end(self, *_: Any) -> None:
            hooks.append(len(self.network[0]._forward_hooks))

        def on_before_zero_grad(self, optimizer: Any) -> None:
            hooks.append(len(self.network[0]._forward_hooks))

    model = Model(None, still, steps=8)
    watch(model, [monitor(baseline_samples=1)])
    inside = hooks[::2]
    assert inside == [1, 0, 0, 0, 0, 1, 0, 0]
    assert set(hooks[1::2]) == {0}


def test_modules_can_be_chosen_and_unknown_names_raise_an_error() -> None:
    watcher = monitor(modules=["network.2", "ReLU"])
    watch(Watched(None, still, steps=2), [watcher])
    names = watcher.history.maps["activation_headroom_bits"]["names"]
    assert names == ["network.1", "network.2", "network.3"]
    with pytest.raises(ValueError, match="network.9"):
        watch(Watched(None, still, steps=2), [monitor(modules=["network.9"])])


@pytest.mark.slow
def test_compiled_module_is_measured_as_a_whole_under_its_name() -> None:
    def compiled() -> nn.Module:
        return nn.Sequential(torch.compile(perceptron(), backend="eager"), nn.Identity())

    watcher = monitor()
    watch(Watched(compiled, still, steps=2), [watcher])
    names = watcher.history.maps["activation_headroom_bits"]["names"]
    assert names == ["network.0", "network.1"]


def test_module_compiled_in_place_gets_no_hooks() -> None:
    def compiled() -> nn.Module:
        network = perceptron()
        network.compile(backend="eager")
        return nn.Sequential(network, nn.Identity())

    watcher = monitor()
    watch(Watched(compiled, still, steps=2), [watcher])
    assert watcher.history.maps["activation_headroom_bits"]["names"] == ["network.1"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_gets_no_hooks() -> None:
    def scripted() -> nn.Module:
        return nn.Sequential(torch.jit.script(perceptron()), nn.Identity())

    watcher = monitor()
    watch(Watched(scripted, still, steps=2), [watcher])
    assert watcher.history.maps["activation_headroom_bits"]["names"] == ["network.1"]


class Block(nn.Module):
    """Scales a residual stream by a buffer, adds 0, and applies a mask of -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mask = nn.LayerNorm(16), Mask()
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        return x + (0 * self.norm(x) + 0 * self.mask(x).softmax(dim=1)).to(x.dtype)


class Mask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(torch.arange(16) > 7, -torch.inf)


def stream() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), Block(), Block(), nn.Linear(16, 1))


def test_blocks_and_inputs_of_norms_are_measured_and_masks_raise_no_alarm() -> None:
    def grow(module: Any, step: int) -> None:
        module.network[1].gain.fill_(2.0**step)

    watcher = monitor(every_n_steps=1)
    watch(Watched(stream, still, steps=15, sabotage=grow), [watcher], BalancedAMP(loss_scale=1.0))
    alarms = {(alarm.kind, alarm.tensor): alarm for alarm in watcher.alarms}
    assert {kind for kind, _ in alarms} <= {"activation_headroom", "norm_input_headroom"}
    assert ("activation_headroom", "network.1.mask") in alarms  # the first of those it reaches
    near = alarms["norm_input_headroom", "network.1.norm"]
    # Each step adds one bit, so the headroom in bits is the number of remaining steps.
    assert near.value is not None
    last = float(near.message.partition("by about step ")[2].partition(". ")[0])
    assert abs(last - (near.step + near.value)) <= 2


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_forward_that_a_checkpoint_repeats_counts_once(use_reentrant: bool | None) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            run = super().forward
            if use_reentrant is None:
                return run(x)
            return checkpoint(run, x.requires_grad_(), use_reentrant=use_reentrant)

    def plant(module: Any, step: int) -> None:
        with torch.no_grad():
            module.network[2].weight[0] = math.nan  # one of 48 outputs, in 32 rows

    watcher = monitor(every_n_steps=1, backward=True)
    network = lambda: Checkpointed(*perceptron())  # noqa: E731
    watch(Watched(network, still, steps=1, sabotage=plant), [watcher])
    bad = first(watcher, "activation_non_finite")
    assert (bad.tensor, bad.value) == ("network.2", 32)
    assert first(watcher, "output_gradient_non_finite").tensor == "network.4"


def test_buffer_that_becomes_non_finite_is_named_but_a_mask_is_not() -> None:
    def network() -> nn.Module:
        network = stream()
        network[1].register_buffer("constant", torch.full((4,), -torch.inf))
        network[2].register_buffer("kept", torch.zeros(4))
        return network

    def spoil(module: Any, step: int) -> None:
        if step == 6:
            module.network[2].kept[1] = torch.nan

    watcher = monitor(every_n_steps=5)
    watch(Watched(network, still, steps=16, sabotage=spoil), [watcher])
    named = [(alarm.kind, alarm.tensor) for alarm in watcher.alarms]
    assert named == [("buffer_non_finite", "network.2.kept")]
    assert watcher.alarms[0].step <= 10


@pytest.mark.parametrize(
    "argument", [{"min_headroom_bits": -1}, {"calls_per_step": 0}, {"baseline_samples": 0}]
)
def test_arguments_out_of_range_are_refused(argument: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(argument))):
        ActivationRangeMonitor(**argument)
