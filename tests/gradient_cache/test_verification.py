"""A replay with different outputs raises an error with the tower, the size and the causes."""

import copy
import pickle
import random
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from lightning_mp.gradient_cache._served.call import rounding_noise
from lightning_mp.gradient_cache.gradient_cache import GradientCache

CPU = torch.device("cpu")


def make_cache(**settings: object) -> GradientCache:
    return GradientCache(micro_batch_size=3, **settings)


class Drifts(nn.Module):
    """Adds a number that grows with every call and is not a buffer."""

    def __init__(self, drift: float) -> None:
        super().__init__()
        self.linear, self.drift, self.calls = nn.Linear(4, 4), drift, 0

    def forward(self, batch: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(batch) * (1 + self.drift if self.calls > 3 else 1)


@pytest.mark.parametrize("drift", [1e-4, 1e-2, 0.5, 1e30, float("nan"), float("inf")])
def test_different_replay_raises_before_any_gradient_is_accumulated(drift: float) -> None:
    torch.manual_seed(0)
    tower = Drifts(drift)
    features = make_cache().call(tower, torch.randn(7, 4))
    with pytest.raises(RuntimeError, match="`Drifts` returned .* relative difference") as error:
        features.sum().backward()
    assert tower.linear.weight.grad is None
    text = str(error.value)
    causes = ["changed in place", "generator", "keeps state"]
    assert sorted(causes, key=text.index) == causes
    if drift < 1:  # within the scatter of random weights
        size = float(text.split("relative difference is ")[1].split(",")[0])
        assert drift / 3 < size < 3 * drift


def test_replay_tolerance_decides_which_difference_raises() -> None:
    for tolerance, raises in ((1e-3, True), (1e-1, False), (float("inf"), False)):
        tower = Drifts(1e-2)
        features = make_cache(replay_tolerance=tolerance).call(tower, torch.randn(7, 4))
        if raises:
            with pytest.raises(RuntimeError, match="1.0e-03 is allowed"):
                features.sum().backward()
        else:
            features.sum().backward()


def message_of(tower: nn.Module, batch: Tensor, **settings: object) -> str:
    """Return the error of a replay, or an empty string."""
    cache = GradientCache(micro_batch_size=len(batch), **settings)
    try:
        cache.call(tower, batch).square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


class Changes(nn.Module):
    """Returns one output, and another one in the replay."""

    def __init__(self, *outputs: Tensor) -> None:
        super().__init__()
        self.outputs, self.one = list(outputs), nn.Parameter(torch.ones_like(outputs[0][0, 0, 0]))

    def forward(self, batch: Tensor) -> Tensor:
        return self.outputs.pop(0) * self.one


def test_tolerance_is_the_rounding_of_the_coarsest_dtype() -> None:
    outputs, batch = torch.ones(7, 1, 4), torch.ones(7, 4)
    message = message_of(Changes(outputs, 2 * outputs), batch)
    assert f"{128 * 2.0**-23:.1e} is allowed" in message
    with torch.autocast("cpu", dtype=torch.bfloat16):
        message = message_of(Changes(outputs, 2 * outputs), batch)
    assert f"{2.0**-4:.1e} is allowed" in message


def test_tolerance_on_a_gpu_is_that_of_tf32_if_matmul_or_convolutions_use_it() -> None:
    arguments = {torch.float32}, torch.device("cuda")
    assert rounding_noise(*arguments) == 8 * 2.0**-10  # torch's default for convolutions
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        assert rounding_noise(*arguments) == 128 * 2.0**-23
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert rounding_noise(*arguments) == 8 * 2.0**-10
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.backends.cudnn.conv.fp32_precision = "tf32"


def test_deterministic_algorithms_have_a_tolerance_of_zero() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        outputs = torch.ones(7, 1, 4, dtype=torch.bfloat16)
        message = message_of(Changes(outputs, outputs * (1 + 2**-7)), torch.ones(7, 4))
        assert "0.0e+00 is allowed" in message
        tower = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.LayerNorm(64))
        make_cache().call(tower, torch.randn(7, 4)).square().sum().backward()
        features = make_cache().call(Drifts(2.0**-22), torch.randn(7, 4))
        with pytest.raises(RuntimeError, match="returned different outputs"):
            features.sum().backward()
        for width in range(20, 60):  # sums over clones of overwritten rows may round differently
            tower = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(width, 33), nn.Linear(33, 17))
            make_cache().call(tower, torch.randn(7, width)).square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sketch_estimates_the_size_of_a_difference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    output, other = torch.randn(256, 3, 32, dtype=dtype), torch.randn(256, 3, 32, dtype=dtype)
    batch = torch.ones(256, 4)
    message = message_of(Changes(output, output + 0.25 * other), batch, replay_tolerance=0.0)
    difference = float(message.split("relative difference is ")[1].split(",")[0])
    # The mean of 256 squared normal variables has a standard deviation of sqrt(2 / 256) = 9%, and
    # the message has two digits.
    assert abs(difference / 0.25 - 1) < 5 * 0.09 / 2 + 0.02
    zeros = torch.zeros_like(output)
    for same in (output, zeros):
        assert not message_of(Changes(same, same.clone()), batch, replay_tolerance=0.0)
    assert "difference is inf" in message_of(Changes(zeros, zeros + 1), batch)


