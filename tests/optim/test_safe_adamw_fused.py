"""`SafeAdamW` with its fused kernel, interpreted on the CPU."""

import pytest
import torch

from lightning_mp.optim.safe_adamw import SafeAdamW

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("clip", [None, 0.5])
def test_fused_optimizer_equals_foreach_across_a_skipped_step(clip: float | None) -> None:
    """The optimizer has two groups and three dtypes; float64 is stepped without the kernel."""
    dtypes = [torch.float32, torch.float16, torch.float64]
    ours = [torch.nn.Parameter(torch.randn(17, 3).to(dtype)) for dtype in dtypes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizers = [
        SafeAdamW([{"params": p[:1]}, {"params": p[1:], "lr": 0.1}], clip_update_rms=clip, fused=f)
        for p, f in ((ours, True), (theirs, False))
    ]
    for step in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.grad_scale = torch.tensor(8.0)
            optimizer.found_inf = torch.tensor(2.0 * (step == 1))
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-6)
        for name, value in optimizers[1].state[other].items():
            same = optimizers[0].state[mine][name]
            assert same.dtype == value.dtype
            if name != "residual":
                # Averages may cancel; three steps round terms of up to 0.1 * 5 / 8 twice each.
                torch.testing.assert_close(same, value, rtol=1e-6, atol=6 * 2**-24 * 0.1 * 5 / 8)
    assert optimizers[0].state[ours[1]]["residual"].any()
    assert optimizers[0].state[ours[0]]["step"].item() == 3
