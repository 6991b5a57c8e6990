"""Checks and guards of users' optimizers in half precision, against torch's own steps."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_mp.optim.adam_epsilon import check_adam_epsilon, guard_adam_epsilon
from lightning_mp.optim.fp32_states import keep_fp32_states, move_states_to_fp32
from lightning_mp.optim.safe_adamw import SafeAdamW

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LR = 2.0**-10
SECOND = {"square_avg", "sum"}

Make = Callable[[list[nn.Parameter]], Optimizer]

# Optimizers whose half parameters torch 2.13 cannot step with fp32 states.
REFUSED: dict[str, Make] = {
    "Adam": lambda ps: optim.Adam(ps, foreach=False),
    "Adam-foreach": lambda ps: optim.Adam(ps, foreach=True),
    "Adam-fused": lambda ps: optim.Adam(ps, fused=True),
    "Adam-eps": lambda ps: optim.Adam(ps, eps=1e-4),
    "AdamW": lambda ps: optim.AdamW(ps, amsgrad=True),
    "NAdam": lambda ps: optim.NAdam(ps),
    "RAdam": lambda ps: optim.RAdam(ps),
    "SparseAdam": lambda ps: optim.SparseAdam(ps),
    "Adamax": lambda ps: optim.Adamax(ps),
    "RMSprop-centered": lambda ps: optim.RMSprop(ps, centered=True),
    "Adagrad-foreach": lambda ps: optim.Adagrad(ps, foreach=True),
    "derived": lambda ps: Derived(ps),
}
# Optimizers that can step half parameters with fp32 states.
MOVED: dict[str, Make] = {
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=LR, foreach=False),
    "RMSprop-foreach": lambda ps: optim.RMSprop(ps, lr=LR, momentum=0.5, foreach=True),
    "Adagrad": lambda ps: optim.Adagrad(ps, lr=LR, foreach=False),
    "Adadelta": lambda ps: optim.Adadelta(ps, lr=1.0, eps=1e-9),
}
# Optimizers whose epsilon is safe, or of which nothing is known.
UNTOUCHED: dict[str, Make] = {
    "SafeAdamW": lambda ps: SafeAdamW(ps),
    "SGD": lambda ps: optim.SGD(ps, momentum=0.9),
    "Adafactor": lambda ps: optim.Adafactor(ps),
    "Adadelta": lambda ps: optim.Adadelta(ps),
    "Adamax-eps": lambda ps: optim.Adamax(ps, eps=1e-6),
    "Adam-eps-above-threshold": lambda ps: optim.Adam(ps, eps=5.5e-3),
    "declared": lambda ps: Declared(ps),
    "foreign": lambda ps: Foreign(ps),
}
# Its kernel rounded epsilon to half on a CPU before torch 2.15.
(REFUSED if torch.__version__ < "2.15" else UNTOUCHED)["Adagrad-fused"] = lambda ps: optim.Adagrad(
    ps, fused=True
)


class Derived(optim.AdamW):
    pass


class Declared(optim.Adam):
    keeps_fp32_states = True


class Foreign(Optimizer):
    """Has an epsilon of unknown use."""

    moment = "exp_avg_sq"

    def __init__(self, params: Any, eps: float = 1e-8, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        super().__init__(params, {"lr": 0.1, "eps": eps, "betas": (0.9, 0.95)})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault(self.moment, torch.zeros_like(p, dtype=self.dtype))


class ForeignLars(Foreign):
    moment = "momentum_buffer"


def half_parameter(size: int = 7, dtype: torch.dtype = FP16) -> nn.Parameter:
    return nn.Parameter(torch.randn(size).to(dtype))


def step(optimizer: Optimizer, gradient: float | Tensor, times: int = 1) -> None:
    for _ in range(times):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p) + torch.as_tensor(gradient).to(p.dtype)
        optimizer.step()


def moments(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    return {name: v for name, v in optimizer.state[parameter].items() if name != "step"}


# --- the check -----------------------------------------------------------------------------------


def test_check_reports_names_of_trainable_half_parameters_without_master_weights() -> None:
    model = nn.ModuleDict({name: nn.Linear(3, 2) for name in ("a", "b", "c", "d")})
    model["a"].half()
    model["b"].bfloat16()
    model["c"].half().requires_grad_(False)
    ignored = {model["a"].bias}
    optimizer = optim.Adam(model.parameters(), betas=(0.9, 0.95))
    found = check_adam_epsilon(optimizer, named_parameters=model.named_parameters(), ignore=ignored)
    assert [name for name, _ in found] == ["a.weight", "b.weight", "b.bias"]
    assert [report.survives for _, report in found] == [False, True, True]
    assert [report.beta2 for _, report in found] == [0.95] * 3
    assert check_adam_epsilon(optimizer)[0][0] == "param_groups[0]['params'][0]"


@pytest.mark.parametrize(
    ("make", "blow_up"),
    [
        (lambda ps: optim.RMSprop(ps), math.sqrt(2**-25 / 0.01)),
        (lambda ps: optim.Adagrad(ps), math.sqrt(2**-25)),
        (lambda ps: optim.Adadelta(ps, eps=1e-9), math.sqrt(2**-25 / 0.1)),
        (lambda ps: optim.Adamax(ps), 0.0),
        (lambda ps: optim.NAdam(ps), math.sqrt(2**-25 / 0.001)),
    ],
    ids=["RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam"],
)
def test_check_gives_the_failing_gradient_of_other_torch_optimizers(
    make: Make, blow_up: float
) -> None:
    gradient = torch.arange(0x5C00, dtype=torch.int16).view(FP16)  # all fp16 numbers up to 256
    parameter = nn.Parameter(torch.zeros_like(gradient))
    optimizer = make([parameter])
    ((_, report),) = check_adam_epsilon(optimizer)
    assert report.blow_up_gradient == pytest.approx(blow_up, rel=1e-9)
    parameter.grad = gradient
    optimizer.step()
    assert torch.equal(~parameter.isfinite(), gradient.double() <= report.blow_up_gradient)


# --- the guard -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_guard_raises_for_half_parameters_whose_optimizer_cannot_use_fp32_states(
    make: Make,
) -> None:
    """Lightning#20619."""
    optimizer = make([half_parameter()])
    with pytest.raises(ValueError, match="torch.float16 parameter") as error:
        guard_adam_epsilon(optimizer, name_of=lambda _: "tower.weight")
    for part in ("'tower.weight'", "BalancedAMP", "'keep'", type(optimizer).__name__):
        assert part in str(error.value)
    assert ("use `SafeAdamW`" in str(error.value)) == isinstance(optimizer, optim.Adam)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("others", [(), ("amsgrad",), ("differentiable",), ("maximize",)])
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
def test_safe_adamw_accepts_the_arguments_that_the_guard_recommends(
    kind: Any, others: tuple[str, ...], fused: bool
) -> None:
    if fused and "differentiable" in others:
        others = ()  # torch refuses the two together
    options = {"fused": fused, **dict.fromkeys(others, True)}
    parameter = half_parameter()
    optimizer = kind([parameter], lr=1e-3, **options)
    with pytest.raises(ValueError, match="Alternatively, use `SafeAdamW`") as error:
        guard_adam_epsilon(optimizer)
    advice = str(error.value).split("use `SafeAdamW`")[1].split(". ")[0]
    kept = {name: value for name, value in options.items() if f"`{name}`" not in advice}
    guard_adam_epsilon(SafeAdamW([parameter], lr=1e-3, **kept))
    assert guard_adam_epsilon(optimizer, "keep") == []


