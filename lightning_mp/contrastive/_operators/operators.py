"""What the operators of all losses share: schemas, how gradients come back, what is refused.

Operators of `torch.library` are what `torch.compile` keeps whole: it sees their shapes (the fake
implementations) and the gradient formula, never their inside. Schemas are spelt out here rather
than read from signatures, so that arguments which all losses have are named once. An operator
returns no `None` among tensors: a backward returns a list of the gradients that are wanted.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["FEATURES", "TILES", "define", "derive", "wanted_like"]

FEATURES = "Tensor image_bD, Tensor text_nD, Tensor scale, Tensor? bias"
"""Features of (b, D) and (n, D), scale and bias."""

TILES = "str backend, str tile_dtype, SymInt? workspace_bytes, bool autotune"
"""The fields of `TileChoice`."""


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    tags: Sequence[torch.Tag] = (),
) -> Any:
    """Return an operator of this library.

    Args:
        name: Of `torch.ops.lightning_mp`.
        schema: Its arguments and results, without defaults.
        run: What it does; all arguments come by position.
        fake: What a compiler sees of it.
        tags: What else a compiler is to know.
    """
    operator = torch.library.custom_op(
        f"lightning_mp::{name}", run, mutates_args=(), schema=schema, tags=tags
    )
    operator.register_fake(fake)
    return operator


def derive(
    forward: Any,
    backward: Any,
    save: Callable[..., tuple[Sequence[Tensor | None], Any]],
    arguments: Callable[..., tuple[Sequence[Any], Sequence[bool]]],
    refusal: str,
) -> None:
    """Make one operator the derivative of another one's first output, which has no second.

    Args:
        forward: The operator.
        backward: Returns the gradients of its first inputs, of those that are wanted.
        save: Returns tensors and values to keep, of inputs and outputs.
        arguments: Returns those of `backward`, and which inputs it is to return gradients of; of
            the cotangent, the tensors, the values, and which inputs need a gradient.
        refusal: What to say to a second derivative.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        tensors, ctx.values = save(inputs, output)
        ctx.inputs = len(inputs)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*_flat(output[1:]))
        ctx.set_materialize_grads(False)  # zeros for these would take as much memory again

    def differentiate(ctx: Any, cotangent: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        given = (cotangent, ctx.saved_tensors, ctx.values, ctx.needs_input_grad)
        values, wanted = arguments(*given)
        gradients = iter(backward(*values))
        found = [next(gradients) if is_wanted else None for is_wanted in wanted]
        return (*found, *(None for _ in range(ctx.inputs - len(found))))

    def refuse(ctx: Any, *_: Any) -> None:
        raise RuntimeError(refusal)

    forward.register_autograd(differentiate, setup_context=keep)
    backward.register_autograd(refuse)


def wanted_like(inputs: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor]:
    """Return memory for the gradients of the inputs that are wanted."""
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, is_wanted in zip(inputs, wanted, strict=True)
        if x is not None and is_wanted
    ]


def _flat(outputs: Sequence[Any]) -> Iterator[Tensor]:
    for output in outputs:
        yield from output if isinstance(output, (list, tuple)) else [output]
