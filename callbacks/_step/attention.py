"""The largest logits of attention, seen where `scaled_dot_product_attention` is called.

Legend: B batch, H heads, L queries, S keys, E width of a head.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["AttentionMode", "logits_of"]

_SAMPLES, _QUERIES = 4, 256  # of a call: memory as for a small batch, whatever the length
_MASKED = -1e4  # what is added to logits to take them out, in fp16 and wider


class AttentionMode(TorchFunctionMode):
    """Looks at each call of `F.scaled_dot_product_attention` while it is entered.

    Such a call belongs to no module whose hooks would see its logits. It is counted for the
    innermost module that is running.

    Args:
        modules: Dotted name -> module.
        look: Called with the name of the module, and the logits.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], look: Callable[[str, Tensor], None]
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
        """Look at the arguments, and call the function as it was."""
        if func is F.scaled_dot_product_attention and not torch.compiler.is_compiling():
            name = self._running()
            if name is not None:
                self._look(name, logits_of(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))

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
    """Return logits of attention in fp32, 0 where a mask takes them out.

    Those of four samples, and of 256 queries spread over the length, as all of them would take the
    memory that the fused attention saves. Arguments as of `F.scaled_dot_product_attention`.

    Returns:
        logits_BHLS: Or with fewer dimensions, as the query has.
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
