"""Decisions of the loss scale for several ranks, unscaled gradients and no gradients."""

import math

import pytest
import torch

from lightning_mp import LossScaleConfig
from lightning_mp.precision.loss_scaler import LossScaler, all_reduce_found_inf
from tests.processes import run_ranks

BAD, GOOD = torch.tensor(1.0), torch.tensor(0.0)


def test_steps_without_gradients_do_not_count_toward_growth() -> None:
    scaler = LossScaler(LossScaleConfig(init_scale=4.0, growth_interval=2))
    asked: list[bool] = []

    def step(has_gradient: bool) -> float:
        def answer() -> bool:
            asked.append(has_gradient)
            return has_gradient

        assert scaler.record(GOOD, has_gradient=answer)
        scaler.update()
        return scaler.get_scale()

    assert [step(has) for has in (True, False, False, True, True)] == [4, 4, 4, 8, 8]
    assert asked == [False, False, True]  # only when a growth is due


@pytest.mark.parametrize("have", [(False, True), (True, False), (False, False)])
def test_one_optimizer_with_gradients_suffices_for_growth(have: tuple[bool, bool]) -> None:
    scaler = LossScaler(LossScaleConfig(init_scale=4.0, growth_interval=1))
    for has in have:
        scaler.record(GOOD, has_gradient=lambda has=has: has)
    assert scaler.update() == (2.0 if any(have) else 1.0)


def test_unscaled_gradients_are_checked_but_not_changed() -> None:
    scaler = LossScaler(LossScaleConfig(init_scale=1024.0))
    gradients = [torch.tensor([3.0, 5.0]), torch.tensor([7.0], dtype=torch.float64)]
    assert scaler.unscale_(gradients, scale=1.0) == 0
    assert gradients[0].tolist() == [3.0, 5.0]
    assert gradients[1].tolist() == [7.0]
    gradients[1][0] = torch.nan
    assert scaler.unscale_(gradients, scale=1.0) == 1


def _decide_on_rank(rank: int) -> list[tuple[bool, float]]:
    scaler = LossScaler(LossScaleConfig())
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2])]
    results = []
    # Ranks that overflow in each step; in the last step, ranks 0 and 1 are one group, 2 another.
    for step, bad_ranks in enumerate([[], [1], [0], [0, 1], [1]]):
        gradient = torch.full((3,), math.nan if rank in bad_ranks else 1.0)
        group = groups[rank // 2] if step == 4 else None
        is_good = scaler.record(all_reduce_found_inf(scaler.unscale_([gradient]), group))
        scaler.update()
        results.append((is_good, scaler.scale))
    return results


@pytest.mark.distributed
def test_all_ranks_skip_if_one_overflows() -> None:
    first, second, third = run_ranks(_decide_on_rank, 3)
    together = [(True, 2.0**16), (False, 2.0**15), (False, 2.0**14), (False, 2.0**13)]
    assert first == second == [*together, (False, 2.0**12)]
    assert third == [*together, (True, 2.0**13)]
    assert all_reduce_found_inf(BAD) is BAD  # without a process group
