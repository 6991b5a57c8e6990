"""`TensorCollector` writes exact statistics under every plugin."""

import json
import math
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_mp import BalancedAMP, InstabilityReport, PureFP16, TensorCollector
from tests.callbacks.models import Watched, watch

Samples = dict[int, dict[str, Any]]
NORMS = ("norm", "absmax")
# One rounding to fp32, and a float64 sum of at most 2304 values of this model.
REL = 2 * torch.finfo(torch.float32).eps


def samples_of(folder: Path) -> Samples:
    """Return the files of a folder by step, read as documented."""
    found: Samples = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as sample:
            found[int(path.stem)] = {name: sample[name] for name in sample.files}
    return found


def values(sample: dict[str, Any], reduction: str) -> dict[str, float]:
    return dict(zip(sample["names"].tolist(), sample[reduction].tolist(), strict=True))


class Told(Watched):
    """Records float64 norms of the tensors before each optimizer step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.told: list[dict[str, float]] = []
        self.outputs: list[float] = []

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        norms = {}
        for name, parameter in self.named_parameters():
            norms[f"weights/{name}"] = float(parameter.detach().double().norm())
            if parameter.grad is not None:
                norms[f"gradients/{name}"] = float(parameter.grad.double().norm())
            for kind, value in optimizer.state.get(parameter, {}).items():
                if kind != "step" and isinstance(value, Tensor):
                    key = f"optimizer_state/{name}/{kind}"
                    norms[key] = float(value.double().norm())
        self.told.append(norms)


@pytest.mark.parametrize(
    "plugin",
    [None, BalancedAMP, lambda: BalancedAMP(half="bf16"), PureFP16],
    ids=["fp32", "balanced-fp16", "balanced-bf16", "pure-fp16"],
)
def test_collector_writes_weights_gradients_and_states(plugin: Any, tmp_path: Path) -> None:
    model = Told(steps=9)
    collector = TensorCollector(
        include=["network.0.*", "re:network\\.4\\.(weight|bias)"],
        collect=["weights", "gradients", "optimizer_state"],
        every_n_steps=4,
    )
    watch(model, [collector], plugin and plugin(), default_root_dir=str(tmp_path))
    assert collector.folder == tmp_path / "tensors"
    samples = samples_of(tmp_path / "tensors")
    assert list(samples) == [0, 4, 8]
    for step, sample in samples.items():
        expected = {key: norm for key, norm in model.told[step].items() if "network.2" not in key}
        found = values(sample, "norm")
        kinds = {key.partition("/")[0] for key in found}
        assert kinds == {"weights", "gradients", *(["optimizer_state"] if step else [])}
        weights = {k: v for k, v in expected.items() if k in found}
        assert found == pytest.approx(weights, rel=REL)
        assert len(found) == 4 * (4 if step else 2)  # weight, gradient, two moments
        assert (sample["step"], sample["epoch"], sample["batch_idx"]) == (step, 0, step)
        counts = sample["histogram"].sum(axis=1)
        assert counts.tolist() == sample["count"].tolist()
        assert sample["exponents"].shape == sample["histogram"].shape[1:]


def test_collector_unscales_gradients_of_torchs_scaler(tmp_path: Path) -> None:
    """A fused optimizer unscales in its step, after the sample."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    def train(plugin: Any, folder: Path) -> dict[str, float]:
        model = Watched(steps=1, make_optimizer=lambda p: AdamW(p, lr=1e-3, fused=True))
        watch(model, [TensorCollector(dirpath=str(folder))], plugin)
        return values(samples_of(folder)[0], "norm")

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled = train(MixedPrecision("16-mixed", "cpu", scaler), tmp_path / "scaled")
    # Each of three layers has a relative error of 2^-11 in fp16.
    assert scaled == pytest.approx(train(None, tmp_path / "plain"), rel=0.02)


