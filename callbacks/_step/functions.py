"""Observes functions that modules call: attention, cross-entropy, and routers of experts.

Legend: B batch, H heads, L queries, S keys, E width of a head or number of experts, C classes,
R rows.
"""

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lightning_mp.numerics.tensor_stats import local_shard
from lightning_mp.precision._choice.op_tables import follow_changes_of_torch, opened_composites

__all__ = ["FunctionMode", "entropy_share", "logits_of", "running_module"]

_SAMPLES, _QUERIES = 4, 256  # samples and queries of attention that are measured
_ROWS = 1024  # rows of output logits that are measured
_MASKED = -1e4  # logits at or below this value are masked; fp16 can represent it
_MOST_EXPERTS = 512


class FunctionMode(TorchFunctionMode):
    """Calls `receive` with the name of the innermost running module, and with tensors by kind.

    Module hooks cannot see the arguments of functions such as attention, a loss or `topk`.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        receive: Callable[[str, Mapping[str, Tensor]], object],
    ) -> None:
        super().__init__()
        self._modules = modules
        self._names = {id(module): name for name, module in modules.items()}
        self._receive = receive
        follow_changes_of_torch()
        self._are_experts: dict[tuple[str, int], bool] = {}  # by module and number of choices

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # Dynamo traces `unflatten` as a method only
            is_method = getattr(func, "__name__", "") == "unflatten"
            return args[0].unflatten(*args[1:], **kwargs) if is_method else func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            opened = opened_composites().get(func)
            if opened is not None and all(kind in (Tensor, nn.Parameter) for kind in types):
                with self:  # otherwise the mode would not see the calls inside
                    return opened(*args, **kwargs)
        output = func(*args, **kwargs)
        is_known = func in _ATTENTIONS or func in _CHOOSERS or func is F.cross_entropy
        name = running_module(self._names) if is_known and _is_measured(output) else None
        if name is not None:
            with torch.no_grad():
                # Shards of ranks are measured separately, without a collective.
                args, kwargs, output = tree_map_only(Tensor, local_shard, (args, kwargs, output))
                if func in _ATTENTIONS:
                    logits = _ATTENTIONS[func](*self._by_heads(name, args), **kwargs)
                    found = _of_attention(logits)
                elif func in _CHOOSERS:
                    found = self._of_choice(name, output, *args, **kwargs)
                else:
                    found = _of_loss(*args, **kwargs)
            self._receive(name, found)
        return output

    def _by_heads(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Separate the samples and heads of a softmax in `nn.MultiheadAttention`."""
        module = self._modules[name]
        if isinstance(module, nn.MultiheadAttention) and args and args[0].ndim == 3:
            return (args[0].unflatten(0, (-1, module.num_heads)), *args[1:])
        return args

    def _of_choice(
        self, name: str, output: Any, input: Tensor, *_: Any, **__: Any
    ) -> dict[str, Tensor]:
        """Return how often each expert was chosen and the number of tokens; empty if no experts."""
        scores = input  # torch's name for the argument
        chosen = output if isinstance(output, Tensor) else output[1]
        count = scores.shape[-1] if scores.ndim > 1 else 0
        is_last = chosen.shape[: scores.ndim - 1] == scores.shape[:-1]  # along the last dimension
        if not (1 < count <= _MOST_EXPERTS and is_last and chosen.numel()):
            return {}
        key = name, count
        if key not in self._are_experts:
            parent = self._modules.get(name.rpartition(".")[0], self._modules[name])
            places = [*self._modules[name].modules(), *parent.children()]
            self._are_experts[key] = any(_holds_experts(place, count) for place in places)
        if not self._are_experts[key]:
            return {}
        chosen_E = torch.zeros(count, dtype=torch.float32, device=chosen.device)
        ones = torch.ones_like(chosen, dtype=torch.float32).flatten()
        chosen_E.scatter_add_(0, chosen.flatten(), ones)
        tokens_E = torch.full_like(chosen_E, scores.numel() // count)
        return {"expert": torch.stack([chosen_E, tokens_E])}


def _is_measured(output: Any) -> bool:
    """Return whether the output of a function is a plain tensor with values, or a tuple of them."""
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    # `vmap` hides the samples, of which only a few are measured.
    is_inside = torch._C._are_functorch_transforms_active()
    return not (is_inside or first.is_nested or first.is_meta) and first.numel() > 0


def running_module(names: Mapping[int, str]) -> str | None:
    """Return the name of the innermost running module, given names by `id`."""
    # The frames of the callers tell which module calls the function.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            return names[id(module)]
        frame = frame.f_back
    return None


def _holds_experts(module: nn.Module, count: int) -> bool:
    """Return whether a module holds `count` experts, in a list or stacked in one parameter."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return len(module) == count
    stacked = (p for p in module.parameters(recurse=False) if p.ndim == 3)
    return any(len(p) == count for p in stacked)


def entropy_share(logits: Tensor) -> Tensor:
    """Return the mean entropy of a softmax relative to its maximum: 1 if uniform, 0 if one-hot.

    Rows with fewer than two unmasked logits do not count.
    """
    log_p = logits.log_softmax(dim=-1)
    # For masked logits, p log p is 0 * -inf.
    entropy = -(log_p.exp() * log_p).nan_to_num(nan=0.0).sum(dim=-1)
    seen = (logits > -torch.inf).sum(dim=-1)
    is_open = seen > 1
    shares = torch.where(is_open, entropy / seen.clamp(min=2).log(), 0.0)
    return torch.where(is_open.any(), shares.sum() / is_open.sum().clamp(min=1), 1.0)


def _of_attention(logits: Tensor | None) -> dict[str, Tensor]:
    if logits is None:
        return {}
    sharpness = 1 / entropy_share(logits).clamp(min=1e-6)  # grows with the logits
    finite = logits.masked_fill(logits == -torch.inf, 0.0)
    return {"attention_logit": finite, "attention_entropy": sharpness}


def _of_loss(input: Tensor, *_: Any, **__: Any) -> dict[str, Tensor]:
    """Return the logits of some rows of a cross-entropy and the RMS of their log Z."""
    logits = input  # torch's name for the argument
    rows_RC = (logits.detach().movedim(1, -1) if logits.ndim > 1 else logits[None]).flatten(0, -2)
    rows_RC = rows_RC[:: -(-len(rows_RC) // _ROWS) or 1].float()
    log_z = rows_RC.logsumexp(dim=-1).square().mean().sqrt()
    return {"output_logit": rows_RC.masked_fill(rows_RC <= _MASKED, 0.0), "output_log_z": log_z}


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
    """Return some logits_BHLS of `F.scaled_dot_product_attention` in fp32, -inf where masked."""
    # All logits would need the memory that fused attention saves.
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
        logits = logits.masked_fill(columns_S > rows_L[:, None], -torch.inf)
    if attn_mask is None:
        return logits
    if attn_mask.ndim == query.ndim and has_batch:
        attn_mask = attn_mask[:_SAMPLES]
    if attn_mask.shape[-2] > 1:
        attn_mask = attn_mask[..., ::stride, :]
    if attn_mask.dtype == torch.bool:
        return logits.masked_fill(~attn_mask, -torch.inf)
    return (logits + attn_mask).masked_fill(attn_mask <= _MASKED, -torch.inf)


def _of_softmax(input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> Tensor | None:
    """Return logits in fp32, -inf where masked; `None` if this is not a softmax of attention."""
    logits = input  # torch's name for the argument
    if logits.ndim != 4 or dim not in (-1, 3):
        return None
    kept = logits.detach()[:_SAMPLES, :, :: -(-logits.shape[-2] // _QUERIES)].float()
    return kept.masked_fill(kept <= _MASKED, -torch.inf)


_ATTENTIONS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.scaled_dot_product_attention: logits_of,
    # Eager attention, for example of Hugging Face models.
    F.softmax: _of_softmax,
    torch.softmax: _of_softmax,
    Tensor.softmax: _of_softmax,
}
_CHOOSERS = (torch.topk, Tensor.topk, torch.argmax, Tensor.argmax)