def test_guard_error_names_the_gradient_that_would_blow_up() -> None:
    for beta2, threshold in ((0.999, "0.00546"), (0.95, "0.000772"), (0.9999, "0.0173")):
        optimizer = optim.AdamW([half_parameter()], betas=(0.9, beta2))
        with pytest.raises(ValueError, match=f"<= {threshold} "):
            guard_adam_epsilon(optimizer)


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_guard_accepts_master_weights_and_frozen_bf16_and_fp32_parameters(make: Make) -> None:
    has_master = half_parameter()
    frozen = half_parameter().requires_grad_(False)
    for parameter in (has_master, frozen, half_parameter(dtype=BF16), half_parameter(dtype=FP32)):
        optimizer = make([parameter])
        before = str(optimizer.state_dict())
        assert guard_adam_epsilon(optimizer, ignore={has_master}) == []
        assert str(optimizer.state_dict()) == before


@pytest.mark.parametrize("make", UNTOUCHED.values(), ids=UNTOUCHED)
def test_guard_leaves_other_optimizers_untouched(make: Make) -> None:
    parameter = half_parameter()
    optimizer = make([parameter])
    before = copy.deepcopy(optimizer.state_dict())
    assert guard_adam_epsilon(optimizer) == []
    assert str(optimizer.state_dict()) == str(before)
    step(optimizer, 1e-2)  # the first step creates the states
    if not isinstance(optimizer, Foreign):
        assert guard_adam_epsilon(optimizer) == []
        assert parameter.isfinite().all()


