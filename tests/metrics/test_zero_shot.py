"""`ZeroShotAccuracy` against CLIP's recipe in float64, on one process and on two ranks."""

from typing import Any

import lightning
import matplotlib
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection, MetricTracker

from lightning_mp import ZeroShotAccuracy
from tests.processes import run_ranks

CLASSES, PROMPTS, WIDTH, IMAGES = 7, 3, 12, 101


def make_data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, WIDTH, generator=generator)
    class_ids = torch.arange(CLASSES).repeat(PROMPTS)
    prompts = centers[class_ids] + torch.randn(len(class_ids), WIDTH, generator=generator)
    target = torch.randint(CLASSES, (IMAGES,), generator=generator)
    images = centers[target] + 1.5 * torch.randn(IMAGES, WIDTH, generator=generator)
    return prompts.to(dtype) * 3, class_ids, images.to(dtype), target


def recipe(prompts: Tensor, class_ids: Tensor, images: Tensor, target: Tensor, k: int) -> float:
    """Return top-k accuracies as in CLIP's notebook: normalize, average, normalize, multiply."""
    classes = [F.normalize(prompts[class_ids == c].double(), dim=1).mean(0) for c in range(CLASSES)]
    weights = torch.stack([mean / mean.norm() for mean in classes], 1)
    scores = F.normalize(images.double(), dim=1) @ weights
    return (scores.topk(k).indices == target[:, None]).any(1).double().mean().item()


def feed(metric: ZeroShotAccuracy, data: Any, rows: slice = slice(None), **kwargs: Any) -> None:
    prompts, class_ids, images, target = data
    for part in torch.arange(len(prompts)).split(4):  # in parts with mixed classes
        metric.update_prompts(prompts[part], class_ids[part])
    for part in torch.arange(len(images))[rows].split(30):
        keys = {name: value[part] for name, value in kwargs.items()}
        metric.update(images[part], target[part], **keys)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("workspace_bytes", [1, 64 * 2**20])
def test_accuracies_equal_those_of_clips_recipe(dtype: torch.dtype, workspace_bytes: int) -> None:
    data = make_data(dtype)
    metric = ZeroShotAccuracy(num_classes=CLASSES, top_k=[1, 3, 9], workspace_bytes=workspace_bytes)
    feed(metric, data)
    values = {name: value.item() for name, value in metric.compute().items()}
    expected = {f"top{k}": pytest.approx(recipe(*data, k), abs=1e-6) for k in (1, 3)}
    assert values == {**expected, "top9": 1.0, "images": IMAGES}
    assert 0.3 < values["top1"] < values["top3"] < 1


def test_prompts_move_to_the_device_of_the_metric() -> None:
    metric = ZeroShotAccuracy(num_classes=CLASSES)
    feed(metric, make_data())
    metric.to("meta")
    tensors = [value for value in vars(metric).values() if isinstance(value, Tensor)]
    assert len(tensors) == 5  # sums, counts and features of classes, and two checksums
    assert all(value.is_meta for value in tensors)


def test_ties_and_non_finite_values_count_against_the_model() -> None:
    same = ZeroShotAccuracy(num_classes=3, top_k=[1, 2])
    same.update_prompts(torch.ones(3, 4), torch.arange(3))
    same.update(torch.rand(5, 4), torch.zeros(5, dtype=torch.int64))
    assert same.compute()["top2"] == 0
    bad = ZeroShotAccuracy(num_classes=3, top_k=[1, 2, 5])
    prompts = torch.eye(3)
    prompts[2] = torch.nan
    bad.update_prompts(prompts, torch.arange(3))
    images = torch.eye(3)
    images[1, 0] = torch.inf
    bad.update(images, torch.arange(3))
    # The first image has one class ahead; the second image and the third class are not finite.
    assert [round(bad.compute()[f"top{k}"].item(), 4) for k in (1, 2, 5)] == [0, 0.3333, 0.3333]


def test_prompts_may_have_any_dtype_but_one_width() -> None:
    metric = ZeroShotAccuracy(num_classes=2, top_k=[1])
    metric.update_prompts(torch.tensor([[1.0, 0.0]]), torch.tensor([0], dtype=torch.uint8))
    metric.update_prompts(torch.tensor([[0.0, 1.0]]).double(), torch.tensor([1]))
    metric.update(torch.eye(2), torch.arange(2))
    assert metric.compute()["top1"] == 1
    with pytest.raises(ValueError, match="width 3 after prompts of width 2"):
        metric.update_prompts(torch.ones(1, 3), torch.tensor([0]))


