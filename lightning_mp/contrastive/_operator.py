"""All contrastive losses as one operator of `torch.library`, which `torch.compile` keeps whole.

A compiler sees the shapes that come out of it (the fake implementation) and the gradient formula,
never its inside: how large the batches of other ranks are, which texts belong together, and what
fits the workspace. So all that passes from the forward to the backward has this rank's sizes: the
gradients themselves, see `Found`.

Autocast does not change what it computes: features are taken in the dtype that they have, as
`ContrastiveLoss` documents, and autocast is off inside.

Shapes:
    b: this rank's images. n: its texts, of which the first b belong to them. D: feature width.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils.flop_counter import register_flop_formula

from lightning_mp.contrastive._call.pair_options import RULES, PairOptions
from lightning_mp.contrastive._exchange.agreement import group_size, plan_for, refuse
from lightning_mp.contrastive._sums.infonce import infonce
from lightning_mp.contrastive._sums.nested import Prefix, nested_infonce
from lightning_mp.contrastive._sums.plan import Found, Plan
from lightning_mp.contrastive._sums.sigmoid import sigmoid_pairs
from lightning_mp.contrastive._sums.targeted import targeted_infonce
from lightning_mp.contrastive._tiles.backends import ExchangeName, TileChoice
from lightning_mp.numerics.floats import accumulation_dtype, state_dtype

__all__ = ["contrastive_loss", "finish", "finish_gradients", "loss_of"]

# An operator has no type for what a call says of its pairs: it takes every option by itself.
_INPUTS = "Tensor image_bD, Tensor text_nD, Tensor scale, Tensor? bias, Tensor? negatives_bkD"
_PAIRS = "Tensor? ids, Tensor? weights, Tensor? positives, Tensor? guide_image, Tensor? guide_text"
_RULES = "str directions, str duplicates, float label_smoothing, str false_negatives, float margin"
_PREFIXES = "SymInt[] widths, float[] width_weights, bool normalize"
_TILES = "str backend, str tile_dtype, SymInt? workspace_bytes, bool autotune, bool keeps_tiles"
_SCHEMA = (
    f"({_INPUTS}, {_PAIRS}, {_RULES}, bool is_softmax, bool statistics, {_PREFIXES}, {_TILES},"
    " str exchange, str group, bool[] needs_grad)"
)
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


def loss_of(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    pairs: PairOptions,
    tiles: TileChoice,
    exchange: ExchangeName,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Return the loss of the global batch and the values of its statistics, empty if not wanted.

    Raises:
        ValueError: Something cannot be used; on all ranks.
    """
    prefixes = pairs.prefixes
    inputs = (image_bD, text_nD, scale, bias, pairs.negatives)
    # Where no backward can come, one product of four is enough.
    trains = torch.is_grad_enabled()
    # Two names of one operator: only what asks the host is kept out of CUDA graphs.
    loss, statistics, *_ = (_on_host if _asks_host(pairs, group) else contrastive_loss)(
        *inputs, pairs.ids, pairs.weights, pairs.positives, pairs.guide_image, pairs.guide_text,
        *(getattr(pairs, name) for name in RULES), pairs.is_softmax, pairs.statistics,
        [prefix.width for prefix in prefixes], [prefix.weight for prefix in prefixes],
        any(prefix.is_normalized for prefix in prefixes), *tiles, exchange,
        # A schema has no type for groups; torch knows them by name.
        "" if group is None else group.group_name,
        # Said by the caller: inside a compiled graph no tensor tells.
        [trains and x is not None and x.requires_grad for x in inputs],
    )  # fmt: skip
    return loss, statistics


def _asks_host(pairs: PairOptions, group: dist.ProcessGroup | None) -> bool:
    """Return whether the host waits for other hosts, or reads which texts belong together."""
    return group_size(group) > 1 or pairs.positives is not None


def _options(values: Sequence[Any]) -> tuple[PairOptions, TileChoice, Any, str, list[bool]]:
    """Return what a call says after scale and bias, from its flat form in `_SCHEMA`."""
    negatives_bkD, ids, weights, positives, guide_image, guide_text, *values = values
    rules: Any = dict(zip(RULES, values[:5], strict=True))
    is_softmax, statistics, widths, width_weights, normalize = values[5:10]
    prefixes = tuple(
        Prefix(width, weight, normalize)
        for width, weight in zip(widths, width_weights, strict=True)
    )
    pairs = PairOptions(
        ids, weights, positives, negatives_bkD, guide_image, guide_text, **rules,
        statistics=statistics, prefixes=prefixes, is_softmax=is_softmax,
    )  # fmt: skip
    *tiles, exchange, group, needs_grad = values[10:]
    return pairs, TileChoice(*tiles), exchange, group, needs_grad


