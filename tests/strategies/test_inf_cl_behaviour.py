"""Guarantees besides equal weights: communication, memory, hooks, errors, loops."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lightning_mp  # noqa: F401  registers "inf_cl"
from lightning_mp.strategies import InfCLStrategy
from tests.averages import weight_averaging
from tests.processes import run_ranks
from tests.quiet import parameters_of
from tests.reference.contrastive import relative_error
from tests.strategies.models import WIDTH, WIDTH_IN, TinyCLIP, loader, make_tower, make_trainer


class SeesRows(nn.Module):
    """Records the rows and dtype of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.dtypes: set[torch.dtype] = set()

    def forward(self, batch: Tensor) -> Tensor:
        self.rows.append(len(batch))
        self.dtypes.add(batch.dtype)
        return batch.float()


class CountsBuckets(pl.Callback):
    """Counts all-reduces of gradient buckets by a DDP communication hook."""

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.buckets: list[int] = []
        ddp = trainer.strategy.model
        assert isinstance(ddp, DistributedDataParallel)
        ddp.register_comm_hook(None, self._hook)

    def _hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.buckets.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


def _buckets_in_training(rank: int, accumulate: int, automatic: bool) -> list[int]:
    counter = CountsBuckets()
    trainer = make_trainer(
        InfCLStrategy(micro_batch_size=3, bucket_cap_mb=0.002),
        devices=2,
        max_steps=4,
        callbacks=[counter],
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(TinyCLIP(automatic=automatic), loader(64, 8))
    return counter.buckets


@pytest.mark.distributed
@pytest.mark.parametrize(("accumulate", "automatic"), [(1, True), (2, True), (1, False)])
def test_inf_cl_all_reduces_each_bucket_once_per_step(accumulate: int, automatic: bool) -> None:
    for buckets in run_ranks(_buckets_in_training, 2, accumulate, automatic):
        # DDP rebuilds its buckets after the first step, in the order of the gradients.
        first = buckets[: len(buckets) - 3 * (max(buckets) + 1)]
        rest = buckets[len(first) :]
        assert max(buckets) > 0, "the test needs several buckets"
        assert len(first) == len(set(first))
        assert rest == sorted(set(buckets)) * 3


class PeakOfSaved:
    """Peak bytes that autograd saved for backward, counting each storage once."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> Any:
        return _Saved(tensor, self) if not isinstance(tensor, nn.Parameter) else tensor

    def __enter__(self) -> "PeakOfSaved":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            self.pack, lambda saved: saved.tensor if isinstance(saved, _Saved) else saved
        )
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)


class _Saved:
    def __init__(self, tensor: Tensor, peak: PeakOfSaved) -> None:
        self.tensor, self._peak = tensor, peak
        self._bytes = tensor.numel() * tensor.element_size()
        peak.now += self._bytes
        peak.peak = max(peak.peak, peak.now)

    def __del__(self) -> None:
        self._peak.now -= self._bytes


class MeasuredTower(nn.Module):
    """A tower that measures the bytes autograd saves for it, over all its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = make_tower(0.1)
        self.saved = PeakOfSaved()

    def forward(self, batch: Tensor) -> Tensor:
        with self.saved:
            return self.tower(batch)


def _saved_bytes(batch: int, strategy: Any) -> int:
    model = TinyCLIP()
    model.visual, model.text = MeasuredTower(), MeasuredTower()
    model.text.saved = model.visual.saved
    make_trainer(strategy, max_steps=2).fit(model, loader(batch, batch))
    assert model.visual.saved.now == 0
    return model.visual.saved.peak


@pytest.mark.slow
def test_inf_cl_bytes_saved_for_backward_do_not_grow_with_the_batch() -> None:
    small, large = (_saved_bytes(b, InfCLStrategy(micro_batch_size=64)) for b in (256, 4096))
    assert small == large > 0
    plain = _saved_bytes(256, DDPStrategy())
    assert plain > 6 * small, "plain training holds both towers for all four micro-batches"


def test_inf_cl_registered_by_name_trains_on_one_device() -> None:
    model = TinyCLIP()
    start = parameters_of(model)
    make_trainer("inf_cl", max_steps=2).fit(model, loader(16, 8))
    assert relative_error(parameters_of(model), start) > 1e-3


def test_inf_cl_towers_run_plainly_in_validation_and_test() -> None:
    model = TinyCLIP()
    model.visual = nn.Sequential(SeesRows(), model.visual)
    trainer = make_trainer(InfCLStrategy(micro_batch_size=3), max_steps=2, val_check_interval=1)
    trainer.fit(model, loader(16, 8), loader(10, 10))
    # The sanity check; two runs of micro-batches per step, first run and replay; validation.
    step = [3, 3, 2] * 2 + [10]
    assert model.visual[0].rows == [10, *step, *step]
    model.visual[0].rows.clear()
    trainer.test(model, loader(10, 10), verbose=False)
    assert model.visual[0].rows == [10]
    assert "_compiled_call_impl" not in vars(model.visual)


def test_inf_cl_a_micro_batch_size_set_later_counts_in_the_next_fit() -> None:
    strategy, model = InfCLStrategy(micro_batch_size=8), TinyCLIP()
    model.visual = nn.Sequential(SeesRows(), model.visual)
    strategy.micro_batch_size = 4  # such as after running out of memory
    make_trainer(strategy, max_steps=1).fit(model, loader(8, 8))
    assert model.visual[0].rows[-4:] == [4, 4, 4, 4]  # two runs of two micro-batches


def test_inf_cl_offload_to_host_keeps_the_dtype_of_the_data_set() -> None:
    images = torch.randint(0, 255, (8, WIDTH_IN), dtype=torch.uint8)
    data = DataLoader(TensorDataset(images, torch.randn(8, WIDTH_IN)), batch_size=8)
    model = TinyCLIP()
    model.visual = nn.Sequential(SeesRows(), model.visual)
    make_trainer(InfCLStrategy(offload="host", micro_batch_size=3), max_steps=1).fit(model, data)
    assert model.visual[0].dtypes == {torch.uint8}
    assert model.visual[0].rows == [3, 3, 2] * 2


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2, 9])
def test_inf_cl_offload_to_host_trains_bitwise_equal(prefetch: int) -> None:
    weights = []
    for offload in ("none", "host"):
        model = TinyCLIP()
        strategy = InfCLStrategy(micro_batch_size=3, offload=offload, prefetch=prefetch)
        make_trainer(strategy, max_steps=5).fit(model, loader(40, 8))
        weights.append(parameters_of(model))
    assert torch.equal(*weights)


