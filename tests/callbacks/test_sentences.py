"""The sentences of callbacks equal the reviewed ones in `golden/`."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import lightning_mp.callbacks
from lightning_mp.callbacks._rules.records import Verdict
from lightning_mp.callbacks._words.sentences import REMEDIES
from lightning_mp.callbacks._words.wording import _Number, words_for
from tests.callbacks.sentences import FILES, FOLDER, SAMPLES


@pytest.mark.parametrize("file", FILES)
def test_sentences_equal_the_reviewed_ones(file: str) -> None:
    # To update them, run `python -m tests.callbacks.sentences`.
    assert "\n".join(FILES[file]()) == (FOLDER / file).read_text(encoding="utf-8")


def test_sentences_start_with_a_capital_or_code_and_end_with_a_full_stop() -> None:
    for file in FILES:
        for line in (FOLDER / file).read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("["):
                assert line[0] == "`" or line[0].isupper() or line[0].isdigit(), line
                assert line.endswith("."), line


def test_callbacks_have_no_sentences_outside_words() -> None:
    says = {"warn", "rank_zero_warn", "rank_zero_info", "warning"}
    folder = Path(lightning_mp.callbacks.__file__).parent
    found = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) else node
            name = call.func if isinstance(call, ast.Call) else None
            is_said = isinstance(node, ast.Raise) or getattr(name, "attr", getattr(name, "id", ""))
            if isinstance(call, ast.Call) and (is_said is True or is_said in says):
                texts = [a for a in call.args if isinstance(a, ast.Constant | ast.JoinedStr)]
                found += [f"{path.relative_to(folder)}:{call.lineno}"] * bool(texts)
    # `__init__.py` raises an error before it can import the messages.
    assert [each for each in found if not each.startswith("__init__.py")] == []


def test_several_remedies_are_alternatives() -> None:
    clip = "Clip updates with `SafeAdamW(clip_update_rms=1.0)`."
    numbers = dict.fromkeys(("median", "z", "z_threshold", "window", "rate", "fitting_rate"), 1.0)
    verdict = Verdict("loss_spike", 9.0, 3.0, numbers={**numbers, "of_optimizer": ""})
    one = replace(verdict, remedies=("safe adam",))
    two = replace(verdict, remedies=("safe adam", "lower rate"))
    assert words_for(one, ())[1] == clip
    expected = f"Try these remedies one at a time. {clip} Lower the learning rate from 1 to 1."
    assert words_for(two, ())[1] == expected


def test_remedies_in_a_run_with_a_locator_do_not_add_one() -> None:
    lost = Verdict("non_finite_loss", float("nan"), remedies=("locate",))
    assert (
        words_for(lost, ("locator",), of_optimizer="")[1] == "See the alarm of `NonFiniteLocator`."
    )
    found = Verdict("activation_non_finite", 3.0, tensor="head", numbers={"dtype": "bfloat16"})
    assert words_for(found, ("locator", "wide"))[1].startswith("Look for a division by 0")


def test_remedies_name_no_learning_rate_that_is_unknown_or_at_its_end() -> None:
    """The number would be 0, for example with the `Adafactor` of Hugging Face."""
    numbers = {**SAMPLES, "lower_rate": 7.77e-4, "start_rate": 7.77e-4}
    for key in REMEDIES:
        kind, *tags = key.split(", ")
        verdict = Verdict(kind, 0.1, 0.2, tensor="a.b", numbers=numbers)
        assert "0.000777" not in words_for(verdict, {*tags, "ending"})[1], key


def test_ordinals_are_english() -> None:
    written = [f"{_Number(count):th}" for count in (1, 3, 9, 11, 12, 13, 21, 22, 103, 111)]
    assert written == [
        *("first", "third", "9th", "11th", "12th", "13th", "21st", "22nd", "103rd", "111th")
    ]
