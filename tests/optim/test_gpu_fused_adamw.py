"""The fused step on a GPU, compared with torch and float64 on the same device."""

import functools
from collections.abc import Iterator

import pytest
import torch

from lightning_mp.optim._adamw import tables as adamw_tables
from lightning_mp.optim._adamw.foreach import AdamWBatch, AdamWOptions
from lightning_mp.optim._adamw.fused import fused_adamw_step
from lightning_mp.optim.safe_adamw import SafeAdamW
from tests.optim import adamw_problems
from tests.optim.adamw_problems import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    OPTIONS,
    Problem,
    agreeing_step,
    disagreement,
)

pytestmark = pytest.mark.gpu

# Whole chunks, parts of chunks, one element, no element, and many parts for clipping.
SHAPES = ((1000, 1003), (), (2, 0), (4096,), (64, 3, 7, 7), (5, 1, 5), (8_000_001,))


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


fresh = functools.partial(adamw_problems.fresh, shapes=SHAPES, device="cuda")


@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize("rule", ["adam", "atan2"])
@pytest.mark.parametrize(("half", "grad", "write_back"), DTYPES)
def test_step_agrees_with_torch_and_float64(half, grad, write_back, rule, is_clipped):
    options = {
        "write_back": write_back,
        "rule": rule,
        "clip_update_rms": 0.5 if is_clipped else None,
        "maximize": is_clipped,
        "grad_scale": torch.tensor(3.0, device="cuda"),
        "found_inf": torch.tensor(0.0, device="cuda"),
    }
    problem = fresh(half, grad, write_back)
    fused = agreeing_step(problem, **options)
    assert problem.after(fused_adamw_step, **options).is_same(fused)


@pytest.mark.parametrize("write_back", ["kahan", "stochastic"])
def test_step_with_found_inf_changes_no_bit(write_back):
    problem = fresh(FP16, FP16, write_back)
    problem.grads[0][1, 2] = torch.inf
    found_inf = torch.tensor(1.0, device="cuda")
    options = {"write_back": write_back, "clip_update_rms": 1.0, "found_inf": found_inf}
    assert problem.after(fused_adamw_step, **options).is_same(problem)


@pytest.mark.parametrize(("half", "write_back"), [(FP32, "nearest"), (BF16, "stochastic")])
def test_alignment_changes_no_bit(half, write_back):
    problem = fresh(half, half, write_back)
    options = {"write_back": write_back, "clip_update_rms": 1.0}
    aligned = problem.after(fused_adamw_step, **options)

    def off_by_one_element(tensor):
        longer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
        return longer[1:].view(tensor.shape).copy_(tensor)

    odd = problem.map(off_by_one_element)
    fused_adamw_step(odd, AdamWOptions(**OPTIONS | options))
    if write_back == "stochastic":  # the RMS is summed in another order
        assert disagreement(odd, aligned) < 1
    else:
        assert disagreement(odd, aligned) < 0.5


def test_tensor_with_more_than_2_to_the_31_elements_is_stepped_completely():
    count = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 14 * count:
        pytest.skip("needs 30 GB of memory")
    lists = [torch.zeros(count, dtype=dtype, device="cuda") for dtype in (BF16, BF16, FP32, FP32)]
    lists[1].fill_(1.0)
    step = torch.ones((), device="cuda")
    options = {"write_back": "nearest", "lr": 1.0, "weight_decay": 0.0}
    batch = AdamWBatch(*[[each] for each in lists], steps=[step])
    fused_adamw_step(batch, AdamWOptions(**OPTIONS | options))
    expected = torch.tensor(-1 / (1 + OPTIONS["eps"]), dtype=BF16).item()
    for part in lists[0].split(2**28):
        assert part.amin().item() == part.amax().item() == expected


def test_step_does_not_synchronize():
    problem = fresh(FP16, FP16)
    scale, found_inf = (torch.tensor(value, device="cuda") for value in (4.0, 0.0))
    options = {"clip_update_rms": 1.0, "grad_scale": scale, "found_inf": found_inf}
    problem.after(fused_adamw_step, **options)  # compiles
    copy = problem.copy()  # other addresses need new tables
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_adamw_step(copy, AdamWOptions(**OPTIONS | options))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("is_known", [True, False])
def test_captured_step_can_be_replayed(is_known):
    """The capture uses the kernel if a step on another stream has built its tables, else torch."""
    problem = fresh(FP16, FP16, shapes=[(1000, 17), (33,)])
    params = [torch.nn.Parameter(param) for param in problem.params]
    expected = [torch.nn.Parameter(param.detach().clone()) for param in params]
    optimizers = [SafeAdamW(each, lr=0.01, fused=True) for each in (params, expected)]
    for each in (params, expected):
        for param, grad in zip(each, problem.grads, strict=True):
            param.grad = grad.clone()
    for _ in range(2):
        optimizers[0].step()
    if not is_known:
        for param in params:
            param.grad = param.grad.clone()
    graph, before = torch.cuda.CUDAGraph(), len(adamw_tables._captured)
    with torch.cuda.graph(graph):
        optimizers[0].step()
    assert len(adamw_tables._captured) == before + is_known
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for _ in range(5):
        optimizers[1].step()
    for mine, other in zip(params, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0 if is_known else 1e-3, atol=0)


@pytest.mark.parametrize("half", [FP16, FP32])
def test_optimizer_trains_equally_with_fused_and_foreach(half):
    weights = [torch.randn(shape, device="cuda") for shape in ((170, 51), (5,), (11_000,))]
    trained = []
    for fused in (True, False):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(w.to(half)) for w in weights]
        optimizer = SafeAdamW(params, lr=0.01, fused=fused, foreach=not fused, clip_update_rms=0.7)
        for _ in range(20):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
        states = [optimizer.state[p] for p in params]
        residuals = [state["residual"] for state in states] if half == FP16 else None
        moments = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        trained.append(Problem(params, [], *moments, residuals, []))
    assert disagreement(*trained) < 5
