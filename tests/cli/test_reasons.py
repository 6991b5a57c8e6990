"""After a mistake in a config, the helpful line is among the last three printed lines."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_mp import LightningMPCLI
from lightning_mp.cli import main
from lightning_mp.cli.reasons import reason_of
from tests.cli.models import TRAINER, Model

pytestmark = pytest.mark.filterwarnings("ignore")


def _arguments(folder: Path, trainer: dict[str, Any]) -> list[str]:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({"trainer": {**TRAINER, **trainer}}))
    return ["--config", str(file)]


def _spec(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": name, "init_args": arguments}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({"max_stepss": 3}, "'max_stepss'. Did you mean `trainer.max_steps`?"),
        (
            {"plugins": [_spec("BalancedAMP", half="float16")]},
            "BalancedAMP -> half -> Expected a Literal['fp16', 'bf16']. Got value: float16",
        ),
        (
            {"plugins": _spec("BalancedAMP", half="float16")},
            "BalancedAMP -> half -> Expected a Literal['fp16', 'bf16']. Got value: float16",
        ),
        (
            {"plugins": [_spec("PureFP16", writeback="nearest")]},
            "PureFP16 -> Option 'writeback' is not accepted. Did you mean `write_back`?",
        ),
        (
            {"plugins": [_spec("BalancedAMP", loss_scale={"init_scal": 3})]},
            "LossScaleConfig -> Option 'init_scal' is not accepted. Did you mean `init_scale`?",
        ),
        ({"plugins": [_spec("BalancedAMP", loss_scale="dynamik")]}, "Got value: dynamik"),
        (
            {"plugins": ["BalancedAMPP"]},
            "trainer.plugins -> No class `BalancedAMPP` is accepted here. "
            "Did you mean `BalancedAMP`?",
        ),
        (
            {"callbacks": [_spec("SpikeGuard", action="explode")]},
            "action -> Expected a Literal['warn', 'skip', 'stop', 'raise', 'rewind']. "
            "Got value: explode",
        ),
        ({"callbacks": [_spec("SpikGuard")]}, "Did you mean `SpikeGuard`?"),
        (
            {"plugins": {"class_path": "BalancedAMP", "init_arg": {"half": "fp16"}}},
            "Option 'init_arg.half' is not accepted. Did you mean `init_args`?",
        ),
        (
            {"plugins": {"class_path": "BalancedAMP", "half": "fp16"}},
            "Reason: trainer.plugins -> `half` must be below `init_args`, not beside",
        ),
        (
            {"callbacks": [_spec("SpikeGuard"), {"class_path": "SpikeGuard", "action": "warn"}]},
            "Reason: trainer.callbacks -> `action` must be below `init_args`, not beside",
        ),
        (
            {"strategy": {"class_path": "InfCLStrategy", "towers": ["a"], "prefetch": 1}},
            "Reason: trainer.strategy -> `prefetch`, `towers` must be below `init_args`, not",
        ),
        (
            {"strategy": _spec("InfCLStrategy", find_unused_paramters=True)},
            "Did you mean `find_unused_parameters`?",
        ),
    ],
)
def test_cause_of_an_error_is_printed_last(
    trainer: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        LightningMPCLI(Model, run=False, args=_arguments(tmp_path, trainer))
    assert said in " ".join(capsys.readouterr().err.splitlines()[-3:])


@pytest.mark.slow
def test_cause_of_an_error_of_a_subcommand_is_printed_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistaken = _arguments(tmp_path, {"plugins": [_spec("BalancedAMP", half="float16")]})
    with pytest.raises(SystemExit, match="2"):
        main(["fit", *mistaken])
    assert capsys.readouterr().err.splitlines()[-1] == (
        "Reason: trainer.plugins -> lightning_mp.BalancedAMP -> half -> "
        "Expected a Literal['fp16', 'bf16']. Got value: float16"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        (
            {"plugins": [_spec("BalancedAMP", half="bf16", loss_scale=3)]},
            r"^Passed `BalancedAMP\(half='bf16', loss_scale=3.0\)`",
        ),
        (
            {"plugins": [_spec("BalancedAMP", loss_scale={"init_scale": -3})]},
            r"^Passed `LossScaleConfig\(init_scale=-3.0\)`",
        ),
        ({"callbacks": [_spec("SpikeGuard", window_steps=1)]}, r"^Passed `SpikeGuard\(window_"),
        ({"strategy": _spec("InfCLStrategy", prefetch=-1)}, r"^Passed `InfCLStrategy\(prefetch"),
    ],
)
def test_value_that_a_constructor_refuses_is_printed_last(
    trainer: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        LightningMPCLI(Model, run=False, args=_arguments(tmp_path, trainer))
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.__cause__ is not None  # the original error stays in the traceback


@pytest.mark.parametrize(
    "message",
    ["Subcommand 'fit' does not accept option 'unknown'", "a\nb", ""],
)
def test_other_errors_are_printed_without_a_cause(message: str) -> None:
    assert reason_of(message) is None


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ("Subcommand 'fit' does not accept option 'trainer.max_stepss'", "trainer.max_steps"),
        ("Group 'trainer' does not accept option 'stategy.init_args.x'", "trainer.strategy"),
        ("Option 'modle.class_path' is not accepted", "model"),
    ],
)
def test_key_of_a_config_is_suggested(message: str, key: str) -> None:
    assert reason_of(message) == f"{message}. Did you mean `{key}`?"


def test_error_with_an_unknown_message_is_not_ours() -> None:
    message = 'Parser key "half":\n  Does not validate against any of the Union subtypes\n  Sorry.'
    assert reason_of(message) == "half -> Does not validate against any of the Union subtypes"


@pytest.mark.parametrize(("name", "hint"), [("SafeAdam", "SafeAdamW"), ("AdamX", None)])
def test_class_is_suggested_if_its_name_is_close(name: str, hint: str | None) -> None:
    message = (
        'Parser key "optimizer":\n'
        "  Does not validate against any of the Union subtypes\n"
        "  Subtypes: [<class 'torch.optim.Optimizer'>, <class 'NoneType'>]\n"
        "  Errors:\n"
        f"    - Expected a dot import path string: {name}\n"
        "    - Expected a <class 'NoneType'>\n"
    )
    said = f"optimizer -> No class `{name}` is accepted here."
    assert reason_of(message) == (f"{said} Did you mean `{hint}`?" if hint else said)


def test_value_that_is_no_number_is_not_taken_for_a_class() -> None:
    message = (
        'Parser key "lr":\n'
        "  Does not validate against any of the Union subtypes\n"
        "  Subtypes: [<class 'float'>, <class 'torch.Tensor'>]\n"
        "  Errors:\n"
        "    - Expected a <class 'float'>\n"
        "    - Expected a dot import path string: 0,001\n"
        "  Given value type: <class 'str'>\n"
        "  Given value: 0,001\n"
    )
    assert reason_of(message) == "lr -> Expected one of [float, Tensor]. Got value: 0,001"


def test_equally_probable_causes_are_all_printed() -> None:
    message = (
        'Parser key "loss":\n'
        "  Does not validate against any of the Union subtypes\n"
        "  Subtypes: [<class 'a.Loss'>, <class 'b.Loss'>, <class 'NoneType'>]\n"
        "  Errors:\n"
        "    - Problem with given class_path 'a.Loss':\n"
        '        Parser key "scale":\n'
        "          Expected a <class 'float'>. Got value: x\n"
        "    - Problem with given class_path 'b.Loss':\n"
        '        Parser key "scale":\n'
        "          Expected a <class 'int'>. Got value: x\n"
        "    - Expected a <class 'NoneType'>\n"
        "  Given value type: <class 'dict'>\n"
        "  Given value: {'scale': 'x'}\n"
    )
    assert reason_of(message) == (
        "loss -> a.Loss -> scale -> Expected a float. Got value: x\n"
        "loss -> b.Loss -> scale -> Expected a int. Got value: x"
    )