class OnAnotherDevice(InfCLStrategy):
    """Pretends to have another root device, and records the devices of batches."""

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        module = self.lightning_module
        sent: list[torch.device] = []
        module._apply_batch_transfer_handler = lambda batch, device, dataloader_idx: (
            sent.append(device) or batch
        )
        result = super().batch_to_device(batch, torch.device("meta"), dataloader_idx)
        self.sent = [*getattr(self, "sent", []), (module.trainer.state.stage.value, sent[0].type)]
        return result


@pytest.mark.parametrize(("offload", "expected"), [("host", "cpu"), ("none", "meta")])
def test_inf_cl_offload_keeps_only_training_batches_on_the_host(
    offload: Any, expected: str
) -> None:
    strategy = OnAnotherDevice(offload=offload)
    make_trainer(strategy, max_steps=1).fit(TinyCLIP(), loader(8, 8), loader(8, 8))
    assert ("train", expected) in strategy.sent
    assert ("validate", "meta") in strategy.sent
    assert ("sanity_check", "meta") in strategy.sent


class WithBatchNorm(TinyCLIP):
    def __init__(self) -> None:
        super().__init__()
        norms = [nn.BatchNorm1d(WIDTH_IN), self.visual, nn.BatchNorm1d(WIDTH)]
        self.visual = nn.Sequential(*norms, nn.BatchNorm1d(WIDTH).eval())  # no warning of the last


def test_inf_cl_batch_norm_warns_once_and_updates_buffers_once_per_step() -> None:
    model = WithBatchNorm()
    data = loader(16, 8)
    trainer = make_trainer(
        InfCLStrategy(micro_batch_size=3), max_epochs=1, use_distributed_sampler=False
    )
    with pytest.warns(UserWarning, match=r"2 layers .* `visual.0` \(BatchNorm1d\)") as warned:
        trainer.fit(model, data)
    assert len([w for w in warned if "BatchNorm" in str(w.message)]) == 1
    norm = model.visual[0]
    assert norm.num_batches_tracked == 2
    whole = nn.BatchNorm1d(WIDTH_IN)
    for image, _ in data:
        whole(image)
    assert torch.allclose(norm.running_mean, whole.running_mean, atol=1e-6)


def test_embedding_that_scales_gradients_by_counts_warns() -> None:
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Embedding(2, WIDTH, scale_grad_by_freq=True)

        def forward(self, x: Tensor) -> Tensor:
            codes: Tensor = self.codes((x[:, 0] > 0).long())
            return codes

    model = TinyCLIP()
    model.text = Codes()
    strategy = InfCLStrategy(micro_batch_size=3)
    with pytest.warns(UserWarning, match=r"1 layers .* `text.codes` \(Embedding\)"):
        make_trainer(strategy, max_epochs=1).fit(model, loader(8, 8))


