"""`SafeAdamW` as an optimizer of torch: closures, groups, schedulers, hooks and refusals."""

import copy
import math
from typing import Any

import pytest
import torch

from lightning_mp.optim.safe_adamw import SafeAdamW


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape).to(dtype))


def twin(original: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(original.detach().clone())


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    weight = parameter(4)
    optimizer = SafeAdamW([weight], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(50)]
    assert losses[-1] < losses[0] / 10
    assert optimizer.step() is None


def test_groups_use_their_own_arguments() -> None:
    ours = [parameter(5), parameter(5, dtype=torch.float16), parameter(2, 3)]
    theirs = [torch.nn.Parameter(p.detach().float().clone()) for p in ours]
    groups: list[dict[str, Any]] = [
        {"lr": 1e-2, "betas": (0.5, 0.9)},
        {"eps": 1e-4},
        {"weight_decay": 0.0, "maximize": True},
    ]
    optimizers = [
        kind([{"params": [p], **group} for p, group in zip(weights, groups, strict=True)], lr=0.1)
        for kind, weights in ((SafeAdamW, ours), (torch.optim.AdamW, theirs))
    ]
    for _ in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        tolerance = torch.finfo(mine.dtype).eps * 4
        torch.testing.assert_close(mine.float(), other, rtol=tolerance, atol=tolerance)


def test_maximize_equals_a_step_with_negated_gradients() -> None:
    up = parameter(7)
    down = twin(up)
    up.grad = torch.randn(7)
    down.grad = -up.grad
    SafeAdamW([up], maximize=True, clip_update_rms=0.5).step()
    SafeAdamW([down], clip_update_rms=0.5).step()
    assert torch.equal(up, down)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tensor_learning_rate_equals_a_number(
    dtype: torch.dtype, foreach: bool, shape: tuple[int, ...]
) -> None:
    weight = parameter(6, dtype=dtype)
    number = twin(weight)
    lr = torch.full(shape, 0.25)
    optimizers = [SafeAdamW([weight], lr=lr, foreach=foreach), SafeAdamW([number], lr=0.25)]
    for rate in (0.25, 0.5):
        lr.fill_(rate)  # in place, as for a captured step
        optimizers[1].param_groups[0]["lr"] = rate
        weight.grad = torch.randn_like(weight)
        number.grad = weight.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(weight, number, rtol=1e-6, atol=1e-6)


def test_learning_rate_schedule_equals_torch() -> None:
    ours = parameter(6)
    theirs = twin(ours)
    optimizers = [SafeAdamW([ours], lr=0.1), torch.optim.AdamW([theirs], lr=0.1)]
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=12) for o in optimizers
    ]
    for _ in range(10):
        ours.grad = torch.randn(6)
        theirs.grad = ours.grad.clone()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_parameters_without_gradient_are_unchanged_and_have_no_state() -> None:
    used, unused = parameter(3), parameter(3)
    before = unused.detach().clone()
    optimizer = SafeAdamW([used, unused])
    used.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(unused, before)
    assert set(optimizer.state) == {used}
    SafeAdamW([parameter(3)]).step()  # without any gradient


def test_groups_added_during_training_start_at_their_first_step() -> None:
    old, new = parameter(3), parameter(3, dtype=torch.bfloat16)
    optimizer = SafeAdamW([old], lr=1e-2, clip_update_rms=1.0)
    old.grad = torch.ones(3)
    optimizer.step()
    optimizer.add_param_group({"params": [new], "lr": 1e-3})
    new.grad = torch.ones_like(new)
    optimizer.step()
    assert optimizer.state[old]["step"].item() == 2
    assert optimizer.state[new]["step"].item() == 1
    assert optimizer.param_groups[1]["lr"] == 1e-3
    assert optimizer.param_groups[1]["clip_update_rms"] == 1.0
    with pytest.raises(ValueError, match="complex64"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2) * 1j)]})
    with pytest.raises(ValueError, match="betas"):
        optimizer.add_param_group({"params": [parameter(3)], "betas": (1.0, 0.9)})
    assert len(optimizer.param_groups) == 2


def test_step_hooks_run_around_the_step() -> None:
    weight = parameter(3)
    optimizer = SafeAdamW([weight])
    weight.grad = torch.ones(3)
    seen = []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda o, args, kwargs: seen.append(weight.detach().clone()))
    optimizer.step()
    assert len(seen) == 2
    assert not torch.equal(*seen)
    assert torch.equal(seen[1], weight)


def test_step_changes_neither_gradients_nor_graph() -> None:
    weight = parameter(3)
    optimizer = SafeAdamW([weight], maximize=True, clip_update_rms=0.1)
    weight.grad = torch.arange(3.0)
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.step()
    assert torch.equal(weight.grad, torch.arange(3.0))
    assert weight.is_leaf
    assert not any(value.requires_grad for value in optimizer.state[weight].values())


def test_sparse_gradients_raise() -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = SafeAdamW(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradient.*SparseAdam"):
        optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, r"lr=-1.0.*`lr` must be a finite number of at least 0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"lr": "1e-3"}, "lr='1e-3'"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"betas": (1.0, 0.9)}, r"betas=\(1.0, 0.9\)"),
        ({"betas": (0.9, -0.1)}, "pair of numbers of at least 0 and below 1"),
        ({"betas": (0.9,)}, "betas"),
        ({"betas": 0.9}, "betas=0.9"),
        ({"eps": -1e-8}, "eps=-1e-08"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"clip_update_rms": 0.0}, "clip_update_rms=0.0.*Leave it out"),
        ({"clip_update_rms": True}, "clip_update_rms=True"),
        ({"rule": "lion"}, "rule='lion'.*'adam', 'atan2'"),
        ({"write_back": "up"}, "write_back='up'.*'kahan', 'nearest', 'stochastic'"),
        ({"amsgrad": True}, "amsgrad=True.*clip_update_rms"),
        ({"differentiable": True}, "differentiable=True"),
        ({"foreach": True, "fused": True}, "Remove `foreach`"),
        ({"capturable": True, "write_back": "stochastic"}, "repeats its noise"),
        ({"fused": True}, "fused=True.*'cpu'.*needs CUDA"),
    ],
)
def test_error_for_argument_out_of_range_lists_accepted_values(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SafeAdamW([parameter(3)], **arguments)
    name = next(iter(arguments))
    with pytest.raises(ValueError, match=name):  # also in a group
        SafeAdamW([{"params": [parameter(3)], **arguments}])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_parameters_that_are_not_real_floats_raise(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"{dtype}.*view_as_real"):
        SafeAdamW([torch.nn.Parameter(torch.zeros(3, dtype=dtype))])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.int8])
def test_frozen_parameters_may_have_any_dtype(dtype: torch.dtype) -> None:
    quantized = torch.nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)
    trained = parameter(3)
    optimizer = SafeAdamW([quantized, trained])
    trained.grad = torch.ones(3)
    optimizer.step()
    assert list(optimizer.state) == [trained]
    if dtype.is_complex:
        quantized.requires_grad_().grad = torch.ones_like(quantized)
        with pytest.raises(ValueError, match="complex64"):
            optimizer.step()


def test_named_parameters_and_extreme_arguments_are_accepted() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = SafeAdamW(
        model.named_parameters(), lr=0, betas=[0.0, 0.0], eps=0, weight_decay=0, clip_update_rms=1
    )
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for wrong in (torch.ones(3), []):
        with pytest.raises(ValueError, match="must be a non-empty list of tensors"):
            SafeAdamW(wrong)
