"""`SafeAdamW` over sharded parameters (DTensor), as FSDP 2 has them."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_mp.optim.safe_adamw import SafeAdamW
from tests.processes import run_ranks

DTYPES = [torch.float32, torch.float16]


def make_values() -> list[torch.Tensor]:
    """Return three weights of each dtype, which `train_on_rank` shards over different meshes."""
    torch.manual_seed(0)
    return [torch.randn(5, 3).to(dtype) for dtype in (*DTYPES, *DTYPES, *DTYPES)]


def train(values: list[torch.Tensor], meshes: list[Any], **arguments: Any) -> list[torch.Tensor]:
    """Train with gradients whose RMS differs between shards; return the whole weights."""

    def placed(tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
        placements = [Shard(0), Replicate()]
        return tensor if mesh is None else distribute_tensor(tensor, mesh, placements[: mesh.ndim])

    def gradient_of(gradient: torch.Tensor, mesh: Any) -> torch.Tensor:
        # Under tensor parallelism, gradients have other placements than weights.
        if mesh is None or step == 0:
            return placed(gradient, mesh)
        if mesh.ndim == 2:
            return distribute_tensor(gradient, mesh, [Replicate(), Replicate()])
        return DTensor.from_local(gradient / 2, mesh, [Partial()])

    weights = [
        torch.nn.Parameter(placed(v.clone(), m)) for v, m in zip(values, meshes, strict=True)
    ]
    optimizer = SafeAdamW(weights, lr=1e-2, **arguments)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for weight, value, mesh in zip(weights, values, meshes, strict=True):
            gradient = torch.randn(value.shape, generator=generator)
            gradient[0] *= 10.0**step
            weight.grad = gradient_of(gradient.to(value.dtype), mesh)
        optimizer.found_inf = torch.tensor(float(step == 2))
        optimizer.step()
    assert all(state["step"].item() == 3 for state in optimizer.state.values())
    pairs = zip(weights, meshes, strict=True)
    return [w.detach() if mesh is None else w.detach().full_tensor() for w, mesh in pairs]


def train_on_rank(rank: int, cases: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    mesh, other_mesh = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    meshes = [mesh, mesh, other_mesh, other_mesh, None, None]
    with pytest.raises(ValueError, match="sharded parameter"):
        train(make_values(), meshes, clip_update_rms=1.0, fused=True)
    return [train(make_values(), meshes, **case) for case in cases]


@pytest.mark.distributed
def test_sharded_parameters_step_like_whole_ones() -> None:
    cases = [{}, {"foreach": True, "rule": "atan2"}, {"clip_update_rms": 0.5}]
    cases += [{"clip_update_rms": 0.5, "foreach": True}]
    for results in run_ranks(train_on_rank, 2, cases):
        for case, sharded in zip(cases, results, strict=True):
            whole = train(make_values(), [None] * 6, **case)
            torch.testing.assert_close(sharded, whole, rtol=1e-6, atol=1e-6)