class ManyWays(TinyCLIP):
    """Towers by method and path: called twice, inside another tower, with two outputs."""

    def __init__(self, compiled: bool = False) -> None:
        super().__init__(dropout=0.0)
        self.model = nn.ModuleDict({"image": self.visual, "text": self.text})
        del self.visual, self.text
        self.stem = nn.Linear(WIDTH_IN, WIDTH_IN)
        self.prompt = nn.Parameter(torch.randn(1, WIDTH_IN))
        if compiled:
            self.model["image"] = torch.compile(self.model["image"], backend="aot_eager")
            self.model["text"].compile(backend="aot_eager")
            self.encode = torch.compile(self.encode, backend="aot_eager")

    def encode(self, text: Tensor, *, prompt: Tensor, normalize: bool) -> dict[str, Any]:
        features = self.model["text"](text + prompt)
        if normalize:
            features = F.normalize(features, dim=-1)
        return {"features": features, "pair": (features * 2, text.argmax(1)), "name": "text"}

    def features(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        image, text = batch
        # Trained layers before a tower, and features changed in place after the tower.
        image = self.model["image"](self.stem(image))
        image += self.model["image"](batch[0])
        outputs = self.encode(text, prompt=self.prompt, normalize=True)
        assert outputs["name"] == "text"
        assert not outputs["pair"][1].requires_grad
        text = outputs["features"] + outputs["pair"][0] * 0.5
        return F.normalize(self.head(image), dim=-1), F.normalize(text, dim=-1)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
# Dynamo reads `.grad` of the inputs of a compiled module, as in plain training.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_inf_cl_towers_called_in_various_ways_train_like_plain_towers(compiled: bool) -> None:
    expected, model = ManyWays(), ManyWays(compiled)
    make_trainer(DDPStrategy(), max_steps=4).fit(expected, loader(32, 8))
    towers = ["model.image", "encode", "model.text"]
    strategy = InfCLStrategy(towers=towers, micro_batch_size=3)
    make_trainer(strategy, max_steps=4).fit(model, loader(32, 8))
    assert relative_error(parameters_of(model), parameters_of(expected)) < 1e-5


class SeesGradients(TinyCLIP):
    def on_after_backward(self) -> None:
        self.seen = [p.grad.clone() for p in self.parameters()]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for p in self.parameters()]
        assert all(torch.equal(*pair) for pair in zip(self.seen, gradients, strict=True))
        assert all(grad.abs().sum() > 0 for grad in gradients)


def test_inf_cl_gradients_are_complete_after_backward() -> None:
    model = SeesGradients()
    make_trainer(InfCLStrategy(micro_batch_size=3), max_steps=2).fit(model, loader(16, 8))
    assert model.seen


class Frozen(TinyCLIP):
    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(SeesRows(), self.visual).requires_grad_(False)


def test_inf_cl_frozen_tower_is_not_replayed() -> None:
    model = Frozen()
    make_trainer(InfCLStrategy(micro_batch_size=4), max_steps=1).fit(model, loader(8, 8))
    assert model.visual[0].rows == [2, 3, 4, 4]  # after the shape check with two and three rows


@pytest.mark.slow
def test_inf_cl_resumed_training_equals_uninterrupted(tmp_path: Path) -> None:
    def fit(steps: int, path: Path | None = None) -> tuple[TinyCLIP, pl.Trainer]:
        model = TinyCLIP(dropout=0.0, optimizer=torch.optim.Adam)
        trainer = make_trainer(
            InfCLStrategy(micro_batch_size=3),
            max_epochs=steps // 2,
        )
        trainer.fit(model, loader(16, 8), ckpt_path=path)
        return model, trainer

    straight, _ = fit(8)
    _, half = fit(4)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, trainer = fit(8, tmp_path / "half.ckpt")
    assert trainer.global_step == 8
    assert torch.equal(parameters_of(resumed), parameters_of(straight))
    # The checkpoint equals that of the plain model.
    state = torch.load(tmp_path / "half.ckpt", weights_only=False)["state_dict"]
    TinyCLIP().load_state_dict(state)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*WeightAveraging.*")
def test_inf_cl_weight_averaging_averages_the_trained_weights() -> None:
    averages = weight_averaging()
    results = []
    for strategy in (InfCLStrategy(micro_batch_size=3), DDPStrategy()):
        model = TinyCLIP(dropout=0.0)
        trainer = make_trainer(strategy, max_steps=6, callbacks=[averages.WeightAveraging()])
        trainer.fit(model, loader(16, 8), loader(8, 8))
        results.append(parameters_of(model))
    assert relative_error(*results) < 1e-6
