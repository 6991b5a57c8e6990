"""Each planted mistake is found by name, until the line of the finding is changed."""

import os
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml

from lightning_mp.cli import main
from tests.doctor import models
from tests.quiet import QUIET

pytestmark = pytest.mark.filterwarnings("ignore")
MODEL, DATA = "tests.doctor.models.CLIP", "tests.doctor.models.Pairs"


def plugin(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": name, "init_args": arguments}


def config(trainer: dict[str, Any], *, model: dict[str, Any] = {}, **more: Any) -> dict[str, Any]:  # noqa: B006
    data = {"class_path": DATA, "init_args": more.pop("data", {})}
    return {
        "seed_everything": 0,
        "trainer": {"devices": 8, **trainer},
        "model": {"class_path": MODEL, "init_args": model},
        "data": data,
        **more,
    }


CACHE = {"strategy": plugin("InfCLStrategy", micro_batch_size=8)}
BALANCED = {"plugins": plugin("BalancedAMP", half="bf16")}
SAFE = {"optimizer": {"class_path": "SafeAdamW", "init_args": {"lr": 1e-3}}}
LARGE_EPSILON = {"optimizer": plugin("torch.optim.AdamW", lr=1e-3, eps=0.1)}
WATCHED = {"callbacks": [plugin("ActivationRangeMonitor")]}
GUARD = plugin("SpikeGuard", action="skip")
PLANTED = [
    (
        "set-up",
        config({"strategy": plugin("InfCLStrategy", towers=["visual", "txt"])}),
        config({"strategy": plugin("InfCLStrategy", towers=["visual", "text"])}),
    ),
    ("precision flag", config({**BALANCED, "precision": "bf16-mixed"}), config(BALANCED)),
    (
        "precision flag",
        config({"plugins": [BALANCED["plugins"]], "precision": "bf16-mixed"}),
        config({"plugins": [BALANCED["plugins"]]}),
    ),
    (
        "unknown name in `fp32_modules`",
        config({"plugins": plugin("BalancedAMP", fp32_modules=["LayerNrm"])}),
        config({"plugins": plugin("BalancedAMP", fp32_modules=["LayerNorm"])}),
    ),
    (
        "unknown name in `inf_clamp`",
        config({"plugins": plugin("BalancedAMP", inf_clamp=["auto", "txt"])}),
        config({"plugins": plugin("BalancedAMP", inf_clamp=["auto", "text"])}),
    ),
    (
        "set-up",
        config({"plugins": plugin("BalancedAMP", inf_clamp="text")}),
        config({"plugins": plugin("BalancedAMP", inf_clamp=["text"])}),
    ),
    (
        "epsilon",
        config({"precision": "16-true"}),
        config({"precision": "16-true"}, **LARGE_EPSILON),
    ),
    (
        "optimizer states",
        config({"precision": "bf16-true"}),
        config({"precision": "bf16-true"}, **SAFE),
    ),
    (
        "accumulation in half precision",
        config({"precision": "bf16-true", "accumulate_grad_batches": 2}),
        config({"precision": "bf16-true", "accumulate_grad_batches": 1}),
    ),
    ("dtype of checkpoints", config({"precision": "bf16-true"}, **SAFE), config(BALANCED, **SAFE)),
    ("BatchNorm in a tower", config(CACHE, model={"norm": "BatchNorm1d"}), config(CACHE)),
    (
        "BatchNorm in a tower",
        config(CACHE, model={"norm": "BatchNorm1d"}),
        config(CACHE, model={"norm": "BatchNorm1d", "frozen": True}),
    ),
    (
        "`find_unused_parameters`",
        config({"strategy": plugin("InfCLStrategy", find_unused_parameters=True)}),
        config({"strategy": plugin("DDPStrategy", find_unused_parameters=True)}),
    ),
    # Each of 8 ranks has an eighth of the rows, in batches of 16.
    ("`drop_last`", config(CACHE, data={"rows": 144}), config(CACHE, data={"rows": 121})),
    ("`drop_last`", config(CACHE, data={"rows": 144}), config({}, data={"rows": 144})),
    (
        "`drop_last`",
        config(CACHE, data={"rows": 144}),
        config(CACHE, data={"rows": 144, "drop_last": True}),
    ),
    (
        "`drop_last`",
        config({**CACHE, "devices": 4}, data={"rows": 121}),
        config({**CACHE, "devices": 4, "num_nodes": 2}, data={"rows": 121}),
    ),
    (
        "`drop_last`",
        config({**CACHE, "devices": "auto"}, data={"rows": 121}),
        config({**CACHE, "devices": "auto"}, data={"rows": 15}),  # the only batch
    ),
    (
        "`drop_last`",
        config({**CACHE, "use_distributed_sampler": False}, data={"rows": 121}),
        config({**CACHE, "use_distributed_sampler": False}, data={"rows": 128}),
    ),
    (
        "compiled modules",
        config(WATCHED, model={"compiled": True}),
        config({"callbacks": [GUARD]}, model={"compiled": True}),
    ),
    ("compiled modules", config(WATCHED, model={"compiled": True}), config(WATCHED)),
    (
        "callbacks",
        config({"callbacks": [GUARD, plugin("NonFiniteLocator", action="stop")]}),
        config({"callbacks": [GUARD, plugin("NonFiniteLocator", action="warn")]}),
    ),
    (
        "callbacks",
        config({"callbacks": [GUARD, plugin("NonFiniteLocator", action="stop")]}),
        config({"callbacks": [plugin("SpikeGuard"), plugin("NonFiniteLocator", action="stop")]}),
    ),
    (
        "sizes for tensor cores",
        config(BALANCED, model={"width": 12}),
        config({}, model={"width": 12}),
    ),
    (
        "callbacks",
        config({"callbacks": [GUARD], "detect_anomaly": True}),
        config({"callbacks": [GUARD]}),
    ),
    (
        "callbacks",
        config({"callbacks": [GUARD, plugin("EarlyStopping", monitor="loss")]}),
        config({"callbacks": [GUARD, plugin("EarlyStopping", monitor="loss", check_finite=False)]}),
    ),
]


def told(settings: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of the doctor, followed by its exit code."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    code: Any = 0
    try:
        main(["doctor", "--config", str(path)])
    except SystemExit as stop:
        code = stop.code
    return f"{capsys.readouterr().out}\nexit {code}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_error_in_the_code_of_a_user_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config({**BALANCED, "devices": 1}, data={"width": 9})))
    with pytest.raises(SystemExit, match=r"shapes .* \(RuntimeError in models\.py, line \d+\)$"):
        main(["preflight", "--config", str(path)])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "planted", "mended"), PLANTED)
