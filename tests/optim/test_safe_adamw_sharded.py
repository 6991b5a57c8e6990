"""`SafeAdamW` over sharded parameters (DTensor), as FSDP 2 has them."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_mp.optim.safe_adamw import SafeAdamW
from tests.processes import run_ranks

DTYPES = [torch.float32, torch.float16]


def train(values: list[torch.Tensor], mesh: Any, **arguments: Any) -> list[torch.Tensor]:
    """Train with gradients whose RMS differs between shards; return the whole weights."""

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])

    weights = [torch.nn.Parameter(placed(value.clone())) for value in values]
    optimizer = SafeAdamW(weights, lr=1e-2, **arguments)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for weight, value in zip(weights, values, strict=True):
            gradient = torch.randn(value.shape, generator=generator)
            gradient[0] *= 10.0**step
            weight.grad = placed(gradient.to(value.dtype))
        optimizer.found_inf = torch.tensor(float(step == 2))
        optimizer.step()
    assert all(state["step"].item() == 3 for state in optimizer.state.values())
    return [w.detach() if mesh is None else w.detach().full_tensor() for w in weights]


def train_on_rank(rank: int, cases: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    values = [torch.randn(5, 3).to(dtype) for dtype in DTYPES]
    with pytest.raises(ValueError, match="sharded parameter"):
        train(values, mesh, clip_update_rms=1.0, write_back="stochastic")
    return [train(values, mesh, **case) for case in cases]


@pytest.mark.distributed
def test_sharded_parameters_step_like_whole_ones() -> None:
    cases = [{}, {"foreach": True, "rule": "atan2"}, {"clip_update_rms": 0.5}]
    cases += [{"clip_update_rms": 0.5, "foreach": True}]
    torch.manual_seed(0)
    values = [torch.randn(5, 3).to(dtype) for dtype in DTYPES]
    for results in run_ranks(train_on_rank, 2, cases):
        for case, sharded in zip(cases, results, strict=True):
            for one, whole in zip(sharded, train(values, None, **case), strict=True):
                torch.testing.assert_close(one, whole, rtol=1e-6, atol=1e-6)
