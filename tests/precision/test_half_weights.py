"""Half weights and their residuals with torch optimizers, without a Trainer."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_mp.numerics.split_weights import join_weight, split_weight
from lightning_mp.precision._weights.half_weights import HalfWeights

HALVES = [torch.float16, torch.bfloat16]
half_dtypes = pytest.mark.parametrize("half", HALVES, ids=["fp16", "bf16"])


class Tied(nn.Module):
    """Has a norm, a buffer, a tied weight, and parameters of other dtypes than fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6, bias=False))
        self.head = nn.Linear(6, 6)
        self.head.weight = self.body[0].weight
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.register_buffer("angles", torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.fixture(autouse=True)
def _fresh_values() -> None:
    torch.seed()


def converted(
    half: torch.dtype = torch.float16, model: nn.Module | None = None
) -> tuple[nn.Module, HalfWeights]:
    model = Tied() if model is None else model
    weights = HalfWeights(half)
    weights.convert(model, [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)])
    return model, weights


def step(weights: HalfWeights, optimizer: Optimizer) -> None:
    with weights.stepping(optimizer):
        optimizer.step()


def kept_of(values: dict[str, Tensor], half: torch.dtype) -> dict[str, Tensor]:
    """Return the sums of weights and residuals for the values of a model."""
    untouched = ("body.1.weight", "body.1.bias", "wide", "angles")
    return {
        name: value
        if name in untouched or not value.is_floating_point() or "running" in name
        else join_weight(*split_weight(value, half))
        for name, value in values.items()
    }


def give_gradients(parameters: Any, size: float = 1.0) -> None:
    for p in parameters:
        p.grad = (torch.randn(p.shape) * size).to(torch.promote_types(p.dtype, torch.float32))


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a
    )


# --- the model -----------------------------------------------------------------------------------


@half_dtypes
def test_convert_rounds_weights_in_place_and_changes_nothing_else(half: torch.dtype) -> None:
    model = Tied()
    before = {name: p for name, p in model.named_parameters(remove_duplicate=False)}
    values = {name: t.clone() for name, t in model.state_dict(keep_vars=True).items()}
    converted(half, model)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is p for name, p in before.items())
    assert model.head.weight is model.body[0].weight
    kept = {"body.1.weight", "body.1.bias", "wide"}
    for name, p in after.items():
        expected = values[name] if name in kept else values[name].to(half)
        assert p.dtype == expected.dtype
        assert torch.equal(p, expected), name
    for name, buffer in model.named_buffers():
        assert buffer.dtype == values[name].dtype
        assert torch.equal(buffer, values[name])


def test_weight_shared_with_an_fp32_module_stays_fp32() -> None:
    model = Tied()
    weights = HalfWeights(torch.float16)
    weights.convert(model, [model.head])
    assert model.body[0].weight.dtype == model.head.bias.dtype == torch.float32
    assert model.body[0].bias.dtype == model.body[2].weight.dtype == torch.float16
    # The bias of body[0], both parameters of the norm, and the weight of body[2].
    assert sum(p in weights for p in model.parameters()) == 4


@half_dtypes
def test_release_restores_fp32_values_in_the_same_parameters(half: torch.dtype) -> None:
    model = Tied()
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    _, weights = converted(half, model)
    weights.release()
    bits = {torch.float16: 22, torch.bfloat16: 16}[half]
    torch.testing.assert_close(model.state_dict(), before, rtol=2.0**-bits, atol=2.0**-35)
    assert same(model.state_dict(), kept_of(before, half))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert not any(p in weights for p in model.parameters())
    assert same(copy.deepcopy(model).state_dict(), model.state_dict())


@half_dtypes
def test_state_dict_has_fp32_values_that_a_plain_model_loads_bit_for_bit(
    half: torch.dtype,
) -> None:
    source = Tied()
    expected = kept_of(copy.deepcopy(source.state_dict()), half)
    model, _ = converted(half, source)
    assert same(model.state_dict(), expected)
    part = {n.removeprefix("body."): t for n, t in expected.items() if n.startswith("body.")}
    assert same(model.body.state_dict(), part)
    plain = Tied()
    plain.load_state_dict(model.state_dict())
    assert same(plain.state_dict(), expected)


@pytest.mark.parametrize("keep_vars", [False, True])
def test_loading_an_fp32_state_dict_sets_weights_and_residuals(keep_vars: bool) -> None:
    model, weights = converted()
    new = Tied()
    model.load_state_dict(new.state_dict(keep_vars=keep_vars))
    assert not any(value.requires_grad for value in model.state_dict().values())
    assert torch.equal(model.body[0].weight, new.body[0].weight.half())
    optimizer = SGD(model.parameters(), lr=1.0)
    give_gradients(model.parameters(), 0.0)
    step(weights, optimizer)
    weights.release()
    assert same(model.state_dict(), kept_of(new.state_dict(), torch.float16))


