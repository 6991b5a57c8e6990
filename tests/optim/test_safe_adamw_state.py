"""State dicts, copies and pickles of `SafeAdamW`."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch

from lightning_mp.optim.safe_adamw import SafeAdamW

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [*HALVES, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


def train(optimizer: torch.optim.Optimizer, seed: int, num_steps: int = 4) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = torch.randn(parameter.shape, generator=generator) * 1e-3
                parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def parameters(*dtypes: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(7, 3).to(dtype)) for dtype in dtypes]


def copies(originals: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().clone()) for p in originals]


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("write_back", ["kahan", "nearest", "stochastic"])
@pytest.mark.parametrize("foreach", [True, False])
def test_resumed_run_is_bitwise_equal(write_back: str, foreach: bool) -> None:
    arguments = {"lr": 1e-3, "write_back": write_back, "foreach": foreach}
    straight = parameters(*DTYPES)
    optimizer = SafeAdamW(straight, **arguments)
    train(optimizer, seed=1)
    resumed = copies(straight)
    loaded = SafeAdamW(resumed, **arguments)
    loaded.load_state_dict(through_a_file(optimizer.state_dict()))
    train(optimizer, seed=2)
    train(loaded, seed=2)
    for one, other in zip(straight, resumed, strict=True):
        assert torch.equal(one, other)
        assert optimizer.state[one].keys() == loaded.state[other].keys()
        for name, value in optimizer.state[one].items():
            assert loaded.state[other][name].dtype == value.dtype
            assert torch.equal(loaded.state[other][name], value)


@pytest.mark.parametrize("dtype", HALVES)
def test_load_state_dict_keeps_small_second_moments(dtype: torch.dtype) -> None:
    """torch casts states to the dtype of the weight; in fp16, values below 6e-8 become 0."""
    (parameter,) = parameters(dtype)
    optimizer = SafeAdamW([parameter])
    train(optimizer, seed=1)
    optimizer.state[parameter]["exp_avg_sq"].fill_(1.2345678e-12)
    fresh = SafeAdamW(copies([parameter]))
    fresh.load_state_dict(optimizer.state_dict())
    (state,) = fresh.state.values()
    assert state["exp_avg_sq"].dtype == state["exp_avg"].dtype == torch.float32
    assert state["residual"].dtype == dtype
    assert torch.equal(state["exp_avg_sq"], torch.full((7, 3), 1.2345678e-12))


def test_loaded_states_are_copies() -> None:
    (parameter,) = parameters(torch.float32)
    optimizer = SafeAdamW([parameter])
    train(optimizer, seed=1)
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved["state"][0])
    other = SafeAdamW(copies([parameter]))
    other.load_state_dict(saved)
    train(other, seed=2)
    assert all(torch.equal(saved["state"][0][name], value) for name, value in before.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_ours_first", [True, False])
def test_states_are_exchangeable_with_torch_adamw(dtype: torch.dtype, is_ours_first: bool) -> None:
    kinds = [SafeAdamW, torch.optim.AdamW] if is_ours_first else [torch.optim.AdamW, SafeAdamW]
    straight = parameters(dtype, dtype)
    first = kinds[0](straight, lr=3e-3, weight_decay=0.2)
    train(first, seed=1)
    moved = copies(straight)
    second = kinds[1](moved)  # loading replaces its arguments
    second.load_state_dict(through_a_file(first.state_dict()))
    train(first, seed=2)
    train(second, seed=2)
    for one, other in zip(straight, moved, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        assert second.state[other]["step"].item() == 8


@pytest.mark.parametrize("dtype", HALVES)
def test_half_states_of_torch_adamw_are_widened(dtype: torch.dtype) -> None:
    theirs = parameters(dtype)
    expected = torch.optim.AdamW(theirs)
    for parameter in theirs:
        parameter.grad = torch.full_like(parameter, 0.5)
    expected.step()
    ours = copies(theirs)
    optimizer = SafeAdamW(ours)
    optimizer.load_state_dict(expected.state_dict())
    old, new = expected.state[theirs[0]], optimizer.state[ours[0]]
    for name in ("exp_avg", "exp_avg_sq"):
        assert old[name].dtype == dtype
        assert new[name].dtype == torch.float32
        assert torch.equal(old[name].float(), new[name])
    train(optimizer, seed=2)
    assert optimizer.state[ours[0]]["residual"].dtype == dtype
    assert ours[0].isfinite().all()


def test_machine_options_and_options_missing_in_a_checkpoint_keep_their_values() -> None:
    theirs = parameters(torch.float32)
    expected = torch.optim.AdamW(theirs, lr=0.25, betas=(0.5, 0.6), fused=True)
    train(expected, seed=1)
    optimizer = SafeAdamW(copies(theirs), clip_update_rms=0.7, rule="atan2", foreach=False)
    optimizer.load_state_dict(expected.state_dict())
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"]) == (0.25, (0.5, 0.6))
    assert (group["clip_update_rms"], group["rule"]) == (0.7, "atan2")
    assert (group["foreach"], group["fused"], group["write_back"]) == (False, None, "kahan")
    assert group.keys() == SafeAdamW(parameters(torch.float32)).param_groups[0].keys()
    train(optimizer, seed=2)


def test_tensor_betas_of_torch_adamw_become_numbers() -> None:
    theirs = parameters(torch.float32)
    expected = torch.optim.AdamW(theirs, betas=(torch.tensor(0.5), torch.tensor(0.75)))
    train(expected, seed=1)
    optimizer = SafeAdamW(copies(theirs))
    optimizer.load_state_dict(expected.state_dict())
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    train(expected, seed=2)
    train(optimizer, seed=2)
    torch.testing.assert_close(optimizer.param_groups[0]["params"], theirs)


def test_checkpoint_with_another_write_back_overrides_the_option() -> None:
    (parameter,) = parameters(torch.float16)
    optimizer = SafeAdamW([parameter], write_back="stochastic")
    train(optimizer, seed=1)
    other = SafeAdamW(copies([parameter]))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["write_back"] == "stochastic"
    assert other.param_groups[0]["rounding_step"] == 4


@pytest.mark.parametrize(("saved", "loaded"), [(HALVES[0], HALVES[1]), (HALVES[0], torch.float32)])
def test_residuals_of_another_dtype_than_the_weight_are_dropped(
    saved: torch.dtype, loaded: torch.dtype
) -> None:
    (parameter,) = parameters(saved)
    optimizer = SafeAdamW([parameter])
    train(optimizer, seed=1)
    other_parameter = torch.nn.Parameter(parameter.detach().to(loaded))
    other = SafeAdamW([other_parameter])
    other.load_state_dict(optimizer.state_dict())
    assert "residual" not in other.state[other_parameter]
    train(other, seed=2)
    assert ("residual" in other.state[other_parameter]) == (loaded in HALVES)


def test_step_counts_of_old_checkpoints_become_tensors() -> None:
    (parameter,) = parameters(torch.float16)
    optimizer = SafeAdamW([parameter])
    train(optimizer, seed=1)
    saved = optimizer.state_dict()
    saved["state"][0] = {**saved["state"][0], "step": 4}
    other = SafeAdamW(copies([parameter]))
    other.load_state_dict(saved)
    train(other, seed=2)
    (state,) = other.state.values()
    assert state["step"].dtype == torch.float32
    assert state["step"].item() == 8


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_and_pickles_continue_bitwise_equal(copied: Any) -> None:
    optimizer = SafeAdamW(
        parameters(*DTYPES), lr=1e-2, clip_update_rms=0.5, write_back="stochastic"
    )
    train(optimizer, seed=1)
    other = copied(optimizer)
    train(optimizer, seed=2)
    train(other, seed=2)
    pairs = zip(*(o.param_groups[0]["params"] for o in (optimizer, other)), strict=True)
    for one, same in pairs:
        assert one is not same
        assert torch.equal(one, same)
    # A copy also follows the protocol of GradScaler.
    other.found_inf = torch.tensor(1.0)
    before = [p.detach().clone() for p in other.param_groups[0]["params"]]
    train(other, seed=3)
    assert all(
        torch.equal(b, p) for b, p in zip(before, other.param_groups[0]["params"], strict=True)
    )
    assert other._step_supports_amp_scaling


def test_load_hooks_see_plain_tensors_and_may_replace_the_state() -> None:
    (parameter,) = parameters(torch.float16)
    optimizer = SafeAdamW([parameter])
    train(optimizer, seed=1)
    other = SafeAdamW(copies([parameter]))
    seen = []

    def replace(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(state_dict["state"][0]["exp_avg_sq"].dtype)
        filled = {**state_dict["state"][0], "exp_avg_sq": torch.full((7, 3), 1e-20)}
        return {**state_dict, "state": {0: filled}}

    other.register_load_state_dict_pre_hook(replace)
    other.register_load_state_dict_post_hook(
        lambda o: seen.append(next(iter(o.state.values()))["exp_avg_sq"].dtype)
    )
    other.load_state_dict(optimizer.state_dict())
    assert seen == [torch.float32, torch.float32]
    assert torch.equal(other.state_dict()["state"][0]["exp_avg_sq"], torch.full((7, 3), 1e-20))
    assert len(other._optimizer_load_state_dict_pre_hooks) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"amsgrad": True}, "amsgrad=True"),
        ({"decoupled_weight_decay": False, "weight_decay": 0.1}, "weight_decay=0.1"),
    ],
)
def test_loading_states_with_unsupported_options_raises(
    change: dict[str, object], message: str
) -> None:
    theirs = parameters(torch.float32)
    saved = torch.optim.AdamW(theirs).state_dict()
    saved["param_groups"][0].update(change)
    optimizer = SafeAdamW(theirs)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    optimizer.load_state_dict(
        torch.optim.Adam(theirs).state_dict()
    )  # Adam's default has no weight decay
    assert optimizer.param_groups[0]["weight_decay"] == 0


def test_loading_states_of_other_groups_raises_the_error_of_torch() -> None:
    one, two = parameters(torch.float32, torch.float32)
    saved = SafeAdamW([one]).state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        SafeAdamW([{"params": [one]}, {"params": [two]}]).load_state_dict(saved)
    with pytest.raises(ValueError, match="doesn't match the size"):
        SafeAdamW([one, two]).load_state_dict(saved)
