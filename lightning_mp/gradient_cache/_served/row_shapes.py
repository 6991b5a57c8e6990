"""Outputs that have the rows of a micro-batch as another dimension, such as pairwise scores.

Of a micro-batch, `logits_per_image` of Hugging Face's `CLIPModel` are m x m. Micro-batches of one
size would be put together to B x m, as if each row had met m - 1 others alone: another loss.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from lightning_mp.gradient_cache._served.outputs import Outputs

__all__ = ["check_row_shapes"]


@torch.no_grad()
def check_row_shapes(run: Callable[[int], Any], outputs: Outputs) -> None:
    """Learn how many rows outputs have for one row, and refuse those whose shape follows them.

    Args:
        run: Returns what a tower returns for so many copies of one row, between which nothing
            differs but their number: not the length of a text, either.
        outputs: The outputs of the call.

    Raises:
        ValueError: Names the output.
    """
    # Two rows, as BatchNorm takes no single one. A compiler would take the sizes for those to come.
    is_compiling = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if is_compiling else nullcontext():
        two, three = (outputs.shapes(run(rows)) for rows in (2, 3))
    for path in (path for path in two if path in three):
        outputs.learn_role(path, two[path], three[path])