def test_state_dict_with_keep_vars_returns_the_parameters_themselves() -> None:
    model, _ = converted()
    kept = model.state_dict(keep_vars=True)
    assert all(kept[n] is p for n, p in model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copy_of_a_converted_model_is_a_plain_half_model(copied: Any) -> None:
    model, weights = converted()
    twin = copied(model)
    weight = twin.body[0].weight
    assert weight not in weights
    assert twin.state_dict()["body.0.weight"].dtype == torch.float16
    with torch.no_grad():
        weight.mul_(2)
    give_gradients(model.parameters())
    step(weights, SGD(model.parameters(), lr=0.1))
    assert torch.equal(twin.state_dict()["body.0.weight"], weight)
    weights.release()
    assert weight.dtype == torch.float16


# --- the optimizers ------------------------------------------------------------------------------


@pytest.mark.parametrize(("half", "bits"), [(torch.float16, 11), (torch.bfloat16, 8)])
def test_updates_below_half_a_ulp_accumulate_in_residuals(half: torch.dtype, bits: int) -> None:
    update = 0.875 * 2.0**-bits  # a ULP above 1 is 2^(1-bits)
    plain = nn.Parameter(torch.ones(4, dtype=half))
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.ones(4))
    weights = HalfWeights(half)
    weights.convert(holder)
    for weight, optimizer in (
        (plain, SGD([plain], lr=update)),
        (holder.weight, SGD([holder.weight], lr=update)),
    ):
        for _ in range(96):
            weight.grad = torch.full_like(weight, -1)
            if weight is plain:
                optimizer.step()
            else:
                step(weights, optimizer)
    assert torch.equal(plain, torch.ones_like(plain))
    # Weight and residual represent all of these sums exactly.
    assert torch.equal(weights.read(holder.weight), torch.full((4,), 1 + 96 * update))


@pytest.mark.parametrize(
    "write",
    [
        lambda p, x: p.data.copy_(x),
        lambda p, x: p.detach().copy_(x),
        lambda p, x: setattr(p, "data", x.half()),
    ],
    ids=["data.copy_", "copy_", "data"],
)
def test_write_to_a_half_weight_overrides_its_residual(
    write: Callable[[Tensor, Tensor], Any],
) -> None:
    model, weights = converted()
    weight = model.body[0].weight
    old, new = weights.read(weight), torch.randn(6, 6)
    new[:2] = weight[:2].detach().float()  # an equal value keeps the residual
    new[2] = 0
    write(weight, new)
    value = weights.read(weight)
    assert torch.equal(value[:2], old[:2])
    assert torch.equal(value.half(), new.half())  # the old residual is not added
    assert torch.equal(model.state_dict()["body.0.weight"], value)
    assert (value[2].abs() <= 2.0**-25).all()


def test_writes_to_exposed_weights_keep_22_bits_in_the_same_parameters() -> None:
    model, weights = converted()
    parameters, grads = list(model.parameters()), []
    model.body[0].weight.register_post_accumulate_grad_hook(lambda p: grads.append(p.grad.dtype))
    addresses = [p.data_ptr() for p in parameters]
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with weights.exposed(model):
        inside = dict(model.named_parameters())
        assert {p.dtype for p in inside.values()} == {torch.float32, torch.float64}
        assert model.head.weight is model.body[0].weight
        assert same(model.state_dict(), before)
        for p in inside.values():
            p.data.lerp_(torch.ones_like(p), 2.0**-13)  # less than half a ULP
    for name, value in model.state_dict().items():
        expected = before[name]
        if name in inside or name == "head.weight":
            expected = expected.lerp(torch.ones_like(expected), 2.0**-13)
            if value.dtype == torch.float32 and name not in ("body.1.weight", "body.1.bias"):
                expected = join_weight(*split_weight(expected, torch.float16))
        assert torch.equal(value, expected), name
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert addresses == [p.data_ptr() for p in model.parameters()]
    model.body[0].weight.float().sum().backward()
    assert grads == [torch.float16]  # hooks such as those of DDP are kept


def test_exposed_weights_are_converted_back_after_an_exception() -> None:
    model, weights = converted()
    parameters = list(model.parameters())

    def write_and_fail() -> None:
        with weights.exposed(model.head):
            model.head.bias.data.fill_(0.1)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        write_and_fail()
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close(
        weights.read(model.head.bias), torch.full((6,), 0.1), rtol=2**-22, atol=0
    )