def test_planted_mistake_is_found_until_it_is_corrected(
    kind: str,
    planted: dict[str, Any],
    mended: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, after = (told(settings, tmp_path, capsys) for settings in (planted, mended))
    found, left = (
        set(re.findall(r"^[A-Z]+: (.*)\n  What:   ", said, re.M)) for said in (before, after)
    )
    assert found - left == {kind}
    assert left < found
    assert ("WRONG: " in before) == before.endswith("exit 1")
    severities = re.findall(r"^(WRONG|ADVICE): ", before, re.MULTILINE)
    assert severities == sorted(severities, reverse=True)
    assert [each.name for each in tmp_path.iterdir()] == ["run.yaml"]  # nothing was written


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_safe_adamw_cures_what_the_doctor_recommends_it_for(
    precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "optimizer: SafeAdamW" in told(config({"precision": precision}), tmp_path, capsys)
    said = told(config({"precision": precision}, **SAFE), tmp_path, capsys)
    assert said.startswith("0 wrong, 1 to improve")  # the dtype of checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (config(BALANCED, model={"width": 12}), "(2): visual.0 (8 x 12), visual.2 (12 x 8).\n"),
        (config({"precision": "bf16-true"}), "keeps the states of 8 parameters in bfloat16.\n"),
        (
            config({"precision": "bf16-true", "accumulate_grad_batches": 2}),
            "A gradient below 3.9e-03 of the accumulated sum is lost.\n",
        ),
        (config(WATCHED, model={"compiled": True}), "monitors `visual`, which `torch.compile`"),
        (config(CACHE, data={"rows": 144}), "has 2 rows, the others 16.\n"),
    ],
)
def test_findings_state_names_and_numbers(
    settings: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in told(settings, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    [
        {},
        CACHE,
        BALANCED,
        {**CACHE, **BALANCED},
        {"plugins": plugin("PureFP16", inf_clamp=["auto"])},  # as in a saved config
        {"accumulate_grad_batches": 2},
        {"strategy": "ddp_spawn_find_unused_parameters_true"},
        {"strategy": plugin("InfCLStrategy", start_method="spawn", micro_batch_size=8)},
        {"strategy": plugin("DDPStrategy", process_group_backend="nccl")},
        {"strategy": plugin("ModelParallelStrategy", data_parallel_size=4, tensor_parallel_size=2)},
    ],
)
def test_correct_config_has_no_findings(
    trainer: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(config(trainer), tmp_path, capsys)
    assert "Nothing found by 14 checks." in said
    assert said.endswith("exit 0")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FSDPBalancedAMP", "lightning_mp.FSDPBalancedAMP"])
@pytest.mark.parametrize("strategy", ["fsdp", {"class_path": "FSDPStrategy"}])
def test_sharded_config_is_checked_without_a_gpu(
    name: str, strategy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for plugins in (plugin(name, half="bf16"), [plugin(name)], name):
        said = told(config({"strategy": strategy, "plugins": plugins}), tmp_path, capsys)
        assert said.startswith("Nothing found by 14 checks.")
        assert "Not checked: The FSDP strategy, which needs a GPU, was left out." in said
    said = told(config({"strategy": strategy, "precision": "bf16-true"}), tmp_path, capsys)
    assert "Change: plugins: FSDPBalancedAMP without `precision`, or optimizer" in said
    wrong = plugin(name, fp32_modules=["LayerNrm"])
    said = told(config({"strategy": strategy, "plugins": wrong}), tmp_path, capsys)
    assert "WRONG: unknown name in `fp32_modules`" in said


@pytest.mark.slow
def test_profiler_writes_nothing_and_fp16_on_a_cpu_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiler = plugin("SimpleProfiler", dirpath=str(tmp_path), filename="times")
    said = told(config({"profiler": profiler, "precision": 16}), tmp_path, capsys)
    assert "Not checked: `precision: 16-mixed`, in place of which Lightning uses bf16" in said
    assert [each.name for each in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.slow
def test_errors_before_the_first_batch_are_findings_with_whole_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config({}, model={"optimizers": 2}, ckpt_path="missing.ckpt")
    said = told(settings, tmp_path, capsys)
    assert "Change: Set `self.automatic_optimization = False`, then access" in said
    assert "Not checked: `ckpt_path: missing.ckpt`, which does not exist on this machine." in said
    assert said.endswith("exit 1")
    other = {"state_dict": {"head.weight": torch.zeros(1)}, "pytorch-lightning_version": "2.6.0"}
    torch.save(other, path := tmp_path / "other.ckpt")
    said = told(config({}, ckpt_path=str(path)), tmp_path, capsys)
    assert "state_dict for CLIP:" in said
    assert "Change: Correct the setting that the error names." in said
    assert said.endswith("exit 1")
    settings = config({"plugins": plugin("BalancedAMP", half="float16", fp32_modules=["text"])})
    said = told(settings, tmp_path, capsys)
    assert "Expected a Literal['fp16', 'bf16']. Got value: float16\n" in said
    assert "Change: Correct the setting that the error names." in said
    del (settings := config({}))["data"]
    said = told(settings, tmp_path, capsys)
    assert "The run ends before its first batch: `train_dataloader` must be implemented" in said
    assert "Change: Correct the setting that the error names." in said
    assert said.endswith("exit 1")


@pytest.mark.slow
def test_checkpoint_that_cannot_be_restored_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = pl.Trainer(**QUIET, max_steps=1)
    trainer.fit(models.CLIP(), models.Pairs())
    path = tmp_path / "run.ckpt"
    for weights_only, reason in ((True, "checkpoint contains only the model"), (False, "")):
        trainer.save_checkpoint(path, weights_only)
        said = told(config({"devices": 1}, ckpt_path=str(path)), tmp_path, capsys)
        assert reason in said
        assert ("(KeyError in `ckpt_path`)" in said) == said.endswith("exit 1") == weights_only
    path.write_bytes(path.read_bytes()[:4000])  # as after a full disk
    said = told(config({"devices": 1}, ckpt_path=str(path)), tmp_path, capsys)
    assert "Error in `ckpt_path`)" in said
    (folder := tmp_path / "sharded").mkdir()
    said = told(config({"devices": 1}, ckpt_path=str(folder)), tmp_path, capsys)
    assert f"Not checked: `ckpt_path: {folder}`, which was not loaded." in said


@pytest.mark.slow
def test_sizes_for_tensor_cores_do_not_matter_in_double_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(config({"precision": "64-true"}, model={"width": 12}), tmp_path, capsys)
    assert "Nothing found by 14 checks." in said


@pytest.mark.slow
def test_preflight_fails_if_an_earlier_step_has_made_weights_nan(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config({"precision": "16-true", "devices": 1})))
    with pytest.raises(SystemExit, match="An optimizer step has written"):
        main(["preflight", "--config", str(path)])


@pytest.mark.slow
def test_batch_that_does_not_fit_is_a_finding_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config(CACHE)))
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--config", str(path), "--gpu-memory", "0.0001"])
    said = capsys.readouterr().out
    assert stop.value.code == 1
    assert "WRONG: memory" in said
    assert "A batch of 128 on 8 ranks needs" in said


@pytest.mark.parametrize("name", ["gpu_memory", "host_memory"])
def test_memory_out_of_range_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config(CACHE)))
    with pytest.raises(SystemExit, match=f"`{name}` must be a finite number above 0"):
        main(["doctor", "--config", str(path), f"--{name}=-1"])