def test_non_finite_outputs_are_not_compared() -> None:
    tower = nn.Linear(4, 4)
    features = make_cache().call(tower, torch.full((7, 4), torch.nan))
    features.sum().backward()
    assert tower.weight.grad.isnan().all()


class HiddenNoise(nn.Module):
    """Draws from a generator that is not an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.hidden = nn.Linear(4, 4), [np.random.default_rng(1)]

    def forward(self, batch: Tensor) -> Tensor:
        return self.linear(batch) * float(self.hidden[0].random())


def test_noise_of_an_unknown_generator_raises() -> None:
    features = make_cache().call(HiddenNoise(), torch.randn(7, 4))
    with pytest.raises(RuntimeError, match="generator that is not an attribute"):
        features.sum().backward()


class OwnDraws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.torch = torch.Generator().manual_seed(1)
        self.generator, self.state = np.random.default_rng(1), np.random.RandomState(1)
        self.python = random.Random(1)

    def forward(self, batch: Tensor) -> Tensor:
        draws = [self.generator.random(), self.state.rand(), self.python.random()]
        return batch * self.weight * torch.rand(1, generator=self.torch) * float(np.prod(draws))


def test_generators_of_a_module_are_replayed_and_then_continue() -> None:
    tower, twin = OwnDraws(), OwnDraws()
    features = make_cache().call(tower, torch.ones(7, 4))
    features.sum().backward()
    expected = torch.cat([twin(rows) for rows in torch.ones(7, 4).split(3)])
    assert torch.equal(features, expected)
    expected.sum().backward()
    assert torch.allclose(tower.weight.grad, twin.weight.grad)
    assert torch.equal(tower(torch.ones(1, 4)), twin(torch.ones(1, 4)))


def test_batch_changed_before_the_backward_raises_and_names_it() -> None:
    tower, batch = nn.Linear(4, 4), torch.randn(7, 4)
    features = make_cache().call(tower, batch)
    batch.mul_(2)
    with pytest.raises(RuntimeError, match="argument `input` .* was changed in place between"):
        features.sum().backward()


def test_batch_changed_through_numpy_raises() -> None:
    tower, batch = nn.Linear(4, 4), np.ones((7, 4), dtype=np.float32)
    features = make_cache().call(tower, torch.from_numpy(batch))
    batch *= 2
    with pytest.raises(RuntimeError, match="returned different outputs"):
        features.sum().backward()


def test_mask_that_a_tower_writes_to_raises() -> None:
    class WritesToMask(nn.Module):
        def forward(self, batch: Tensor, mask: Tensor) -> Tensor:
            return batch * mask.mul_(2)

    with pytest.raises(RuntimeError, match="`WritesToMask` writes in place to `mask`"):
        make_cache().call(WritesToMask(), torch.ones(7, 4), torch.ones(1, 4))


def test_tower_may_write_in_place_to_the_images_of_a_list() -> None:
    class Centers(nn.Linear):
        def forward(self, images: list[Tensor]) -> Tensor:
            return super().forward(torch.stack([image.sub_(0.5).mean((1, 2)) for image in images]))

    def images() -> list[Tensor]:
        return [torch.full((3, 4 + size, 5), float(size)) for size in range(6)]

    tower = Centers(3, 4)
    cache = GradientCache(micro_batch_size=2, roles={"images": "rows"})
    features = cache.call(tower, images())
    assert torch.allclose(features, tower(images()))
    features.square().sum().backward()


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("expanded", torch.ones(1).expand(4))
        self.register_buffer("rows", torch.zeros(0, 4))

    def forward(self, batch: Tensor) -> Tensor:
        self.rows = torch.cat([self.rows, batch.detach()])  # a history that grows
        return self.linear(batch * self.expanded)


def test_growing_and_expanded_buffers_keep_the_state_after_the_call() -> None:
    tower, batch = Expanded(), torch.randn(7, 4)
    features = make_cache().call(tower, batch)
    for _ in range(2):
        assert torch.equal(tower.rows, batch)
        features.sum().backward(retain_graph=True)


def _functional(tower: nn.Module, batch: Tensor) -> Tensor:
    parameters = {name: p.detach().clone().requires_grad_() for name, p in tower.named_parameters()}
    return torch.func.functional_call(tower, parameters, (batch,))


class Served(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(4, 4)

    def encode(self, batch: Tensor) -> Tensor:
        return self.tower(batch)


def _serving(cache: GradientCache, model: nn.Module) -> AbstractContextManager[None]:
    return cache.serving(model, ["tower", "encode"])


class Cosine(nn.Module):
    forward = torch.cos  # a C function, as the forward of a traced module


def test_tower_without_a_signature_is_served() -> None:
    model, cache, batch = Served(), make_cache(), torch.randn(7, 4)
    model.tower = Cosine()
    with _serving(cache, model):
        assert torch.equal(model.encode(batch), batch.cos())
    assert cache.calls == 1


def test_functional_call_of_a_tower_raises_in_the_backward() -> None:
    model, cache = Served(), make_cache()
    with _serving(cache, model):
        features = _functional(model.tower, torch.randn(7, 4))
    with pytest.raises(RuntimeError, match="trains other tensors in its replay than in its call"):
        features.sum().backward()


class Detaches(nn.Module):
    """Detaches its activations if a flag is set, and stores an auxiliary loss."""

    is_detached = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.probe = nn.Linear(4, 1)
        self.probed: list[Tensor] = []

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.first(batch)
        self.auxiliary = hidden.square().mean()
        self.probed.append(self.probe(hidden.detach()).mean())  # in the graph of no output
        return self.second(hidden.detach() if self.is_detached else hidden)


@pytest.mark.parametrize("before", [False, True])
def test_flag_that_changes_what_trains_before_the_backward_raises(before: bool) -> None:
    tower = Detaches()
    tower.is_detached = before
    features = make_cache().call(tower, torch.randn(7, 4))
    tower.is_detached = not before  # the outputs of the replay are equal
    with pytest.raises(RuntimeError, match="`Detaches` trains other tensors in its replay"):
        features.sum().backward()


@pytest.mark.parametrize("stored", ["attribute", "list"])
def test_loss_of_a_stored_tensor_raises(stored: str) -> None:
    tower = Detaches()
    features = make_cache().call(tower, torch.randn(7, 4))
    auxiliary = tower.auxiliary if stored == "attribute" else sum(tower.probed)
    with pytest.raises(RuntimeError, match="tower `Detaches` computed but did not return"):
        (features.sum() + auxiliary).backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.grad(lambda x: f(x).sum()),
        torch.func.vmap,
        lambda f: torch.func.jacrev(f),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    ],
)
def test_transforms_of_torch_func_raise(transform: Callable[..., object]) -> None:
    model, cache = Served(), make_cache()
    with (
        _serving(cache, model),
        pytest.raises(RuntimeError, match="`tower` inside a transform of `torch.func`"),
    ):
        transform(model.tower)(torch.randn(7, 4))


def test_forward_mode_ad_raises() -> None:
    tower = nn.Linear(4, 4)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode AD"):
        make_cache().call(tower, forward_ad.make_dual(torch.ones(7, 4), torch.ones(7, 4)))


def test_second_derivatives_raise_and_first_ones_with_create_graph_are_exact() -> None:
    tower, batch = nn.Linear(4, 4), torch.randn(7, 4, requires_grad=True)
    features = make_cache().call(tower, batch)
    (grad,) = torch.autograd.grad(features.square().sum(), batch, create_graph=True)
    (plain,) = torch.autograd.grad(tower(batch).square().sum(), batch)
    assert torch.allclose(grad, plain)
    with pytest.raises(RuntimeError, match="second derivative through a tower"):
        grad.square().sum().backward()


def test_cache_and_served_models_can_be_copied_and_pickled() -> None:
    model, cache = Served(), make_cache(roles={"x": "left out"})
    batch = torch.randn(7, 4)
    with _serving(cache, model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for copied in copies:
        with torch.no_grad():
            copied.tower.weight.zero_()
        assert torch.equal(copied.encode(batch), copied.tower.bias.expand(7, 4))
    assert cache.calls == 0
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        # Products of fewer rows may sum in a different order.
        torch.testing.assert_close(copied.call(model.tower, batch), model.tower(batch))
        assert copied.calls == 1


class _CountsReads(TorchFunctionMode):
    """Counts operations that would make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        reads = {Tensor.item, Tensor.__bool__, Tensor.tolist, Tensor.__float__, torch.equal}
        self.reads += func in reads
        return func(*args, **(kwargs or {}))


def test_comparison_reads_one_number_per_call() -> None:
    tower = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    features = make_cache().call(tower, torch.randn(30, 4)).sum()
    with _CountsReads() as counter:
        features.backward()
    # The number arrives as a numpy array, whose reading torch does not see.
    assert counter.reads == 0
