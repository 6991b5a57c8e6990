"""`SafeAdamW` against torch's AdamW and a float64 reference."""

import pytest
import torch

from lightning_mp.numerics.split_weights import join_weight
from lightning_mp.optim.safe_adamw import SafeAdamW
from tests.reference.adamw import AdamWReference, relative_error

SHAPES = [(7, 3), (), (1,), (129,), (5, 1, 3), (0,)]
HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def set_random_gradients(*optimized: list[torch.nn.Parameter]) -> None:
    """Give several copies of parameters the same gradients, over six orders of magnitude."""
    for same in zip(*optimized, strict=True):
        gradient = torch.randn(same[0].shape) * 10 ** (6 * torch.rand(same[0].shape) - 4)
        for parameter in same:
            parameter.grad = gradient.to(parameter.dtype)


@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"weight_decay": 0.0},
        {"maximize": True},
        {"betas": (0.0, 0.5), "eps": 1e-3},
        {"betas": (0.0, 0.0)},
        {"lr": 0.3, "weight_decay": 0.4},
    ],
    ids=lambda arguments: "-".join(arguments) or "defaults",
)
def test_safe_adamw_in_fp32_matches_torch(
    arguments: dict[str, object], foreach: bool | None
) -> None:
    ours = parameters(torch.float32)
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = SafeAdamW(ours, **arguments, foreach=foreach)
    expected = torch.optim.AdamW(theirs, **arguments)
    for _ in range(25):
        set_random_gradients(ours, theirs)
        optimizer.step()
        expected.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=5e-6, atol=5e-6)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(
                optimizer.state[mine][name], expected.state[other][name], rtol=1e-6, atol=0
            )


def test_safe_adamw_in_float64_matches_torch_to_the_last_digits() -> None:
    ours = parameters(torch.float64)
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizer, expected = SafeAdamW(ours), torch.optim.AdamW(theirs)
    for _ in range(25):
        set_random_gradients(ours, theirs)
        optimizer.step()
        expected.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-13)
        assert optimizer.state[mine]["exp_avg_sq"].dtype == torch.float64
        assert "residual" not in optimizer.state[mine]


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"clip_update_rms": 1.0},
        {"clip_update_rms": 0.3, "betas": (0.5, 0.999)},
        {"rule": "atan2"},
        {"rule": "atan2", "clip_update_rms": 0.5, "weight_decay": 0.0},
    ],
    ids=lambda arguments: "-".join(arguments) or "defaults",
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # Each of 30 steps is rounded to 24, 22 or 16 bits.
    [(torch.float32, 2e-6), (torch.float16, 1e-5), (torch.bfloat16, 4e-4)],
    ids=["fp32", "fp16", "bf16"],
)
def test_safe_adamw_matches_float64_reference(
    dtype: torch.dtype, tolerance: float, arguments: dict[str, object], foreach: bool
) -> None:
    ours = [p for p in parameters(dtype) if p.numel()]
    references = [AdamWReference(p, lr=1e-2, **arguments) for p in ours]
    optimizer = SafeAdamW(ours, lr=1e-2, **arguments, foreach=foreach)
    for _ in range(30):
        set_random_gradients(ours)
        for parameter, reference in zip(ours, references, strict=True):
            reference.step(parameter.grad)
        optimizer.step()
    for parameter, reference in zip(ours, references, strict=True):
        state = optimizer.state[parameter]
        weight = parameter.detach()
        if dtype in HALVES:
            weight = join_weight(weight, state["residual"])
        assert relative_error(weight, reference.weight, floor=1.0) < tolerance
        assert relative_error(state["exp_avg"], reference.exp_avg, floor=1.0) < 5e-6
        assert relative_error(state["exp_avg_sq"], reference.exp_avg_sq) < 2e-6


@pytest.mark.parametrize("scale", [2.0**-30, 2.0**20])
def test_atan2_steps_are_invariant_to_gradient_scale(scale: float) -> None:
    ours, scaled = parameters(torch.float32), parameters(torch.float32)
    torch._foreach_copy_([p.detach() for p in scaled], [p.detach() for p in ours])
    optimizers = [SafeAdamW(group, rule="atan2") for group in (ours, scaled)]
    for _ in range(5):
        set_random_gradients(ours, scaled)
        for parameter in scaled:
            parameter.grad *= scale
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, scaled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_atan2_steps_at_the_extremes_are_one_and_two_learning_rates() -> None:
    """The update is lr if m = sqrt(v), and 1.27 pi / 2 = 2 lr if v is 0."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = SafeAdamW([parameter], lr=1.0, rule="atan2", betas=(0.0, 0.999), weight_decay=0.0)
    parameter.grad = torch.ones(2)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((2,), -1.0), rtol=3e-3, atol=0)
    optimizer.state[parameter]["exp_avg_sq"].zero_()
    optimizer.state[parameter]["step"].fill_(1e7)
    before = parameter.detach().clone()
    parameter.grad = torch.full((2,), 1e-24)  # the square is 0
    optimizer.step()
    torch.testing.assert_close(
        before - parameter.detach(), torch.full((2,), 1.995), rtol=1e-3, atol=0
    )


def test_bias_correction_of_first_steps_is_exact_in_fp32() -> None:
    """1 - 0.999**1 in fp32 has an error of 5e-5, and its root half of this error."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = SafeAdamW([parameter], lr=1.0, weight_decay=0.0)
    parameter.grad = torch.ones(1)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([-1.0]), rtol=3e-7, atol=0)


def test_gradients_of_another_dtype_keep_their_precision() -> None:
    """Half weights may have fp32 gradients, for example accumulated ones."""
    weight = torch.nn.Parameter(torch.ones(5, dtype=torch.float16))
    gradient = torch.randn(5) * 1e-9  # 0 in fp16
    weight.grad_dtype = torch.float32
    weight.grad = gradient
    optimizer = SafeAdamW([weight])
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], gradient * 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_strided_parameters_step_as_contiguous_ones(dtype: torch.dtype) -> None:
    values = torch.randn(2, 3, 5, 4).to(dtype)
    last = torch.nn.Parameter(values.clone().to(memory_format=torch.channels_last))
    first = torch.nn.Parameter(values.clone())
    optimizers = [SafeAdamW([p], lr=0.1, clip_update_rms=0.5) for p in (last, first)]
    for _ in range(3):
        set_random_gradients([last], [first])
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(last, first)
    assert optimizers[0].state[last]["exp_avg"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("arguments", [{}, {"clip_update_rms": 1.0}, {"rule": "atan2"}])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_small_tensors_step_together_as_one_by_one(
    dtype: torch.dtype, arguments: dict[str, object]
) -> None:
    shapes = [(3, 5), (70_000,), (60_000,), (), (50_000,), (40_000,), (129,), (4, 1)]
    together = [torch.nn.Parameter((0.02 * torch.randn(shape)).to(dtype)) for shape in shapes]
    single = [torch.nn.Parameter(p.detach().clone()) for p in together]
    optimizers = [
        SafeAdamW(together, lr=1e-2, **arguments),
        SafeAdamW(single, lr=1e-2, foreach=False, **arguments),
    ]
    for _ in range(3):
        set_random_gradients(together, single)
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(together, single, strict=True):
        # A vectorized expm1 may differ in its last bit, which rounds a step count's correction.
        torch.testing.assert_close(mine, other, rtol=4 * torch.finfo(dtype).eps, atol=0)
        torch.testing.assert_close(
            optimizers[0].state[mine]["exp_avg"],
            optimizers[1].state[other]["exp_avg"],
            rtol=0,
            atol=0,
        )
