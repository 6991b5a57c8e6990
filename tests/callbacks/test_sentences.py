"""What monitors say is what `golden/` holds, which people have read."""

import pytest

from lightning_mp.callbacks._rules.sentences import _ordinal
from tests.callbacks.sentences import FILES, FOLDER


@pytest.mark.parametrize("file", FILES)
def test_sentences_are_those_that_were_reviewed(file: str) -> None:
    # After a change of words: `python -m tests.callbacks.sentences`.
    assert "\n".join(FILES[file]()) == (FOLDER / file).read_text(encoding="utf-8")


def test_sentences_start_with_a_capital_and_end_with_a_full_stop() -> None:
    for file in ("rules.txt", "spikes.txt"):
        for line in (FOLDER / file).read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("["):
                assert line.lstrip("`")[0].isupper() or line[0].isdigit(), line
                assert line.endswith("."), line


def test_ordinals_are_english() -> None:
    written = [_ordinal(count) for count in (1, 3, 9, 11, 12, 13, 21, 22, 103, 111)]
    assert written == [
        *("first", "third", "9th", "11th", "12th", "13th", "21st", "22nd", "103rd", "111th")
    ]