@pytest.mark.slow
def test_data_of_another_machine_are_noted_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(config(CACHE, data={"missing": True}), tmp_path, capsys)
    assert "\nNot checked: Memory: FileNotFoundError: images/0.png\n" in said


@pytest.mark.slow
def test_config_from_a_pipe_is_read_once(capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    with open(writing, "w") as file:
        file.write(yaml.safe_dump(config(CACHE)))
    main(["doctor", "--config", f"/dev/fd/{reading}"])
    os.close(reading)
    assert capsys.readouterr().out == "Nothing found by 14 checks.\n"


def test_unreadable_config_ends_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor"])
    assert "arguments are required: config" in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text("nothing")
    with pytest.raises(SystemExit, match="holds no settings"):
        main(["doctor", "--config", str(tmp_path / "run.yaml")])
    (tmp_path / "run.yaml").write_bytes("a: café".encode("latin-1"))
    with pytest.raises(SystemExit, match="run.yaml`, which is not valid YAML: 'utf-8' codec"):
        main(["doctor", "--config", str(tmp_path / "run.yaml")])
    (tmp_path / "run.yaml").write_text("trainer: [max_steps: 2]")
    with pytest.raises(SystemExit, match="run.yaml`, whose `trainer` holds no settings"):
        main(["doctor", "--config", str(tmp_path / "run.yaml")])
    (tmp_path / "run.yaml").write_text("trainer: [")
    with pytest.raises(SystemExit, match="run.yaml`, which is not valid YAML: while parsing"):
        main(["doctor", "--config", str(tmp_path / "run.yaml")])