@pytest.mark.parametrize("is_late", [False, True], ids=["before-first-step", "after-steps"])
@pytest.mark.parametrize("make", MOVED.values(), ids=MOVED)
def test_guard_moves_states_to_fp32_if_the_optimizer_supports_them(
    make: Make, is_late: bool
) -> None:
    parameter = half_parameter(33)
    optimizer = make([parameter])
    if is_late:
        step(optimizer, 0.25)
    reference = nn.Parameter(parameter.detach().double())
    expected = make([reference])
    for name, value in optimizer.state[parameter].items():
        expected.state[reference][name] = value.to(torch.float64 if value.ndim else FP32, copy=True)
    guard_adam_epsilon(optimizer)
    gradients = torch.cat([torch.zeros(3), torch.logspace(-7, 0, 30)]).half()
    for _ in range(3):
        step(optimizer, gradients)
        step(expected, gradients)
    assert {v.dtype for v in moments(optimizer, parameter).values()} == {FP32}
    for name, value in optimizer.state[parameter].items():
        wanted = expected.state[reference][name]
        torch.testing.assert_close(value.double(), wanted.double(), rtol=1e-5, atol=0)
    assert parameter.dtype == FP16
    torch.testing.assert_close(parameter.double(), reference, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("make", MOVED.values(), ids=MOVED)
def test_guard_keeps_moved_states_in_fp32_through_checkpoints(make: Make) -> None:
    parameter = half_parameter()
    optimizer = make([parameter])
    guard_adam_epsilon(optimizer)
    step(optimizer, 3e-6, times=2)
    saved = copy.deepcopy(optimizer.state_dict())

    twin = nn.Parameter(parameter.detach().clone())
    resumed = make([twin])
    guard_adam_epsilon(resumed)
    resumed.load_state_dict(saved)
    for name, value in optimizer.state[parameter].items():
        assert resumed.state[twin][name].dtype == FP32
        assert torch.equal(resumed.state[twin][name], value)
        assert name == "step" or resumed.state[twin][name] is not saved["state"][0][name]
    assert all((resumed.state[twin][name] > 0).all() for name in SECOND & set(saved["state"][0]))
    for each in (optimizer, resumed):
        step(each, 1e-3)
    assert torch.equal(parameter, twin)


def test_adafactor_does_not_support_fp32_states_of_half_parameters() -> None:
    parameter = half_parameter()
    optimizer = optim.Adafactor([parameter])
    assert not move_states_to_fp32(optimizer, optimizer.param_groups[0], parameter)
    assert not optimizer.state


def test_foreach_adagrad_multiplies_gradients_by_the_learning_rate_in_half() -> None:
    gradient = torch.tensor([2.9e-5, 3.1e-5]).half()
    parameter = nn.Parameter(torch.zeros(2, dtype=FP16))
    optimizer = optim.Adagrad([parameter], lr=1e-3, foreach=True)
    optimizer.state[parameter]["sum"] = torch.zeros(2)
    step(optimizer, gradient)
    assert parameter[0] == 0
    assert parameter[1] < -1e-3


def test_guard_keeps_existing_fp32_states_through_checkpoints() -> None:
    parameter = half_parameter()
    optimizer = optim.Adagrad([parameter])
    for handle in guard_adam_epsilon(optimizer):  # the end of a first fit does the same
        handle.remove()
    guard_adam_epsilon(optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[parameter]["sum"].dtype == FP32


def test_guard_moves_half_states_of_fp32_parameters() -> None:
    parameter = half_parameter()
    optimizer = optim.Adam([parameter])
    step(optimizer, 0.5)
    v = optimizer.state[parameter]["exp_avg_sq"]
    parameter.data = parameter.data.float()
    with pytest.raises(RuntimeError, match="dtype"):
        step(optimizer, 0.5)
    guard_adam_epsilon(optimizer)
    assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], v.float())
    step(optimizer, 0.5)
    assert parameter.isfinite().all()


