"""In each cell of docs/precision/support-table.md, training equals fp32 or raises."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_mp import BalancedAMP, PureFP16
from tests.precision.models import fit, relative
from tests.precision.support_cases import CASES, data
from tests.processes import exit_code_of
from tests.quiet import parameters_of

PAGE = Path(__file__).parents[2] / "docs" / "precision" / "support-table.md"
PLUGINS: dict[str, Any] = {
    "`BalancedAMP` fp16": BalancedAMP,
    "`BalancedAMP` bf16": lambda: BalancedAMP(half="bf16"),
    "`PureFP16` fp16": PureFP16,
    "`PureFP16` bf16": lambda: PureFP16(half="bf16"),
}
BOUND = {torch.float16: 2**-5, torch.bfloat16: 2**-2.5}  # relative to the change of weights


def table() -> dict[tuple[str, str], str]:
    cells, columns = {}, []
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|") or set(line) <= set("|- "):
            continue
        row, *values = (cell.strip() for cell in line.strip("|").split("|"))
        if not row:
            columns = values
        else:
            cells.update({(row, column): v for column, v in zip(columns, values, strict=True)})
    return cells


TABLE = table()


def test_table_has_exactly_one_row_for_each_case() -> None:
    assert list(TABLE) == [(row, column) for row in CASES for column in PLUGINS]
    assert set(TABLE.values()) == {"trains", "refused"}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that:UserWarning")
@pytest.mark.parametrize(("row", "column"), TABLE)
def test_training_equals_fp32_or_raises_as_the_table_states(row: str, column: str) -> None:
    torch.compiler.reset()
    model, plugin = CASES[row](), PLUGINS[column]()
    if TABLE[row, column] == "refused":
        with pytest.raises((MisconfigurationException, RuntimeError)) as error:
            fit(model, plugin, data())
        ours = ("`BalancedAMP", "`PureFP16", "was replaced during training")
        assert any(words in str(error.value) for words in ours)
        return
    if row == "TorchScript":  # its backward keeps the first dtype in a process
        assert exit_code_of(check, row, column) == 0
    else:
        check(row, column)


@functools.cache
def in_fp32(row: str) -> Any:
    """Return the model of a row after training without a plugin, in eager mode."""
    model = CASES[row]()
    with torch.compiler.set_stance("force_eager"):
        fit(model, None, data())
    return model


def check(row: str, column: str) -> None:
    """Train under a plugin and compare the weights with training in fp32."""
    model, plugin = CASES[row](), PLUGINS[column]()
    start = parameters_of(model)
    fit(model, plugin, data())
    assert relative(model, in_fp32(row), start) < BOUND[plugin.half_dtype]
