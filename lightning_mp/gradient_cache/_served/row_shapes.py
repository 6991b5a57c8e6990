"""Detects outputs whose row shape depends on the micro-batch size, such as pairwise scores.

For m rows, `logits_per_image` of Hugging Face's `CLIPModel` has shape m x m. Concatenated, the
micro-batches would be B x m, as if each image had only m - 1 negatives: a different loss.
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
    """Learn the roles of outputs, and raise if the shape of a row depends on the number of rows.

    Args:
        run: Returns the tower's outputs for the given number of copies of one row. Copies have
            equal lengths, so that only their number differs.
        outputs: The outputs of the call.

    Raises:
        ValueError: The shape of an output depends on the number of rows.
    """
    # At least two rows, because BatchNorm fails on one row. Eager, because a compiler would
    # specialise on these sizes.
    is_compiling = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if is_compiling else nullcontext():
        two, three = (outputs.shapes(run(rows)) for rows in (2, 3))
    for path in (path for path in two if path in three):
        outputs.learn_role(path, two[path], three[path])