def test_collector_merges_outputs_of_micro_batches(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Kept(Watched):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            hook = self.network[2].register_forward_hook(lambda *a: seen.append(a[2].detach()))
            loss = super().training_step(batch, batch_idx)
            hook.remove()
            return loss

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"a": x, "b": [x * 2], "index": torch.arange(3)}

    class Last(nn.Linear):
        def forward(self, x: dict[str, Any]) -> Tensor:  # type: ignore[override]
            return super().forward(x["a"])

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4), Twice(), Last(4, 1))

    model = Kept(network, steps=6)
    collector = TensorCollector(
        include=["network.[23]", "network.3.*"], collect=["outputs"], every_n_steps=2
    )
    folder = tmp_path / "mine"
    collector.dirpath = str(folder)
    watch(model, [collector], accumulate_grad_batches=2)
    samples = samples_of(folder)
    assert list(samples) == [0, 2]
    for step, sample in samples.items():
        both = torch.cat(seen[2 * step : 2 * step + 2]).double()
        twice = torch.cat([both, 2 * both])
        expected = {
            "outputs/network.2": float(both.norm()),
            "outputs/network.3": float(twice.norm()),
            "outputs/network.3.idle": math.nan,  # never called
        }
        assert values(sample, "norm") == pytest.approx(expected, rel=REL, nan_ok=True)
        assert values(sample, "count")["outputs/network.3"] == twice.numel()
    assert not model.network[2]._forward_hooks  # between samples there are none


def test_collector_counts_outputs_once_if_the_backward_repeats_the_forward(tmp_path: Path) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(super().forward, x, use_reentrant=False)

    def network() -> nn.Module:
        return Checkpointed(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    collector = TensorCollector(collect=["outputs"], dirpath=str(tmp_path / "mine"))
    watch(Watched(network, steps=1), [collector])
    counts = values(samples_of(tmp_path / "mine")[0], "count")
    assert counts["outputs/network.0"] == 32 * 8


def test_collector_writes_frozen_weights_and_weights_of_every_optimizer(tmp_path: Path) -> None:
    class Pair(Watched):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self) -> Any:
            self.network[0].requires_grad_(False)
            return [SGD(self.network[i].parameters(), lr=0.1, momentum=0.9) for i in (2, 4)]

    collector = TensorCollector(
        include=["*.weight"],
        collect=["weights", "gradients", "optimizer_state"],
        every_n_steps=2,
        dirpath=str(tmp_path / "t"),
    )
    watch(Pair(steps=5), [collector])
    samples = samples_of(tmp_path / "t")
    assert list(samples) == [0, 2, 4]
    expected = {f"weights/network.{i}.weight" for i in (0, 2, 4)}
    expected |= {f"gradients/network.{i}.weight" for i in (2, 4)}
    expected |= {f"optimizer_state/network.{i}.weight/momentum_buffer" for i in (2, 4)}
    assert set(samples[2]["names"].tolist()) == expected


def test_collector_logs_numbers_on_request(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="log")
    collector = TensorCollector(
        include=["network.4.weight"], reductions=["rms", "kurtosis"], every_n_steps=2, log=True
    )
    watch(Watched(steps=4), [collector], logger=logger, log_every_n_steps=1)
    assert collector.folder == Path(logger.log_dir) / "tensors"
    rows = np.genfromtxt(
        Path(logger.log_dir) / "metrics.csv", delimiter=",", names=True, deletechars=""
    )
    samples = samples_of(collector.folder)
    for name in ("rms", "kurtosis"):
        written = rows[f"gradients/network.4.weight/{name}"]
        expected = [sample[name][0] for sample in samples.values()]
        assert written[np.isfinite(written)] == pytest.approx(expected)
        assert "histogram" not in samples[0]


def test_collector_logs_nothing_without_request(tmp_path: Path) -> None:
    """Lightning sets `callback.log`, which must not replace the argument `log`."""
    logger = CSVLogger(tmp_path, name="log")
    collectors = [TensorCollector(include=["*.weight"], log=log) for log in (False, True)]
    for collector in collectors:
        watch(Watched(steps=4), [collector], logger=logger, log_every_n_steps=1)
        logger.save()
        path = Path(logger.log_dir) / "metrics.csv"
        is_logged = path.exists() and "gradients/network.4.weight/rms" in path.read_text()
        assert is_logged == (collector is collectors[1])
    plain, digested = (collector.state_key for collector in collectors)
    assert plain == "TensorCollector{'include': ('*.weight',)}"
    assert re.fullmatch(re.escape(plain) + " with [0-9a-f]{12}", digested)


