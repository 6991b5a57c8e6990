"""A global batch has no name twice, and an epoch has every row once, consistently on all ranks."""

from collections import Counter

import numpy as np
import pytest
import torch

from examples.glyph_clip.sampler import RowSampler, TwinFreeSampler


@pytest.fixture
def name_ids() -> np.ndarray:
    random = np.random.default_rng(3)
    return random.permutation(np.repeat(np.arange(700), random.integers(1, 13, size=700)))


def global_batches(name_ids, world_size, epoch, batch_size=256, seed=0):
    by_rank = []
    for rank in range(world_size):
        sampler = TwinFreeSampler(
            name_ids, batch_size=batch_size, num_replicas=world_size, rank=rank, seed=seed
        )
        sampler.set_epoch(epoch)
        by_rank.append(list(sampler))
        assert len(by_rank[-1]) == len(sampler)
    return list(zip(*by_rank, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_global_batch_several_epochs_holds_no_name_twice(name_ids, world_size):
    for epoch in range(4):
        for parts in global_batches(name_ids, world_size, epoch):
            names = name_ids[torch.cat(parts).numpy()]
            assert len(set(names.tolist())) == len(names) >= 256


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_epoch_serves_every_row_exactly_once(name_ids, world_size):
    batches = global_batches(name_ids, world_size, epoch=1)
    rows = torch.cat([part for parts in batches for part in parts])
    assert sorted(rows.tolist()) == list(range(len(name_ids)))
    sizes = [len(part) for parts in batches for part in parts]
    assert max(sizes) - min(sizes) <= 2


def test_order_follows_seed_and_epoch(name_ids):
    def order(**keywords):
        batches = global_batches(name_ids, world_size=1, **keywords)
        return torch.cat([parts[0] for parts in batches]).tolist()

    assert order(epoch=1, seed=5) == order(epoch=1, seed=5)
    assert order(epoch=1, seed=5) != order(epoch=2, seed=5)
    assert order(epoch=1, seed=5) != order(epoch=1, seed=6)


def test_rows_of_a_name_meet_other_names_each_epoch(name_ids):
    first, second = (global_batches(name_ids, 1, epoch)[0][0] for epoch in (0, 1))
    assert len(set(first.tolist()) & set(second.tolist())) < len(first) / 2


def test_name_with_more_rows_than_batches_raises():
    name_ids = np.repeat(np.arange(10), 5)
    with pytest.raises(ValueError, match="one name has 5 rows, but an epoch only 4 batches"):
        TwinFreeSampler(name_ids, batch_size=12)


@pytest.mark.parametrize(("batch_size", "num_replicas"), [(51, 1), (0, 1), (1, 2)])
def test_invalid_batch_size_raises(batch_size, num_replicas):
    with pytest.raises(ValueError, match=r"TwinFreeSampler\(batch_size="):
        TwinFreeSampler(np.arange(50), batch_size=batch_size, num_replicas=num_replicas)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_row_sampler_serves_each_row_once_without_padding(world_size):
    rows = []
    for rank in range(world_size):
        sampler = RowSampler(10, batch_size=4, num_replicas=world_size, rank=rank)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        rows += [row for batch in batches for row in batch.tolist()]
    assert Counter(rows) == Counter(range(10))