def _run(
    image_bD: Tensor, text_nD: Tensor, scale: Tensor, bias: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    """Return the loss, its statistics and gradients, as `_fake` has them; empty is what is not due.

    Raises:
        ValueError: Something cannot be used; on all ranks.
    """
    pairs, tiles, exchange, group_name, needs_grad = _options(options)
    group = _group_of(group_name)
    problem, pairs, image_bD, text_nD = pairs.paired(image_bD, text_nD)
    if problem is not None:
        refuse(problem, image_bD, group)
    of_image, of_text, of_scale, of_bias, of_negatives = needs_grad
    # A softmax does not see a bias; a sigmoid's has its gradient from the scale's products.
    needs = (of_image, of_text, of_scale or (of_bias and not pairs.is_softmax))
    plan = plan_for(image_bD, text_nD, needs, pairs, tiles, exchange, group)
    # Operators run below autograd, which targets take their gradients from.
    with (
        torch.no_grad(),
        torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False),
        torch.autocast(image_bD.device.type, enabled=False),
    ):
        found = _found(image_bD, text_nD, scale, bias, pairs, plan, of_negatives)
    loss, d_bias = found.loss, found.d_bias
    if bias is not None and pairs.is_softmax:
        # It shifts all logits alike; but its NaN and inf are not to vanish.
        loss = loss + 0.0 * bias.to(loss.dtype).reshape(())
        d_bias = 0.0 * loss
    gradients = [found.d_image_bD, found.d_text_nD, found.d_scale, d_bias, found.d_negatives_bkD]
    if pairs.pairing is not None:  # back into the order of the inputs
        orders = (pairs.pairing.image_order, pairs.pairing.text_order)
        for place, order in zip((0, 1, 4), (*orders, orders[0]), strict=True):
            if order is not None and (grad := gradients[place]) is not None:
                gradients[place] = torch.empty_like(grad).index_copy_(0, order, grad)
    # What other ranks want is worked out with them, and of no use here.
    wanted = [x if need else None for x, need in zip(gradients, needs_grad, strict=True)]
    statistics_5 = found.statistics_5 if pairs.statistics else None
    # A copy: it and the scale's gradient are views of one sum, and outputs may not share memory.
    loss = loss.to(accumulation_dtype(image_bD.dtype), copy=True)
    # An operator returns tensors only: an empty one, of one dimension, stands for none.
    given = (loss.new_empty(0) if x is None else x.contiguous() for x in (statistics_5, *wanted))
    return loss, *given


def _found(
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    pairs: PairOptions,
    plan: Plan,
    negatives_need_grad: bool,
) -> Found:
    """Return the loss that the options of its pairs ask for, and its gradients."""
    if pairs.prefixes:
        return nested_infonce(image_bD, text_nD, scale, plan, pairs.prefixes)
    if not pairs.is_softmax:
        return sigmoid_pairs(image_bD, text_nD, scale, bias, plan)
    if pairs.is_plain:
        return infonce(image_bD, text_nD, scale, bias, plan)
    return targeted_infonce(image_bD, text_nD, scale, bias, plan, pairs, negatives_need_grad)