def test_guard_judges_other_libraries_optimizers_by_their_states() -> None:
    refused = Foreign([half_parameter()])
    step(refused, 0.0)
    with pytest.raises(ValueError, match="0.000772"):
        guard_adam_epsilon(refused)
    for known_good in (
        Foreign([half_parameter()], dtype=FP32),
        Foreign([half_parameter()], eps=1e-6),  # epsilon may be inside the root
        Foreign([half_parameter()], eps=0.0),
        Foreign([half_parameter(dtype=BF16)]),
        ForeignLars([half_parameter()]),
    ):
        step(known_good, 0.0)
        states = {k: v.dtype for k, v in known_good.state.copy().popitem()[1].items()}
        assert guard_adam_epsilon(known_good) == []
        assert {k: v.dtype for k, v in known_good.state.copy().popitem()[1].items()} == states


def test_guard_never_moves_half_states_of_other_libraries_optimizers() -> None:
    parameter = half_parameter(dtype=FP32)
    optimizer = Foreign([parameter], dtype=FP16)
    step(optimizer, 0.0)
    guard_adam_epsilon(optimizer)
    assert optimizer.state[parameter]["exp_avg_sq"].dtype == FP16


def test_guard_with_a_number_sets_every_scalar_epsilon_permanently() -> None:
    a, b = half_parameter(dtype=FP32), half_parameter(dtype=FP32)
    optimizer = optim.AdamW([{"params": [a]}, {"params": [b], "eps": 1e-5}])
    saved = copy.deepcopy(optimizer.state_dict())
    handles = guard_adam_epsilon(optimizer, 1e-6)
    assert [group["eps"] for group in optimizer.param_groups] == [1e-6, 1e-6]
    optimizer.load_state_dict(saved)
    assert [group["eps"] for group in optimizer.param_groups] == [1e-6, 1e-6]
    optimizer.add_param_group({"params": [half_parameter(dtype=FP32)]})
    assert optimizer.param_groups[2]["eps"] == 1e-6
    for handle in handles:
        handle.remove()
    del optimizer.param_groups[2]
    optimizer.load_state_dict(saved)
    assert [group["eps"] for group in optimizer.param_groups] == [1e-8, 1e-5]


def test_guard_with_a_number_ignores_non_scalar_epsilons_and_then_checks() -> None:
    adafactor = optim.Adafactor([half_parameter(dtype=FP32)])
    guard_adam_epsilon(adafactor, 1e-6)
    assert adafactor.param_groups[0]["eps"] == (None, 1e-3)
    sgd = optim.SGD([half_parameter(dtype=FP32)])
    guard_adam_epsilon(sgd, 1e-6)
    assert "eps" not in sgd.param_groups[0]
    guard_adam_epsilon(optim.Adam([half_parameter()]), 6e-3)
    with pytest.raises(ValueError, match="54.6 times"):
        guard_adam_epsilon(optim.Adam([half_parameter()]), 1e-4)


def test_guard_with_keep_does_nothing() -> None:
    optimizer = optim.RMSprop([half_parameter()])
    assert guard_adam_epsilon(optimizer, "keep") == []
    assert guard_adam_epsilon(optim.Adam([half_parameter()]), "keep") == []
    assert not optimizer.state


@pytest.mark.parametrize("wrong", [0.0, -1e-8, math.nan, math.inf, True, "fp32", None])
def test_guard_raises_for_an_invalid_epsilon(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"adam_epsilon={wrong!r}"):
        guard_adam_epsilon(optim.Adam([half_parameter()]), wrong)


def test_keep_fp32_states_widens_saved_half_states_until_its_handles_are_removed() -> None:
    parameter = half_parameter()
    optimizer = optim.RMSprop([parameter])
    step(optimizer, 0.5)
    saved = copy.deepcopy(optimizer.state_dict())
    handles = keep_fp32_states(optimizer)
    optimizer.load_state_dict(saved)
    assert optimizer.state[parameter]["square_avg"].dtype == FP32
    assert torch.equal(
        optimizer.state[parameter]["square_avg"], saved["state"][0]["square_avg"].float()
    )
    for handle in handles:
        handle.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[parameter]["square_avg"].dtype == FP16