@pytest.mark.parametrize("make", [SGD, Adagrad, AdamW], ids=["sgd", "adagrad", "adamw"])
@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
def test_steps_equal_those_of_fp32_weights_with_the_same_gradients(
    make: Callable[..., Optimizer], fused: bool
) -> None:
    model, weights = converted()
    plain = Tied()
    plain.load_state_dict(model.state_dict())
    # Adagrad creates its state in the constructor, in fp16.
    optimizers = [make(m.parameters(), lr=0.01, fused=fused) for m in (plain, model)]
    weights.attach(optimizers[1])
    for _ in range(5):
        give_gradients(model.parameters(), 1e-3)
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            a.grad = b.grad.clone()
        optimizers[0].step()
        step(weights, optimizers[1])
    # Five steps of at most 0.01, each rounded to 22 bits.
    near = {"rtol": 5 * 2.0**-22, "atol": 5 * (0.05 * 2.0**-22 + 2.0**-35)}
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), **near)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        mine, theirs = optimizers[1].state.get(q, {}), optimizers[0].state.get(p, {})
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            if isinstance(value, Tensor):
                assert value.dtype == mine[name].dtype
                assert torch.equal(value, mine[name]), name


def assert_at_rest(optimizer: Optimizer, model: nn.Module) -> None:
    at_rest = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(at_rest) == len(list(model.parameters()))
    assert all(a is b for a, b in zip(at_rest, model.parameters(), strict=True))
    assert set(optimizer.state) <= set(at_rest)


def test_optimizer_state_loads_as_fp32_and_param_groups_hold_working_weights_between_steps() -> (
    None
):
    model, weights = converted()
    optimizer = Adam(model.parameters(), lr=0.01)
    weights.attach(optimizer)
    for _ in range(3):
        give_gradients(model.parameters(), 1e-6)
        step(weights, optimizer)
        assert_at_rest(optimizer, model)
    saved = copy.deepcopy(optimizer.state_dict())
    assert 0 < saved["state"][0]["exp_avg_sq"].max() < 2**-25  # zero in fp16
    fresh = Adam(model.parameters(), lr=0.01)
    weights.attach(fresh)
    fresh.load_state_dict(copy.deepcopy(saved))
    assert_at_rest(fresh, model)
    for index, p in enumerate(model.parameters()):
        assert same(fresh.state[p], saved["state"][index])


def test_param_groups_hold_working_weights_after_a_failed_step() -> None:
    model, weights = converted()
    optimizer = Adam(model.parameters(), lr=0.01)
    give_gradients(model.parameters())
    step(weights, optimizer)
    before = copy.deepcopy(model.state_dict())

    def fail(*_: Any) -> None:
        raise ArithmeticError

    optimizer.register_step_post_hook(fail)
    give_gradients(model.parameters())
    with pytest.raises(ArithmeticError):
        step(weights, optimizer)
    assert_at_rest(optimizer, model)
    for name, value in model.state_dict().items():
        if name not in (
            "body.1.weight",
            "body.1.bias",
            "wide",
        ):  # parameters that the optimizer has changed
            assert torch.equal(value, before[name])


@pytest.mark.parametrize("wrong", ["groups", "sizes", "no state"])
def test_param_groups_hold_working_weights_after_a_failed_load(wrong: str) -> None:
    model, weights = converted()
    optimizer = Adam(model.parameters(), lr=0.01)
    weights.attach(optimizer)
    give_gradients(model.parameters())
    step(weights, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    if wrong == "groups":
        state["param_groups"] *= 2
    elif wrong == "sizes":
        state["param_groups"][0]["params"].pop()
    else:
        del state["state"]
    with pytest.raises((ValueError, KeyError)):
        optimizer.load_state_dict(state)
    assert_at_rest(optimizer, model)


def test_param_groups_added_later_are_stepped_in_fp32() -> None:
    model, weights = converted()
    optimizer = SGD(model.head.parameters(), lr=2.0**-13)
    weights.attach(optimizer)
    late = model.body[2].weight
    for count in range(4):
        if count == 2:
            optimizer.add_param_group({"params": [late]})
        give_gradients(model.parameters(), 0.0)
        late.grad.fill_(1)
        before = weights.read(late)
        step(weights, optimizer)
        stepped = before - (count >= 2) * 2.0**-13
        assert torch.equal(weights.read(late), join_weight(*split_weight(stepped, torch.float16)))


def test_frozen_weight_without_gradient_does_not_change_and_has_no_stand_in() -> None:
    model, weights = converted()
    frozen = model.body[2].weight.requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    give_gradients(p for p in model.parameters() if p is not frozen)
    before, stepped = weights.read(frozen), []
    optimizer.register_step_pre_hook(lambda *_: stepped.extend(optimizer.param_groups[0]["params"]))
    step(weights, optimizer)
    assert any(each is frozen for each in stepped)
    assert torch.equal(weights.read(frozen), before)
    assert not frozen.requires_grad
    assert frozen.grad is None
