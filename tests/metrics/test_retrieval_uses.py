"""`ContrastiveRecall`: logged, tracked and plotted values, collections, repeated samples."""

from typing import Any

import lightning
import matplotlib
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MetricCollection, MetricTracker

from lightning_mp import ContrastiveRecall
from tests.metrics.pairs import as_floats, compute_once, make_pairs
from tests.processes import run_ranks

RECALL = "image_to_text_recall@1"
PAIRS, WIDTH = 31, 6


def make_rows() -> tuple[Tensor, Tensor]:
    image, text, _, _ = make_pairs(PAIRS, PAIRS, WIDTH, seed=4)
    return image, image + text  # row i belongs to row i


def whole(**options: Any) -> Any:
    metric = ContrastiveRecall(**options)
    metric.update(*make_rows())
    return metric.compute()


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.recall = ContrastiveRecall(value=RECALL)

    def validation_step(self, batch: list[Tensor]) -> None:
        self.recall.update(*batch)
        self.log("recall", self.recall)


@pytest.mark.filterwarnings("ignore")
def test_value_is_logged_over_the_epoch() -> None:
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    loader = DataLoader(TensorDataset(*make_rows()), batch_size=4)
    module = Module()
    for _ in range(2):  # reset in between
        (logged,) = trainer.validate(module, loader, verbose=False)
        assert logged["recall"] == whole()[RECALL]
    assert 0 < logged["recall"] < 1


def test_tracker_finds_the_best_and_plots_are_drawn() -> None:
    matplotlib.use("agg")
    image, text = make_rows()
    for name, best in ((RECALL, 1.0), ("image_to_text_mean_rank", 1.0)):
        metric = ContrastiveRecall(value=name)
        assert metric.higher_is_better is name.endswith("@1")
        tracker = MetricTracker(metric, maximize=metric.higher_is_better)
        for candidates in (text, image, -text):
            tracker.increment()
            tracker.update(image, candidates)
        assert tracker.best_metric(return_step=True) == (best, 1)
    everything = ContrastiveRecall()
    everything.update(image, text)
    two = [torch.tensor(1.0), torch.tensor(2.0)]
    for drawn, values in ((everything, None), (metric, two)):
        figure, _ = drawn.plot(values)
        assert len(figure.axes) == 1


def _sampled(rank: int, ranks: int = 4) -> tuple[Tensor, ...]:
    index = torch.tensor(list(DistributedSampler(range(PAIRS), ranks, rank, shuffle=False)))
    image, text = make_rows()
    return image[index], text[index], index


def _on_rank(rank: int) -> list[dict[str, float]]:
    values = []
    for is_keyed in (False, True):
        metric = ContrastiveRecall(workspace_bytes=2_000)
        for part in (rank, rank + 2):  # each rank has two of four shards
            image, text, index = _sampled(part)
            keys = {"image_keys": index, "text_keys": index} if is_keyed else {}
            metric.update(image, text, index, index, **keys)
        values.append(as_floats(metric.compute()))
    return values


@pytest.mark.distributed
def test_keys_remove_repeated_samples() -> None:
    for without, keyed in run_ranks(_on_rank, 2):
        assert without["image_to_text_queries"] == PAIRS + 1  # 31 pairs for four ranks
        assert keyed == as_floats(whole())
        assert without != keyed


def test_several_texts_of_one_image_and_rows_without_keys_are_kept() -> None:
    image, text, image_ids, text_ids = make_pairs(9, 30, WIDTH)
    plain, keyed = ContrastiveRecall(), ContrastiveRecall()
    plain.update(image, text, image_ids, text_ids)
    for _ in range(2):
        keyed.update(image, text, image_ids, text_ids, image_ids, torch.arange(30))
    assert as_floats(keyed.compute()) == as_floats(plain.compute())
    values = keyed(image, text, image_ids, text_ids, image_ids, torch.arange(30))
    assert as_floats(values) == as_floats(plain.compute())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"image_keys": torch.arange(3)}, "Passed `image_keys` without `image_ids`"),
        (
            {"image_ids": torch.arange(3), "text_ids": torch.arange(3), "text_keys": torch.ones(3)},
            "Passed `text_keys` of shape",
        ),
    ],
)
def test_invalid_keys_raise(keys: dict[str, Tensor], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ContrastiveRecall().update(torch.eye(3), torch.eye(3), **keys)


def test_unknown_value_raises() -> None:
    with pytest.raises(ValueError, match=r"`value` must be one of \['image_to_text_recall@1'"):
        ContrastiveRecall(value="recall@1")


def test_metric_collection_shares_updates_and_prefixes_names() -> None:
    collection = MetricCollection(
        {"cosine": ContrastiveRecall(), "dot": ContrastiveRecall(normalize=False)}, prefix="val/"
    )
    batch, second = make_pairs(30, 50, 6), make_pairs(30, 50, 6, seed=1)
    for part in (batch, second):
        collection.update(*part[:2], image_ids=part[2], text_ids=part[3])
    both = [torch.cat(pair) for pair in zip(batch, second, strict=True)]
    values = as_floats(collection.compute())
    for name, normalize in (("cosine", True), ("dot", False)):
        expected = compute_once(*both, normalize=normalize)
        # Equal names of two members get the member's name as a prefix.
        ours = {k: v for k, v in values.items() if name in k}
        assert sorted(ours.values()) == sorted(expected.values())
