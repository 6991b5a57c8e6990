"""The command from end to end, and its prediction for the demo compared with the real peak."""

import re
import warnings
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from examples.glyph_clip.model import GlyphCLIP
from lightning_mp import InfCLStrategy
from lightning_mp._config_files import read_config
from lightning_mp.cli import main
from lightning_mp.gradient_cache._served.towers import find_tower
from lightning_mp.plan.command import pairs_of
from lightning_mp.plan.config import subject_of_config
from lightning_mp.plan.estimate import METHODS, Machine, largest, memory
from lightning_mp.plan.subject import PRECISIONS, Subject, TowerBytes
from lightning_mp.plan.table import advice
from lightning_mp.plan.tower_bytes import blank, measure_towers
from papers.allocation import peak_allocated
from papers.inf_cl import printed as paper
from tests.quiet import QUIET

ROOT = Path(__file__).parents[2]
CONFIG = "examples/glyph_clip/config.yaml"
GIB = 2**30


def test_pairs_are_parsed_as_in_the_papers() -> None:
    assert pairs_of("4096", "--batch") == 4096
    assert pairs_of("1024k", "--batch") == pairs_of("1M", "--batch") == 2**20
    assert pairs_of("10M", "--batch") == 10 * 2**20
    with pytest.raises(ValueError, match="Passed `--batch many`. It must be a number of pairs"):
        pairs_of("many", "--batch")


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.text = nn.Linear(8, 16)

    def step(self, pairs: int) -> None:
        self.visual(torch.randn(pairs, 32))
        self.text(torch.randn(pairs, 8))


@pytest.mark.parametrize(("precision", "visual", "text"), [
    # The output of ReLU, which ReLU and the next layer share, and the features.
    ("32-true", (64 + 16) * 4, 16 * 4),
    # Under autocast, a half copy of the input is saved, too.
    ("16-mixed", (32 + 64 + 16) * 2, (8 + 16) * 2),
])  # fmt: skip
def test_saved_bytes_are_a_slope_of_two_sizes(precision: str, visual: int, text: int) -> None:
    model = _Towers()
    towers = [find_tower(model, name) for name in ("visual", "text")]
    found = measure_towers(model, towers, model.step, PRECISIONS[precision])
    assert found["visual"].saved_per_pair == visual
    assert found["text"].saved_per_pair == text
    assert found["visual"].flops_per_pair == 2 * (32 * 64 + 64 * 16)
    # For both weights, and for the activation between them.
    assert found["visual"].backward_flops_per_pair == 2 * (32 * 64 + 2 * 64 * 16)
    assert found["visual"].parameters == 32 * 64 + 64 + 64 * 16 + 16
    assert found["text"].width == 16


def test_frozen_tower_runs_once_and_a_trained_one_twice() -> None:
    model = _Towers()
    model.visual.requires_grad_(False)
    towers = [find_tower(model, name) for name in ("visual", "text")]
    found = measure_towers(model, towers, model.step, PRECISIONS["32-true"])
    subject = _subject(towers=found)
    frozen, trained = 2 * (32 * 64 + 64 * 16), 2 * 8 * 16
    assert subject.flops_per_pair(cached=False) == frozen + 2 * trained
    assert subject.flops_per_pair(cached=True) == frozen + 3 * trained


def test_blank_model_takes_no_memory_and_keeps_shared_weights() -> None:
    model = _Towers()
    model.text.bias = model.visual[2].bias
    model.text.register_buffer("seen", torch.zeros(3))
    with FakeTensorMode():
        blank(model)
    assert all(isinstance(p, FakeTensor) for p in [*model.parameters(), *model.buffers()])
    assert model.text.bias is model.visual[2].bias
    assert model.text.weight.shape == (16, 8)
    assert model.text.weight.requires_grad


def test_error_names_a_tower_that_is_not_called() -> None:
    model = _Towers()
    towers = [find_tower(model, name) for name in ("visual", "text")]
    with pytest.raises(ValueError, match=r"did not call \['text'\]"):
        measure_towers(
            model, towers, lambda pairs: model.visual(torch.randn(pairs, 32)), PRECISIONS["32-true"]
        )


def _subject(**changes: object) -> Subject:
    towers = {
        name: TowerBytes(2**20, 2**20, 0.0, 1e9, 50_000_000, 512, 2e9)
        for name in ("visual", "text")
    }
    settings = {
        "name": "twins",
        "parameters": 100_000_000,
        "optimizer": "AdamW",
        "states": {"float32": 800_000_000, "bfloat16": 400_000_000},
        "towers": towers,
        "pair_bytes": 600_000.0,
        "precision": "BalancedAMP",
        "micro_batch": 256,
        **changes,
    }
    return Subject(**settings)  # type: ignore[arg-type]


