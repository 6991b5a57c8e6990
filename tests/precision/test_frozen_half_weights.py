"""Half weights without residuals: frozen ones, and those of other roundings than "kahan"."""

import pytest
import torch
from torch import Tensor, nn

from lightning_mp.precision._weights.half_weights import HalfWeights, WriteBack

VALUE = 1 + 2.0**-14  # between two fp16 numbers


def converted(
    layer: nn.Linear, write_back: WriteBack = "kahan"
) -> tuple[dict[str, Tensor], HalfWeights]:
    """Convert a layer, and load another state into it."""
    weights = HalfWeights(torch.float16, write_back)
    weights.convert(layer)
    state = {name: torch.full(p.shape, VALUE) for name, p in layer.named_parameters()}
    return state, weights


@pytest.mark.parametrize("came_as", [torch.float16, torch.bfloat16])
def test_frozen_half_weights_return_as_they_came_after_loading_their_own_values(
    came_as: torch.dtype,
) -> None:
    layer = nn.Linear(3, 2).to(came_as).requires_grad_(False)
    state, weights = converted(layer)
    state = {name: value.to(came_as).float() for name, value in state.items()}
    layer.load_state_dict(state)
    weights.release()
    assert {p.dtype for p in layer.parameters()} == {came_as}
    assert all(torch.equal(p.float(), state[n]) for n, p in layer.named_parameters())


@pytest.mark.parametrize("half_before", [False, True])
def test_frozen_half_weights_keep_the_bits_of_loaded_fp32_values(half_before: bool) -> None:
    layer = nn.Linear(3, 2).requires_grad_(False)
    state, weights = converted(layer.half() if half_before else layer)
    layer.load_state_dict(state)
    weights.release()
    assert all(torch.equal(p, state[n]) for n, p in layer.named_parameters())


@pytest.mark.parametrize("write_back", ["nearest", "stochastic"])
def test_loaded_values_are_rounded_without_residuals(write_back: WriteBack) -> None:
    layer = nn.Linear(3, 2).bfloat16()
    state, weights = converted(layer, write_back)
    layer.load_state_dict(state)
    weights.release()
    assert {p.dtype for p in layer.parameters()} == {torch.float32}  # 11 bits do not fit bf16
    assert all(torch.equal(p, torch.ones_like(p)) for p in layer.parameters())


def test_frozen_weights_have_no_residual_until_they_are_trained() -> None:
    layer = nn.Linear(3, 2).requires_grad_(False)
    _, weights = converted(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=2.0**-14)
    for is_trained in (False, True):
        layer.requires_grad_(is_trained)
        before = {p: weights.read(p) for p in layer.parameters()}
        for p in layer.parameters():
            p.grad = torch.full_like(p, -1).float() if is_trained else None
        with weights.stepping(optimizer):
            optimizer.step()
        for p, value in before.items():
            assert torch.equal(weights.read(p), value + 2.0**-14 * is_trained)
            assert (weights._ledger.open(p).beside is None) != is_trained


@pytest.mark.parametrize("is_last", [True, False])
def test_write_to_a_tensor_of_the_state_dict_counts_unless_the_weight_was_written_later(
    is_last: bool,
) -> None:
    layer = nn.Linear(3, 2)
    _, weights = converted(layer)
    lent = layer.state_dict()["weight"]
    assert layer.state_dict()["weight"] is lent  # so that no write is lost
    lent.fill_(VALUE)
    if not is_last:
        with torch.no_grad():
            layer.weight.fill_(0.5)
    weights.settle()
    expected = torch.full((2, 3), VALUE if is_last else 0.5)
    # The residual of a weight that was written to in half stays, below half of its last bit.
    torch.testing.assert_close(weights.read(layer.weight), expected, rtol=0, atol=2.0**-13)


def test_step_starts_from_a_value_that_was_written_after_the_forward() -> None:
    layer = nn.Linear(3, 2)
    _, weights = converted(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer.state_dict()["weight"].fill_(VALUE)
    layer.weight.grad = torch.full((2, 3), -1.0)
    with weights.stepping(optimizer):
        optimizer.step()
    assert torch.equal(weights.read(layer.weight), torch.full((2, 3), VALUE + 1))


def test_partial_states_load_and_wrong_shapes_are_refused_as_in_torch() -> None:
    layer = nn.Linear(3, 2)
    layer.register_parameter("wide", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    state, weights = converted(layer)
    layer.state_dict()["bias"].fill_(VALUE)
    layer.load_state_dict({name: state[name] for name in ("weight", "wide")}, strict=False)
    with pytest.raises(RuntimeError, match=r"size mismatch for weight: copying a param"):
        layer.load_state_dict({"weight": torch.ones(4, 3)}, strict=False)
    weights.settle()
    weights.release()
    assert [p.dtype for p in layer.parameters()] == [torch.float32, torch.float32, torch.float64]
    assert all((p == VALUE).all() for p in layer.parameters())


def test_single_writes_and_writes_to_scalars_are_not_warned_of() -> None:
    holder = nn.Module()
    holder.scale = nn.Parameter(torch.tensor(2.0))
    holder.codes = nn.Parameter(torch.ones(3), requires_grad=False)
    weights = HalfWeights(torch.float16)
    weights.convert(holder)
    with torch.no_grad():
        weights.settle()
        holder.codes.fill_(0.5)
        for _ in range(3):
            holder.scale.clamp_(max=1)
            weights.settle()  # a warning is an error in tests


def test_exposed_weights_show_writes_to_tensors_of_the_state_dict() -> None:
    layer = nn.Linear(3, 2)
    _, weights = converted(layer)
    layer.state_dict()["weight"].fill_(VALUE)
    with weights.exposed(layer):
        layer.weight.data.add_(1)
    assert torch.equal(weights.read(layer.weight), torch.full((2, 3), VALUE + 1))
