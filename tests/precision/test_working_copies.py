"""Half copies replace weights while a module computes, and only then."""

import copy
import gc
import inspect
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from tests.precision.working_models import (
    HALVES,
    Seen,
    X,
    assert_close,
    bytes_held,
    gradients,
    network,
    run,
)

halves = pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)


# --- parameters and copies -----------------------------------------------------------------------


@halves
def test_gradients_are_fp32_and_near_those_without_copies(half: torch.dtype, attached: Any) -> None:
    module, plain = network(), network()
    own = list(module.parameters())
    attached(module, half, keep=[module[2]])
    found = gradients(module, X, half=half)
    plain(X).square().mean().backward()
    assert {g.dtype for g in found} == {torch.float32}
    assert all(p is q for p, q in zip(module.parameters(), own, strict=True))
    assert_close(found, [p.grad for p in plain.parameters()], half)


def test_weights_are_fp32_without_autocast(attached: Any) -> None:
    layer = Seen(6, 2)
    copies = attached(layer)
    layer(X)
    assert layer.seen == torch.float32
    assert bytes_held(copies) == 0
    run(layer, X)
    assert layer.seen == torch.float16
    with torch.autocast("cpu", torch.float16), torch.autocast("cpu", enabled=False):
        layer(X)
    assert layer.seen == torch.float32


def test_user_hooks_see_fp32_weights(attached: Any) -> None:
    layer, seen = Seen(6, 2), []
    attached(layer)
    layer.register_forward_pre_hook(lambda m, _: seen.append(type(m.weight)))
    layer.register_forward_hook(lambda m, *_: seen.append(type(m.weight)))
    run(layer, X)
    assert seen == [nn.Parameter, nn.Parameter]
    assert layer.seen == torch.float16


def test_release_restores_forward_and_frees_copies(attached: Any) -> None:
    module = network()
    working = attached(module)
    run(module, X)
    working.release()
    assert all("forward" not in each.__dict__ for each in module.modules())
    assert bytes_held(working) == 0


def test_exception_in_a_forward_restores_the_weights(attached: Any) -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError

    module = nn.Sequential(nn.Linear(6, 6), Fails(6, 6))
    own = dict(module.named_parameters())
    attached(module)
    with pytest.raises(ArithmeticError):
        run(module, X)
    assert all(p is own[name] for name, p in module.named_parameters())
    assert len(own) == 4


def test_write_between_two_forwards_reaches_the_copies(attached: Any) -> None:
    layer = nn.Linear(6, 2).eval()  # in training, some steps compare all weights
    attached(layer)
    first = run(layer, X)
    with torch.no_grad():
        layer.weight.mul_(2)
        layer.bias.mul_(2)
    assert torch.equal(run(layer, X), 2 * first)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_modules_have_the_gradients_of_plain_modules(
    use_reentrant: bool, attached: Any
) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(6, 6), network()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=use_reentrant)

    torch.manual_seed(2)
    module = Checkpointed()
    plain = nn.Sequential(copy.deepcopy(module.first), copy.deepcopy(module.inner))
    attached(module)
    attached(plain)
    for one, other in zip(gradients(module, X), gradients(plain, X), strict=True):
        assert torch.equal(one, other)


def test_gradients_of_shared_tied_and_reentrant_modules_accumulate_in_fp32(attached: Any) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight
            self.shared, self.depth = nn.Linear(8, 8), 0

        def forward(self, ids: Tensor) -> Tensor:
            if ids.is_floating_point():  # called from within its forward
                return self.shared(ids)
            x = self.shared(self.embed(ids))
            return self.head(self(x))

    torch.manual_seed(3)
    module = Twice()
    plain = copy.deepcopy(module)
    attached(module)
    ids = torch.arange(22).view(2, 11) % 11
    found = gradients(module, ids)
    plain(ids).square().mean().backward()
    assert len(found) == 3
    assert_close(found, [p.grad for p in plain.parameters()], torch.float16)
    assert module.head.weight is module.embed.weight