def test_largest_batch_of_each_method_just_fits() -> None:
    subject, machine = _subject(offload=True), Machine(8, 80 * GIB, 1000 * GIB, 8)
    found = []
    for method in METHODS:
        by_device, by_host = largest(method, subject, machine)
        assert memory(method, by_device, subject, machine).peak <= 80 * GIB
        assert memory(method, by_device + 8, subject, machine).peak > 80 * GIB
        # 17 batches with 600,000 bytes per pair: one in use, and two for each of 8 workers.
        assert by_host == int(1000 * GIB / (17 * 600_000)) // 8 * 8
        found.append(by_device)
    assert found == sorted(found)
    assert found[-1] > 10 * found[0]


@pytest.mark.parametrize(("gpu", "host", "batch", "said"), [
    (80, 1000, 8192, "8,192 pairs fit: "),
    (30, 10_000, 400_000, 'InfCLStrategy(offload="host")'),
    (30, 1000, 400_000, 'InfCLStrategy(offload="host", loader_batches_per_step=8)'),
    (5, 10_000, 4_000_000, "with their data on the host: take a batch of "),
    # With offload, 2.9, 2.6 and 2.4 GiB with micro-batches of 256, 128 and 64; 2.8 without.
    (2.5, 1000, 8192, 'InfCLStrategy(offload="host", micro_batch_size=64)'),
    (80, 100, 65_536, "InfCLStrategy(loader_batches_per_step=16)"),
    (80, 10, 65_536, "images as uint8"),
    (2, 1000, 8192, "no batch fits beside 1.7 GiB of static memory. Take a smaller micro-batch"),
])  # fmt: skip
def test_advice_names_what_to_change(gpu: int, host: int, batch: int, said: str) -> None:
    assert said in advice(_subject(), Machine(8, gpu * GIB, host * GIB, 8), batch)


