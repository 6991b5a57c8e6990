"""The tables and figures of Inf-CL, https://arxiv.org/abs/2410.17243, at this machine's size."""

from papers.inf_cl.cost import figure4
from papers.inf_cl.levels import table4
from papers.inf_cl.memory import figure1, table1, table2
from papers.inf_cl.printed import figures_and_formulas
from papers.inf_cl.training import figure5, table3

__all__ = ["PARTS"]

_ALL = figures_and_formulas, table1, table2, figure1, table4, figure4, table3, figure5
PARTS = {part.__name__: part for part in _ALL}  # in the order in which they are made