def test_parameters_other_than_fp32_matrices_have_no_copy(attached: Any) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))
            self.wide = nn.Parameter(torch.randn(6, dtype=torch.float64))
            self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex64))
            self.count = nn.Parameter(torch.arange(6), requires_grad=False)
            self.logit_scale = nn.Parameter(torch.tensor(100.3))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = {name: p.dtype for name, p in self._parameters.items()}
            y = (x @ self.weight).float() * self.count + self.wide.float() + self.phase.abs()
            return y * self.logit_scale

    module = Mixed()
    dtypes = {name: p.dtype for name, p in module.named_parameters()}
    attached(module, torch.bfloat16)
    assert len(gradients(module, X, half=torch.bfloat16)) == 4
    assert module.seen == {**dtypes, "weight": torch.bfloat16}
    assert {name: p.dtype for name, p in module.named_parameters()} == dtypes


def test_frozen_weights_have_a_half_copy_and_no_autograd_node(attached: Any) -> None:
    layer = nn.Linear(6, 4).requires_grad_(False)
    working = attached(layer)
    x = X.clone().requires_grad_()
    output = run(layer, x)
    assert bytes_held(working) == 2 * sum(p.numel() for p in layer.parameters())
    output.float().sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None


# --- updates of copies ---------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_refresh_copies_the_step_of_any_optimizer(fused: bool, attached: Any) -> None:
    layer = nn.Linear(6, 4)
    working = attached(layer)
    optimizer = SGD(layer.parameters(), lr=0.5, fused=fused)
    gradients(layer, X)
    optimizer.step()
    layer.bias.data.add_(1.0)  # version counters do not see this
    working.refresh(layer.parameters())
    torch.testing.assert_close(run(layer, X).float(), layer(X), rtol=2**-8, atol=2**-8)


def test_writes_with_version_counters_update_the_copy_at_once(attached: Any) -> None:
    layer = nn.Linear(6, 4)
    attached(layer)
    run(layer, X)
    with torch.no_grad():
        layer.weight.mul_(3)
    layer.load_state_dict({"bias": torch.ones(4), "weight": layer.weight * 2}, assign=True)
    torch.testing.assert_close(run(layer, X).float(), layer(X), rtol=2**-7, atol=2**-7)


def test_step_of_one_network_keeps_the_graph_of_another(attached: Any) -> None:
    """In a GAN, the graph of the generator is older than the step of the discriminator."""
    generator, judge = nn.Linear(6, 6), nn.Linear(6, 1)
    working = attached(nn.ModuleList([generator, judge]))
    optimizer = SGD(judge.parameters(), lr=0.1)
    fake = run(generator, X)
    run(judge, fake.detach()).float().mean().backward()
    optimizer.step()
    working.refresh(judge.parameters())
    run(judge, fake).float().mean().backward()
    assert generator.weight.grad.norm() > 0


def test_refresh_of_unchanged_weights_keeps_the_graphs_of_earlier_steps(attached: Any) -> None:
    layer = nn.Linear(6, 4)
    working = attached(layer)
    losses = []
    for _ in range(2):
        x = X.clone().requires_grad_()  # whose gradient needs the weight
        losses.append(run(layer, x).float().square().mean())
        working.refresh()
    sum(losses).backward()
    assert layer.weight.grad is not None


def test_backward_after_a_write_to_the_weights_raises_as_without_copies(
    attached: Any,
) -> None:
    module = network()
    working = attached(module)
    loss = run(module, X).float().square().mean()
    with torch.no_grad():
        module[3].weight.zero_()
    working.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copies_created_in_inference_mode_work_in_training(attached: Any) -> None:
    module = network()
    working = attached(module)
    with torch.inference_mode():
        run(module, X)
        working.refresh()
    assert len(gradients(module, X)) == 6


# --- writes in a forward -------------------------------------------------------------------------


def clamp_data(weight: Tensor) -> None:
    weight.data.clamp_(-0.1, 0.1)


def set_data(weight: Tensor) -> None:
    weight.data = weight.data.clamp(-0.1, 0.1)


DATA_WRITES = {"data": clamp_data, "set data": set_data}