def _fake(
    image_bD: Tensor, text_nD: Tensor, scale: Tensor, bias: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    pairs, *_, needs_grad = _options(options)
    wide, state = accumulation_dtype(image_bD.dtype), state_dtype(image_bD.device)

    def empty(is_there: bool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return (
            image_bD.new_empty(shape, dtype=dtype)
            if is_there
            else image_bD.new_empty(0, dtype=wide)
        )

    of_image, of_text, of_scale, of_bias, of_negatives = needs_grad
    negatives_bkD = image_bD if pairs.negatives is None else pairs.negatives
    return (
        empty(True, (), wide),
        empty(pairs.statistics, (5,), wide),
        empty(of_image, image_bD.shape, wide),
        empty(of_text, text_nD.shape, wide),
        empty(of_scale, (), state),
        empty(of_bias, (), state),
        empty(of_negatives, negatives_bkD.shape, wide),
    )


def _define(name: str, *tags: torch.Tag) -> Any:
    """Return an operator of `_run`."""
    schema = _SCHEMA + " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    # Spelt out rather than read from the signature of `_run`, which takes its options as one.
    operator = torch.library.custom_op(
        f"lightning_mp::{name}", _run, mutates_args=(), schema=schema, tags=tags
    )
    operator.register_fake(_fake)
    operator.register_autograd(_differentiate, setup_context=_keep)
    return operator


def finish_gradients(
    cotangent: Tensor,
    image_bD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    negatives_bkD: Tensor | None,
    gradients: list[Tensor],
) -> list[Tensor]:
    """Return the gradients that are there, times the cotangent, as the inputs have them.

    `gradients` are what `_run` returned after its statistics. The inputs say of what dtype, and
    lead second derivatives to a refusal.
    """
    inputs = (image_bD, text_nD, scale, bias, negatives_bkD)
    return [
        # Multiplied and rounded in one operation.
        torch.mul(gradient, cotangent, out=x.new_empty(gradient.shape)).reshape(x.shape)
        for x, gradient in zip(inputs, gradients, strict=True)
        if x is not None and gradient.dim() != 1
    ]


def _fake_finish(cotangent: Tensor, *arguments: Any) -> list[Tensor]:
    *inputs, gradients = arguments
    return [
        # As `finish_gradients` makes them, whatever the strides of the inputs.
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, gradient in zip(inputs, gradients, strict=True)
        if x is not None and gradient.dim() != 1
    ]


# An operator of its own: as a plain product it would have second derivatives, and wrong ones.
finish = torch.library.custom_op(
    "lightning_mp::contrastive_loss_backward",
    finish_gradients,
    mutates_args=(),
    schema=f"(Tensor cotangent, {_INPUTS}, Tensor[] gradients) -> Tensor[]",
)
finish.register_fake(_fake_finish)


@finish.register_autograd
def _refuse_second_derivative(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "Called a second derivative through a contrastive loss, which has a first one only. Write "
        "a gradient penalty on something else, or use a dense loss for it."
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *rest = output
    ctx.inputs = len(inputs)
    ctx.save_for_backward(*inputs[:5], *rest[1:])
    ctx.mark_non_differentiable(*rest)
    ctx.set_materialize_grads(False)  # zeros for the others would take as much memory again


def _differentiate(ctx: Any, cotangent: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    # Once: a checkpoint around the loss gives its tensors out one time.
    saved = ctx.saved_tensors
    inputs, gradients = saved[:5], list(saved[5:])
    finished = iter(finish(cotangent, *inputs, gradients))
    found = [None if x.dim() == 1 else next(finished) for x in gradients]
    return (*found, *(None for _ in range(ctx.inputs - len(found))))


contrastive_loss = _define("contrastive_loss")
# CUDA graphs of compilers leave it out.
_on_host = _define("contrastive_loss_on_host", torch.Tag.cudagraph_unsafe)


def _group_of(name: str) -> dist.ProcessGroup | None:
    """Return the process group of a name; the default one has none here."""
    # Private to torch, whose own modules find groups by it.
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(name) if name else None


@register_flop_formula(
    [torch.ops.lightning_mp.contrastive_loss, torch.ops.lightning_mp.contrastive_loss_on_host],
    # Else shapes would come in place of tensors, without dtype and device.
    get_raw=True,
)
def _flops(image_bD: Tensor, text_nD: Tensor, *options: Any, **_: Any) -> int:
    """Count the products over pairs for `FlopCounterMode`, with ranks of equal batches.

    One for the logits, one for each side's gradient, and for a softmax one for the logits that were
    not kept; `2 b n D` each. Split operands multiply three times.
    """
    pairs, choice, _, group, needs_grad = _options(options[2:])
    b, n = len(image_bD), len(text_nD) * group_size(_group_of(group))
    tiles = choice.tiles(image_bD.device, image_bD.dtype)
    sides = sum(needs_grad[:2]) or int(any(needs_grad[2:4]))
    widths = [prefix.width for prefix in pairs.prefixes] or [image_bD.shape[1]]
    again = 0
    if pairs.is_softmax and sides:
        again = b * n
        if choice.keeps_tiles and pairs.false_negatives == "keep":
            features = (image_bD.dtype, image_bD.device)
            kept = tiles.kept_values(b, len(widths) * n, *features)
            again = tiles.multiplied_twice(b, n, widths[0], *features, kept)
    guides = 0 if pairs.guide_image is None else pairs.guide_image.shape[1]
    of_logits: int = sum(widths) * (again + (1 + sides) * b * n)
    return 2 * (of_logits + guides * (2 if sides else 1) * b * n)