def test_prompts_may_be_added_after_inference_mode() -> None:
    prompts, class_ids, *images = make_data()
    metric = ZeroShotAccuracy(num_classes=CLASSES)
    with torch.inference_mode():
        metric.update_prompts(prompts[:CLASSES], class_ids[:CLASSES])
    metric.update_prompts(prompts[CLASSES:], class_ids[CLASSES:])
    metric.update(*images)
    assert metric.compute()["top1"] == pytest.approx(recipe(prompts, class_ids, *images, 1))


def test_images_with_a_repeated_key_are_removed() -> None:
    data = make_data()
    alone, repeated = (ZeroShotAccuracy(num_classes=CLASSES) for _ in range(2))
    feed(alone, data)
    prompts, class_ids, images, target = data
    wrong = (
        prompts,
        class_ids,
        torch.cat([images, -images[:40]]),
        torch.cat([target, target[:40]]),
    )
    keys = torch.cat([torch.arange(IMAGES), torch.arange(40)])
    feed(repeated, wrong, keys=keys)
    assert repeated.compute() == alone.compute()
    unkeyed = ZeroShotAccuracy(num_classes=CLASSES)
    feed(unkeyed, wrong)
    assert unkeyed.compute()["images"] == IMAGES + 40


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.data = make_data()
        self.top1 = ZeroShotAccuracy(num_classes=CLASSES, value="top1")

    def on_validation_epoch_start(self) -> None:
        self.top1.update_prompts(*self.data[:2])

    def validation_step(self, batch: list[Tensor]) -> None:
        self.top1.update(*batch)
        self.log("top1", self.top1)


@pytest.mark.filterwarnings("ignore")
def test_value_is_logged_and_prompts_are_reset_each_epoch() -> None:
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    loader = DataLoader(TensorDataset(*module.data[2:]), batch_size=8)
    for _ in range(2):
        (logged,) = trainer.validate(module, loader, verbose=False)
        assert logged["top1"] == pytest.approx(recipe(*module.data, 1), abs=1e-6)
    with pytest.raises(RuntimeError, match="class 0 without a prompt"):
        module.top1.update(*module.data[2:])


def test_forward_tracker_and_plot() -> None:
    matplotlib.use("agg")
    prompts, class_ids, images, target = make_data()
    tracker = MetricTracker(ZeroShotAccuracy(num_classes=CLASSES, value="top1"), maximize=True)
    for sign in (-1, 1):
        tracker.increment()
        tracker[-1].update_prompts(prompts, class_ids)
        tracker.update(sign * images, target)
    best, step = tracker.best_metric(return_step=True)
    assert (best, step) == (pytest.approx(recipe(*make_data(), 1), abs=1e-6), 1)
    metric = ZeroShotAccuracy(num_classes=CLASSES)
    metric.update_prompts(prompts, class_ids)
    first = metric(images[:50], target[:50])
    metric(images[50:], target[50:])
    assert first["top1"] == pytest.approx(recipe(prompts, class_ids, images[:50], target[:50], 1))
    assert metric.compute()["images"] == IMAGES
    figure, _ = metric.plot()
    assert len(figure.axes) == 1


def _on_rank(rank: int) -> dict[str, dict[str, float]]:
    results, data = {}, make_data()
    for name, rows in {
        "halves": [slice(0, 51), slice(51, None)],
        "all on one": [slice(0, 0), slice(0, None)],
    }.items():
        metric = ZeroShotAccuracy(num_classes=CLASSES)
        feed(metric, data, rows[rank])
        results[name] = {key: value.item() for key, value in metric.compute().items()}
    torch.set_default_dtype(torch.float64)  # yet the states of both ranks have one dtype
    metric = ZeroShotAccuracy(num_classes=CLASSES)
    if rank == 1:
        with torch.autocast("cpu", torch.bfloat16):
            feed(metric, data)
    results["no update on one"] = {key: value.item() for key, value in metric.compute().items()}
    return results