class Clamps(nn.Linear):
    """Clamps its weight in each forward, in one of four ways."""

    way = "no_grad"

    def forward(self, x: Tensor) -> Tensor:
        if self.way in DATA_WRITES:
            DATA_WRITES[self.way](self.weight)
        elif self.way == "parameter":
            self.weight = nn.Parameter(self.weight.detach().float().clamp(-0.1, 0.1))
        else:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("way", ["no_grad", "data", "set data", "parameter"])
def test_write_in_the_forward_reaches_the_parameter(way: str, attached: Any) -> None:
    torch.manual_seed(4)
    layer = Clamps(6, 4)
    layer.way = way
    start, working = layer.weight.detach().clone(), attached(layer)
    working.start_step(is_training=False)  # of the sanity check
    working.start_step(is_training=False)
    working.start_step()
    with pytest.warns(match="Clamps writes") if way == "data" else nullcontext():
        run(layer, X)
    assert 0 < (small := start.abs() <= 0.09).sum() < small.numel()
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.detach().abs().max() < 0.1001
    if way != "parameter":
        assert torch.equal(layer.weight[small], start[small])  # more bits than half
    layer.weight.data.fill_(0.3)
    for _ in range(3):
        working.start_step()
        run(layer, X)
        assert layer.weight.detach().abs().max() < 0.1001


class DecaysLate(nn.Linear):
    """Halves its weight from the sixth forward on, in a method."""

    calls = 0

    def decay(self) -> None:
        self.weight.data.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 5:
            self.decay()
        return super().forward(x)


def test_every_write_through_data_reaches_the_parameter(attached: Any) -> None:
    layer = DecaysLate(6, 4)
    start, working = layer.weight.detach().clone(), attached(layer)
    for _ in range(7):
        working.start_step()
        run(layer, X)
    assert torch.equal(layer.weight, start / 4)


class Normalizes(nn.Linear):
    """Normalizes the rows of its weight in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=-1, keepdim=True))
        return super().forward(x)


def test_only_the_first_write_of_a_forward_is_rounded(attached: Any) -> None:
    """Rounded in every step, a normalized weight would lose updates below 2^-12 of itself."""
    torch.manual_seed(4)
    layer = Normalizes(6, 4)
    working = attached(layer)
    run(layer, X)
    for _ in range(3):
        layer.weight.data.mul_(1 + 2**-14 * torch.rand_like(layer.weight))
        normalized = nn.functional.normalize(layer.weight.detach(), dim=-1)
        working.start_step()
        run(layer, X)
        torch.testing.assert_close(layer.weight.detach(), normalized, rtol=2**-22, atol=0)


def test_outside_write_to_data_is_not_mistaken_for_a_write_in_the_forward(
    attached: Any,
) -> None:
    layer = nn.Linear(6, 4)
    attached(layer)
    run(layer, X)
    layer.weight.data.clamp_(-0.05, 0.05)
    run(layer, X)
    assert layer.weight.abs().max() <= 0.05


# --- copies of the model -------------------------------------------------------------------------


@pytest.mark.slow
def test_deep_copy_has_its_own_copies_and_frees_them(attached: Any) -> None:
    layer = Seen(6, 2)
    working = attached(layer)
    run(layer, X)
    held = bytes_held(working)
    teacher = copy.deepcopy(layer)
    with torch.no_grad():
        teacher.weight.zero_()
        teacher.bias.fill_(2.0)
    assert (run(teacher, X) == 2).all()
    assert teacher.seen == torch.float16
    assert bytes_held(working) == 2 * held
    assert not (run(layer, X) == 2).all()
    del teacher
    gc.collect()
    assert bytes_held(working) == held


def test_pickled_module_is_a_plain_module(attached: Any) -> None:
    module = network()
    attached(module)
    run(module, X)
    loaded = pickle.loads(pickle.dumps(module))
    assert torch.equal(loaded(X), module(X))
    assert loaded[0].forward.__func__ is nn.Linear.forward


def test_signature_of_forward_is_unchanged(attached: Any) -> None:
    layer = nn.MultiheadAttention(4, 2)
    expected = inspect.signature(layer.forward)
    attached(layer)
    assert inspect.signature(layer.forward) == expected
