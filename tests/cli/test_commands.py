"""Commands without a Trainer are available in `lightning-mp` and in a user's own CLI."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_mp.cli.commands
from lightning_mp import LightningMPCLI
from lightning_mp.cli import main
from lightning_mp.cli.commands import COMMANDS, summary
from tests.cli.models import Model

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
def test_help_lists_every_command_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{{fit,validate,test,predict,{','.join(COMMANDS)}}}" in printed
    assert f"report {summary('report')}" in printed
    assert "usage: lightning-mp " in printed
    assert "commands that plan, check and report a run." in printed


@pytest.mark.parametrize(("args", "last_line"), [
    ("doctor run.yaml", "unrecognized arguments: run.yaml. Write `--config run.yaml`."),
    ("preflight --step=3 --setps 3", "unrecognized arguments: --setps 3. Did you mean `--steps`?"),
    ("plan run.yml", "unrecognized arguments: run.yml. Write `--config run.yml`."),
    ("plan ViT-B/32", "unrecognized arguments: ViT-B/32. Write `--config ViT-B/32` or "
     "`--model ViT-B/32`."),
    ("report folder other", "unrecognized arguments: other"),
    pytest.param("fit run.yaml", "unrecognized arguments: run.yaml. Write `--config run.yaml`.",
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_error_of_a_wrong_argument_ends_with_what_to_change(
    args: str, last_line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(args.split())
    assert capsys.readouterr().err.splitlines()[-1].removeprefix("error: ") == last_line


def test_error_of_a_wrong_type_names_option_type_and_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--gpus", "x"])
    # Versions of jsonargparse differ in the order of the types.
    words = r"Reason: gpus -> Expected one of \[(int, None|None, int)\]\. Got value: x"
    assert re.fullmatch(words, capsys.readouterr().err.splitlines()[-1])


@pytest.fixture
def greeted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Add a command as in `commands.py`; return the list of its calls."""
    calls = []

    def greet(name: str, times: int = 1, loud: bool | None = None) -> None:
        """Greet somebody.

        Args:
            name: The person.
            times: Number of greetings.
            loud: Whether it is a shout.
        """
        calls.append((name, times, loud))

    monkeypatch.setitem(lightning_mp.cli.commands.COMMANDS, "greet", greet)
    return calls


def test_command_is_a_function_and_its_name(
    greeted: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["greet", "Ada", "--times", "3", "--loud"])
    main(["greet", "Ada", "--loud", "false"])
    assert greeted == [("Ada", 3, True), ("Ada", 1, False)]
    with pytest.raises(SystemExit, match="0"):
        main(["greet", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    usage = "usage: lightning-mp greet [--times TIMES] [--loud [{true,false,null}]] name"
    assert f"{usage} Greet somebody." in printed
    assert "times TIMES Number of greetings." in printed
    with pytest.raises(SystemExit, match="2"):
        main(["greet"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert "name" in said
    assert "required" in said


def test_names_are_printed_on_a_terminal_of_any_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def greet(name: str) -> None:
        """Greet somebody."""
        print(name)

    monkeypatch.setitem(lightning_mp.cli.commands.COMMANDS, "greet", greet)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), encoding="ascii"))
    main(["greet", "Zoë"])
    sys.stdout.flush()
    assert written.getvalue().splitlines() == [b"Zo\\xeb"]


@pytest.mark.slow
def test_command_runs_in_a_users_cli(greeted: list[tuple[Any, ...]]) -> None:
    with pytest.raises(SystemExit, match="0"):
        LightningMPCLI(Model, args=["greet", "Grace"])
    assert greeted == [("Grace", 1, None)]


@pytest.mark.slow
def test_config_of_a_users_cli_contains_the_arguments_of_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "run.yaml", tmp_path / "more.yaml"
    files[0].write_text("model: {loss: torch.nn.L1Loss}")
    files[1].write_text("{trainer: {precision: bf16-true}, optimizer: torch.optim.SGD}")
    args = ["doctor", "-c", str(files[0]), "--config", str(files[1])]
    with pytest.raises(SystemExit, match="1"):
        LightningMPCLI(Model, args=args)
    assert "the states of 2 parameters in bfloat16" in capsys.readouterr().out


@pytest.mark.slow
def test_help_offers_completion_for_shells(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    (choices,) = re.findall(r"--print_completion {(.*?)}", capsys.readouterr().out)
    assert {"shtab-bash", "shtab-zsh"} <= set(choices.split(","))


COMPLETE = """
source "$1"
while read -ra words; do
  COMP_WORDS=(lightning-mp "${words[@]}"); COMP_CWORD=${#words[@]}
  _shtab_lightning_mp lightning-mp "${COMP_WORDS[$COMP_CWORD]}" 2>/dev/null
  echo "${COMPREPLY[@]}"
done
"""
# Typed text, and all of its completions.
TYPED = {
    "r": {"report"},
    "p": {"predict", "plan", "preflight"},
    "plan --tf": {"--tflops"},
    "fit --trainer.plugins.half_o": {"--trainer.plugins.half_ops"},
    "fit --trainer.callbacks lightning_mp.S": {"lightning_mp.SpikeGuard"},
    "fit --trainer.strategy lightning_mp.InfCLS": {"lightning_mp.InfCLStrategy"},
}


@pytest.mark.sweep
def test_bash_completes_commands_options_and_classes(tmp_path: Path) -> None:
    script = tmp_path / "completion.sh"
    with script.open("w") as file:
        # In a new process, because models of other tests would appear among the completions.
        subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "lightning_mp", "--print_completion=shtab-bash"],
            check=True,
            stdout=file,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    ran = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", str(script)],
        input="".join(f"{typed}\n" for typed in TYPED),
        check=True,
        capture_output=True,
        text=True,
    )
    completed = [set(line.split()) for line in ran.stdout.splitlines()]
    assert dict(zip(TYPED, completed, strict=True)) == TYPED