@pytest.mark.distributed
def test_two_ranks_equal_one_process() -> None:
    metric = ZeroShotAccuracy(num_classes=CLASSES)
    feed(metric, make_data())
    expected = {key: value.item() for key, value in metric.compute().items()}
    cases = ("halves", "all on one", "no update on one")
    assert run_ranks(_on_rank, 2) == [dict.fromkeys(cases, expected)] * 2


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda m: m.update_prompts(torch.eye(3), torch.arange(3) - 1), ValueError, "from -1 to 1"),
        (lambda m: m.update_prompts(torch.eye(3), torch.arange(3) + 1), ValueError, "from 1 to 3"),
        (lambda m: m.update_prompts(torch.eye(3)[0], torch.arange(3)), ValueError, "(n, D)"),
        (lambda m: m.update_prompts(torch.eye(3), torch.arange(2)), ValueError, "`class_ids` of"),
        (lambda m: m.update(torch.eye(3)[0], torch.arange(3)), ValueError, "`image_features` of"),
        (lambda m: m.update(torch.eye(3), torch.arange(3), [1]), ValueError, "`keys` as list"),
        (lambda m: m.update(torch.eye(3), torch.arange(3)), RuntimeError, "class 0 without"),
        (lambda m: m.update(torch.eye(3), torch.eye(3)), ValueError, "one integer per row"),
        (lambda m: m.compute(), RuntimeError, "no images"),
        (lambda m: ZeroShotAccuracy(num_classes=0), ValueError, "num_classes=0"),
        (lambda m: ZeroShotAccuracy(num_classes=2, top_k=[]), ValueError, "Pass `top_k=[1, 5]`"),
        (lambda m: ZeroShotAccuracy(num_classes=2, value="top2"), ValueError, "['top1', 'top5'"),
    ],
)
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_invalid_inputs_raise(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        call(ZeroShotAccuracy(num_classes=3))
    assert said in str(caught.value)


def test_target_out_of_range_raises_in_compute() -> None:
    metric = ZeroShotAccuracy(num_classes=3)
    metric.update_prompts(torch.eye(3), torch.arange(3))
    metric.update(torch.eye(3), torch.tensor([0, 1, 3]))
    with pytest.raises(ValueError, match=r"1 values of `target` outside of \[0, 3\), such as 3"):
        metric.compute()


@pytest.mark.parametrize(
    ("width", "target", "said"), [(3, [0, 1, 9], "outside of"), (4, [0, 1, 2], "of one width")]
)
def test_forward_that_raises_leaves_images_and_prompts(
    width: int, target: list[int], said: str
) -> None:
    accuracy = ZeroShotAccuracy(num_classes=3, top_k=(1,), value="top1")
    accuracy.update_prompts(torch.eye(3), torch.arange(3))
    accuracy.update(torch.eye(3), torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match=said):
        accuracy(torch.eye(4)[:3, :width], torch.tensor(target))
    accuracy.update(torch.eye(3), torch.arange(3))
    assert float(accuracy.compute()) == pytest.approx(5 / 6)


def test_metrics_of_a_collection_share_ranks_only_of_equal_prompts() -> None:
    def made(third: Tensor) -> ZeroShotAccuracy:
        accuracy = ZeroShotAccuracy(num_classes=3, top_k=(1,), value="top1")
        accuracy.update_prompts(torch.stack([*torch.eye(3)[:2], third]), torch.arange(3))
        return accuracy

    right, wrong = torch.eye(3)[2], -torch.eye(3)[1]
    metrics = {"right": made(right), "same": made(right), "wrong": made(wrong)}
    collection = MetricCollection(metrics)  # type: ignore[arg-type]
    # All models are right about the first two classes, which make up the first batch.
    collection.update(torch.eye(3)[:2], torch.arange(2))
    collection.update(torch.eye(3)[2:], torch.tensor([2]))
    found = {name: float(value) for name, value in collection.compute().items()}
    assert found == pytest.approx({"right": 1.0, "same": 1.0, "wrong": 2 / 3})
    assert sorted(map(len, collection.compute_groups.values())) == [1, 2]


def _recovers_on_rank(rank: int) -> list[str]:
    accuracy = ZeroShotAccuracy(num_classes=3, top_k=(1,))
    accuracy.update_prompts(torch.eye(3), torch.arange(3))
    accuracy.update(torch.eye(3), torch.tensor([0, 1, 7]))
    said = []
    for _ in range(2):
        try:
            accuracy.compute()
        except Exception as error:
            said.append(str(error)[:20])
    return [*said, str(len(accuracy.ranks))]


@pytest.mark.distributed
def test_two_ranks_that_cannot_compute_keep_their_own_state() -> None:
    assert run_ranks(_recovers_on_rank, 2) == [["Passed 2 values of `"] * 2 + ["1"]] * 2
