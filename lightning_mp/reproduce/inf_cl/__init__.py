"""Inf-CL, https://arxiv.org/abs/2410.17243: its tables and figures at this machine's size."""

from __future__ import annotations

from collections.abc import Callable

from lightning_mp.reproduce.inf_cl.cost import figure4
from lightning_mp.reproduce.inf_cl.levels import table4
from lightning_mp.reproduce.inf_cl.memory import figure1, table1, table2
from lightning_mp.reproduce.inf_cl.training import figure5, table3
from lightning_mp.reproduce.output import Output

__all__ = ["PARTS"]

PARTS: dict[str, Callable[[Output], None]] = {
    "table1": table1,
    "table2": table2,
    "figure1": figure1,
    "table4": table4,
    "figure4": figure4,
    "table3": table3,
    "figure5": figure5,
}
