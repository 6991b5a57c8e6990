"""Statistics of what modules return, and of logits of attention, while a step is sampled.

Legend: B batch, H heads, L queries, S keys, E width of a head.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mp.callbacks._step.batches import tensors_in
from lightning_mp.callbacks._step.sampling import merge_rows, pack_stats
from lightning_mp.numerics.floats import VALUE_DTYPES

__all__ = ["AttentionMode", "OutputKey", "OutputSampler", "blocks_in", "eager_modules", "logits_of"]

_SAMPLES, _QUERIES = 4, 256  # of a call
_MASKED = -1e4  # what is added to logits to take them out, in fp16 and wider


class OutputKey(NamedTuple):
    """What one row of a sample is about."""

    name: str  # the module's, dotted
    kind: str  # `"activation"`, `"output_gradient"`, `"norm_input"` or `"attention_logit"`
    dtype: torch.dtype


@dataclass(eq=False)
class OutputSampler:
    """Gathers statistics of modules over one training step: one row for all calls of a module."""

    modules: Mapping[str, nn.Module]  # by dotted name
    backward: bool  # whether to look at gradients with respect to outputs as well
    max_calls: int  # of a module to look at, the first ones
    # Whose input is looked at: `x + f(x)` is the output of none, but of many a norm the input.
    norms: Mapping[str, nn.Module] = field(default_factory=dict)
    callers: Mapping[str, nn.Module] = field(default_factory=dict)  # that may call attention
    _calls: Counter[tuple[str, str]] = field(default_factory=Counter, init=False)
    _hooks: ExitStack = field(default_factory=ExitStack, init=False)
    _rows: dict[OutputKey, list[Tensor]] = field(default_factory=dict, init=False)
    is_running: bool = field(default=False, init=False)  # whether hooks are in place

    def start(self) -> None:
        """Put hooks in place; those of another micro-batch go on."""
        self.pause()
        self.is_running = bool(self.modules or self.norms)
        for name, module in self.modules.items():
            hook = module.register_forward_hook(partial(self._look, name))
            self._hooks.enter_context(hook)
        for name, module in self.norms.items():  # before a precision plugin casts what comes in
            look = partial(self._look_ahead, name)
            self._hooks.enter_context(module.register_forward_pre_hook(look, prepend=True))
        if self.callers and self.is_running:
            mode = AttentionMode(self.callers, lambda n, x: self._add(n, "attention_logit", x))
            self._hooks.enter_context(mode)

    def pause(self) -> None:
        self._hooks.close()
        self.is_running = False

    def stop(self) -> tuple[list[OutputKey], Tensor] | None:
        """Remove the hooks, and return the rows, packed as by `pack_stats`; `None` without any."""
        self.pause()
        self._calls.clear()
        rows, self._rows = self._rows, {}
        if not rows:
            return None
        return list(rows), torch.stack([merge_rows(torch.cat(each)) for each in rows.values()])

    def _look(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        for tensor in self._add(name, "activation", output):
            if self.backward and tensor.requires_grad:
                tensor.register_hook(partial(self._look_back, name))

    def _look_back(self, name: str, gradient: Tensor) -> None:
        self._add(name, "output_gradient", gradient)

    def _look_ahead(self, name: str, _: nn.Module, inputs: Any) -> None:
        self._add(name, "norm_input", inputs[:1])

    def _add(self, name: str, kind: str, value: Any) -> list[Tensor]:
        """Take in the tensors of a call, and return them; nothing of calls that are too many."""
        tensors = [t for t in tensors_in(value) if t.dtype in VALUE_DTYPES and t.numel()]
        if kind != "output_gradient":  # which only calls that were looked at have
            self._calls[name, kind] += bool(tensors)
        # After the step that was sampled there may be another backward, of a graph that was kept.
        if not self.is_running or self._calls[name, kind] > self.max_calls:
            return []
        for tensor in tensors:
            row = pack_stats([tensor.detach()])
            self._rows.setdefault(OutputKey(name, kind, tensor.dtype.to_real()), []).append(row)
        return tensors


def eager_modules(root: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose hooks run outside of compiled code, under their dotted names."""
    # `torch.compile` would trace the hooks of the others. A wrapper that it makes runs eagerly;
    # nothing does of a module compiled in place, or whose `training_step` is compiled.
    is_whole = getattr(root, "_compiler_ctx", None) is not None  # set by Lightning
    if is_whole or root._compiled_call_impl is not None:
        return
    yield path.rstrip("."), root
    if not hasattr(root, "_orig_mod"):
        for name, child in root.named_children():
            yield from eager_modules(child, f"{path}{name}.")


def blocks_in(root: nn.Module) -> Iterator[nn.Module]:
    """Yield modules of several parts that stand in a list with others of their class."""
    for module in root.modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            members = list(module.children())
            count = Counter(type(member) for member in members)
            yield from (m for m in members if count[type(m)] > 1 and any(m.children()))


# --- attention -----------------------------------------------------------------------------------


class AttentionMode(TorchFunctionMode):
    """Calls `look` of each attention with the innermost module that runs, and the logits."""

    # A mode: attention is a function, and no module's hooks would see its logits.
    def __init__(
        self, modules: Mapping[str, nn.Module], look: Callable[[str, Tensor], object]
    ) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in modules.items()}
        self._look = look

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
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
        # torch does not say which module calls; the frames of the callers do.
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
    """Return logits_BHLS of `F.scaled_dot_product_attention` in fp32, 0 where they are masked."""
    # Of 4 samples and 256 queries: all would take the memory that fused attention saves.
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


def _projected_logits(*args: Any, **kwargs: Any) -> Tensor:
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
    # `nn.MultiheadAttention` calls it; no mode sees the calls inside it.
    F.multi_head_attention_forward: _projected_logits,
    # Eager attention, as Hugging Face's.
    F.softmax: _of_softmax,
    torch.softmax: _of_softmax,
    Tensor.softmax: _of_softmax,
}