def test_page_shows_histograms_over_time_with_rows_in_the_order_of_exponents(
    tmp_path: Path,
) -> None:
    collector = TensorCollector(include=["*.weight"], every_n_steps=1, dirpath=str(tmp_path / "t"))
    report = InstabilityReport(dirpath=str(tmp_path))
    watch(Watched(steps=4), [collector, report])
    data = json.loads((tmp_path / "instability.json").read_text())
    maps = [each for each in data["maps"] if each["name"].startswith("histogram of gradients/")]
    assert maps
    for each in maps:
        exponents = [int(row[2:]) for row in each["rows"] if row != "0"]
        assert exponents == sorted(exponents, reverse=True)
        shares = [[cell or 0.0 for cell in column] for column in zip(*each["cells"], strict=True)]
        # Cells have three digits.
        assert [sum(column) for column in shares] == pytest.approx(
            [1.0] * 4, abs=len(each["rows"]) * 5e-4
        )
    assert "Histogram of gradients/" in (tmp_path / "instability.html").read_text()


def test_collector_counts_non_finite_values_and_writes_the_step(tmp_path: Path) -> None:
    model = Watched(
        steps=3,
        make_optimizer=lambda p: SGD(p, lr=0.0),
        factor=lambda i: math.inf if i == 1 else 1.0,
    )
    watch(model, [TensorCollector(dirpath=str(tmp_path / "t"), every_n_steps=1)])
    samples = samples_of(tmp_path / "t")
    bad = {step: int(sample["non_finite"].sum()) for step, sample in samples.items()}
    assert bad[0] == 0
    assert bad[1] > 0


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_runs_in_one_folder_have_separate_files_and_resume_their_own(
    tmp_path: Path,
) -> None:
    def train(steps: int, **kwargs: Any) -> TensorCollector:
        collector = TensorCollector(every_n_steps=1)
        folder = tmp_path / f"checkpoints-{steps}"
        saving = ModelCheckpoint(folder, filename="last", every_n_train_steps=2)
        watch(
            Watched(steps=steps),
            [collector, saving],  # type: ignore[list-item]
            default_root_dir=str(tmp_path),
            enable_checkpointing=True,
            **kwargs,
        )
        return collector

    first, second = train(4), train(3)
    assert (first.folder, second.folder) == (tmp_path / "tensors", tmp_path / "tensors-v1")
    (tmp_path / "tensors" / "00000001.npz").unlink()
    resumed = train(5, ckpt_path=str(tmp_path / "checkpoints-3" / "last.ckpt"))
    assert resumed.folder == tmp_path / "tensors-v1"
    assert list(samples_of(tmp_path / "tensors-v1")) == [0, 1, 2, 3, 4]
    assert list(samples_of(tmp_path / "tensors")) == [0, 2, 3]


def test_collector_of_a_failed_run_writes_its_last_sample(tmp_path: Path) -> None:
    def fail(module: pl.LightningModule, batch_idx: int) -> None:
        if batch_idx == 2:
            raise ValueError("bad batch")

    collector = TensorCollector(
        include=["*"], collect=["outputs"], dirpath=str(tmp_path / "t"), every_n_steps=1
    )
    model = Watched(steps=4, sabotage=fail)
    with pytest.raises(ValueError, match="bad batch"):
        watch(model, [collector])
    assert list(samples_of(tmp_path / "t")) == [0, 1]
    assert not model.network[0]._forward_hooks


def test_collector_that_cannot_write_warns_and_training_continues(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"`TensorCollector` could not write .*Training continues"):
        trainer = watch(Watched(steps=2), [TensorCollector(dirpath=str(tmp_path / "file" / "t"))])
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"include": "network"}, r"list of patterns.*Pass `include=\['network'\]`"),
        ({"include": []}, "a non-empty list of patterns"),
        ({"include": ["re:("]}, "or `re:<regular expression>`. missing"),
        ({"collect": ["grads"]}, "list of 'weights', 'gradients', 'optimizer_state', 'outputs'"),
        ({"collect": "weights"}, r"Pass `collect=\['weights'\]`"),
        ({"reductions": ["mode"]}, "list of 'norm', 'rms', .*'kurtosis', 'histogram'"),
        ({"every_n_steps": 0}, "at least 1"),
    ],
)
def test_collector_refuses_a_wrong_argument(arguments: dict[str, Any], match: str) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"TensorCollector\({name}=.*{match}"):
        TensorCollector(**arguments)


def test_pattern_without_a_match_raises_an_error(tmp_path: Path) -> None:
    match = re.escape("TensorCollector(include=['netwrok.*'])`, which matches none of 6 names")
    with pytest.raises(ValueError, match=match):
        watch(Watched(steps=1), [TensorCollector(include=["*.bias", "netwrok.*"])])