def test_advice_for_sharded_weights_keeps_them_sharded() -> None:
    sharded = _subject(is_sharded=True)
    said = advice(sharded, Machine(8, 80 * GIB, 100 * GIB, 8), 65_536)
    assert "pass `InfCLModelParallelStrategy(loader_batches_per_step=16)`" in said
    said = advice(sharded, Machine(8, GIB // 8, 1000 * GIB, 8), 8192)
    assert said.endswith("Take a smaller micro-batch, larger GPUs, or more GPUs.")


def test_plan_without_arguments_lists_the_options() -> None:
    with pytest.raises(SystemExit, match="pass either `--config` or `--model`"):
        main(["plan"])
    with pytest.raises(SystemExit, match="must be one of 32-true"):
        main(["plan", "--model", "ViT-L/14", "--precision", "fp8"])


@pytest.mark.parametrize(
    ("option", "accepted"),
    [
        *((f"{name}=0", "an integer of at least 1") for name in ("gpus", "gpus_per_node")),
        *((f"{name}=0", "an integer of at least 1") for name in ("micro_batch", "loader_batches")),
        *((f"{name}=-1.5", "a finite number above 0") for name in ("gpu_memory", "host_memory")),
        *((f"{name}=0.0", "a finite number above 0") for name in ("network", "tflops")),
        ("pairs_per_second=0.0", "a finite number above 0"),
        ("workers=-1", "an integer of at least 0"),
    ],
)
def test_option_out_of_range_is_refused(option: str, accepted: str) -> None:
    name = option.partition("=")[0]
    said = rf"plan: Passed `plan\({option}\)`. `{name}` must be {accepted}"
    with pytest.raises(SystemExit, match=said):
        main(["plan", "--model", "ViT-B/32", "--batch", "64k", f"--{option}"])


@pytest.mark.parametrize("pairs", ["x", "1e99"])
@pytest.mark.parametrize("option", ["--batch", "--pairs"])
def test_wrong_number_of_pairs_is_refused_before_the_model_is_missed(
    option: str, pairs: str
) -> None:
    with pytest.raises(SystemExit, match=f"`{option} {pairs}`. It must be a number of pairs"):
        main(["plan", option, pairs])


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "parameters", "saved"),
    [
        ("ViT-B/16", paper.B16_PARAMETERS, paper.B16_SAVED),
        ("ViT-L/14", paper.L14_PARAMETERS, paper.L14_SAVED),
    ],
)
def test_model_by_name_has_the_bytes_that_the_paper_table_counts(
    name: str, parameters: int, saved: int
) -> None:
    pytest.importorskip("transformers")
    from lightning_mp.plan.sources import subject_of_model

    subject = subject_of_model(name, "BalancedAMP")
    assert subject.parameters == parameters
    # Library versions differ by one saved mask; the table is printed to 0.1%.
    counted = sum(tower.saved_per_pair for tower in subject.towers.values())
    assert counted == pytest.approx(saved, rel=0.01)
    assert subject.pair_bytes == paper.PAIR_BYTES


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["BalancedAMP", "PureFP16"])
def test_model_of_open_clip_has_the_size_of_transformers(precision: str) -> None:
    for package in ("open_clip", "transformers"):
        pytest.importorskip(package)
    from lightning_mp.plan.sources import subject_of_model

    theirs, same = (subject_of_model(name, precision) for name in ("ViT-B-32", "ViT-B/32"))
    assert (theirs.parameters, theirs.width) == (same.parameters, same.width)
    assert theirs.pair_bytes == same.pair_bytes
    # Both compute the same products, but they may save different tensors.
    assert theirs.flops_per_pair(cached=True) == pytest.approx(
        same.flops_per_pair(cached=True), rel=0.01
    )
    assert all(tower.saved_per_pair > 2**20 for tower in theirs.towers.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_plan_of_a_config_prints_tables_and_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    main(["plan", "--config", CONFIG, "--batch", "1M", "--gpus", "64", "--pairs", "400M",
          "--pairs-per-second", "1000"])  # fmt: skip
    printed = capsys.readouterr().out
    for method in METHODS:
        assert len(re.findall(re.escape(f"\n{method.name}  "), printed)) == 2, method.name
    # 16,384 pairs per rank at 1,000 per second. A backward takes one or two forwards, so without a
    # replay it is two thirds to three quarters of that.
    assert re.search(r"lightning-mp +16\.4 ", printed)
    seconds = re.findall(r"dense, towers at once +(\S+)", printed)[1]
    assert 16.384 * 2 / 3 <= float(seconds) <= 12.3
    # 63 shards of 16,384 pairs: texts twice in fp32, their gradients, and two sums.
    width = int(re.search(r"feature width (\d+)", printed)[1])  # type: ignore[index]
    sent = 63 * 2**14 * (3 * width * 4 + 16) / GIB
    gflop = 4 * 2 * 2**40 / 64 * width / 1e9
    assert f"sends {sent:,.1f} GiB a step" in printed
    assert f"beside {gflop:,.0f} GFLOP of the loss" in printed
    assert "Advice: 1,048,576 pairs fit" in printed


class LooksAtValues(GlyphCLIP):
    """Cannot be made without memory, like models of open_clip, which move to a device."""

    def __init__(self) -> None:
        super().__init__()
        self.first_scale = float(self.logit_scale)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_optimizer_of_the_config_precedes_that_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config, path = yaml.safe_load((ROOT / CONFIG).read_text()), tmp_path / "config.yaml"
    config["optimizer"] = {"class_path": "torch.optim.SGD"}
    config["optimizer"]["init_args"] = {"lr": 0.1, "momentum": 0.9}
    config["model"] = {"class_path": "tests.plan.test_plan.LooksAtValues"}
    path.write_text(yaml.safe_dump(config))
    subject = subject_of_config(read_config([str(path)]))
    assert subject.found == "on tensors without memory"
    assert subject.optimizer == "SGD"
    assert subject.states == {"float32": 4 * subject.parameters, "bfloat16": 2 * subject.parameters}
    # "auto" is determined by a run, so the plan uses the default.
    assert subject_of_config(read_config(["examples/text_to_text.yaml"])).micro_batch == 256
    own = subject_of_config(read_config([CONFIG]))
    assert own.optimizer == "AdamW"
    assert own.states["float32"] == pytest.approx(8 * own.parameters, rel=1e-3)  # + step counts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("batch", "micro_batch"), [(512, 128), pytest.param(2048, 1024, marks=pytest.mark.sweep)]
)
def test_demo_is_predicted_within_15_percent_of_its_peak(
    batch: int, micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    from examples.glyph_clip.data import GlyphData

    data = GlyphData(batch_size=batch, progress=False)
    data.prepare_data()
    data.setup()

    def run() -> None:
        strategy = InfCLStrategy(micro_batch_size=micro_batch, process_group_backend="gloo")
        trainer = pl.Trainer(
            **QUIET,
            strategy=strategy,
            max_steps=2,  # Adam has states in the second step
            gradient_clip_val=1.0,
        )
        trainer.fit(GlyphCLIP(), data)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = peak_allocated(run)
    subject = replace(subject_of_config(read_config([CONFIG])), micro_batch=micro_batch)
    assert subject.found == "on tensors without memory"
    machine = Machine(1, 16 * GIB, 16 * GIB, 1, "cpu")
    predicted = memory(METHODS[-1], batch, subject, machine).peak
    assert abs(predicted / measured - 1) <= 0.15
