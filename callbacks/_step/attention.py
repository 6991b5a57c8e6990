"""The largest logits of attention, seen where it is computed: fused, by torch's module, or eagerly.

Legend: B batch, H heads, L queries, S keys, E width of a head.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["AttentionMode", "logits_of", "projected_logits"]

_SAMPLES, _QUERIES = 4, 256  # of a call: memory as for a small batch, whatever the length
_MASKED = -1e4  # what is added to logits to take them out, in fp16 and wider


class AttentionMode(TorchFunctionMode):
    """Looks at each attention that is computed while it is entered.

    It is a function, and belongs to no module whose hooks would see its logits: the fused one; that
    of `nn.MultiheadAttention`, whose own calls no mode sees; and a softmax over the last of four
    dimensions. `look` is called with the name of the innermost module that runs, and the logits.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], look: Callable[[str, Tensor], object]
    ) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in modules.items()}
        self._look = look

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        find = _FINDERS.get(func)
        if find is not None and not torch.compiler.is_compiling():
            name = self._running()
            logits = None if name is None else find(*args, **kwargs)
            if name is not None and logits is not None:
                self._look(name, logits)
        return func(*args, **kwargs)

    def _running(self) -> str | None:
        frame = sys._getframe(2)
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) in self._names:
                return self._names[id(module)]
            frame = frame.f_back  # type: ignore[assignment]
        return None


@torch.no_grad()
def logits_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return logits_BHLS of `F.scaled_dot_product_attention` in fp32, 0 where they are masked.

    Those of 4 samples and of 256 queries: all would take the memory that fused attention saves.
    """
    stride = -(-query.shape[-2] // _QUERIES)
    rows_L = torch.arange(0, query.shape[-2], stride, device=query.device)
    has_batch = query.ndim > 2
    query, key = (x[:_SAMPLES] if has_batch else x for x in (query, key))
    query, key = query[..., ::stride, :].float(), key.float()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    with torch.autocast(query.device.type, enabled=False):
        logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        columns_S = torch.arange(key.shape[-2], device=key.device)
        logits = logits.masked_fill(columns_S > rows_L[:, None], 0.0)
    if attn_mask is None:
        return logits
    if attn_mask.ndim == query.ndim and has_batch:
        attn_mask = attn_mask[:_SAMPLES]
    if attn_mask.shape[-2] > 1:
        attn_mask = attn_mask[..., ::stride, :]
    if attn_mask.dtype == torch.bool:
        return logits.masked_fill(~attn_mask, 0.0)
    return (logits + attn_mask).masked_fill(attn_mask <= _MASKED, 0.0)


def projected_logits(*args: Any, **kwargs: Any) -> Tensor:
    """Return `logits_of` what `F.multi_head_attention_forward` makes of these arguments."""
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
    query_LBE, key_SBE = (x if x.ndim == 3 else x[:, None] for x in (given["query"], given["key"]))
    is_apart, packed = given.get("use_separate_proj_weight"), given["in_proj_weight"]
    weights = (given["q_proj_weight"], given["k_proj_weight"]) if is_apart else packed.chunk(3)
    bias = given["in_proj_bias"]
    biases = (None, None) if bias is None else bias.float().chunk(3)
    with torch.no_grad(), torch.autocast(query_LBE.device.type, enabled=False):
        query, key = (
            F.linear(x.float(), weights[i].float(), biases[i])
            .unflatten(-1, (given["num_heads"], -1))
            .permute(1, 2, 0, 3)
            for i, x in enumerate((query_LBE, key_SBE))
        )
    mask = _added(given.get("attn_mask"))
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, query.shape[:2])
    padding = _added(given.get("key_padding_mask"))
    if padding is not None:
        padding = padding[..., None, None, :]
        mask = padding if mask is None else mask + padding
    return logits_of(query, key, key, mask)


def _added(mask: Tensor | None) -> Tensor | None:
    """Return what a mask of `nn.MultiheadAttention`, true where nothing is seen, adds to logits."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, -torch.inf)


def _of_softmax(logits: Tensor, dim: int | None = None, *_: Any, **__: Any) -> Tensor | None:
    """Return logits in fp32, 0 where they are masked; `None` for the softmax of anything else."""
    if logits.ndim != 4 or dim not in (-1, 3):
        return None
    kept = logits.detach()[:_SAMPLES, :, :: -(-logits.shape[-2] // _QUERIES)].float()
    return kept.masked_fill(kept <= _MASKED, 0.0)


_FINDERS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.scaled_dot_product_attention: logits_of,
    F.multi_head_attention_forward: projected_logits,
    F.softmax: _of_softmax,
    torch.softmax: _of_softmax,
    Tensor.softmax: _of_softmax,
}
