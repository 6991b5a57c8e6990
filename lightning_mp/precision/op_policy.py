"""`OpPolicy`: which torch ops run in half precision and which in fp32, and its context."""

import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_mp._arguments import Check, explains_arguments, refuse_values
from lightning_mp.numerics.floats import HALF_DTYPES
from lightning_mp.precision._choice import op_tables as tables
from lightning_mp.precision._choice.op_tables import OpClass
from lightning_mp.precision._weights.half_module import (
    CASTABLE,
    cast_castable,
    dtypes_of,
    replace_forward,
)

__all__ = ["OPS", "MixedInputs", "OpPolicy", "check_ops", "serve_norms"]


def _canonical_names(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tables.canonical_name(name) for name in names))


OPS = Check(take=_canonical_names, words="a list of names of torch functions, such as 'softmax'")


def check_ops(owner: object, fp32_ops: Sequence[str], half_ops: Sequence[str]) -> None:
    """Raise if an op is in both lists."""
    both = [op for op in fp32_ops if op in half_ops]
    if both:
        reason = f"An op can be in one list only. Remove {both} from one of them."
        refuse_values(owner, reason, fp32_ops=fp32_ops, half_ops=half_ops)


@explains_arguments(checks={"fp32_ops half_ops": OPS})
@dataclass(frozen=True, kw_only=True)
class OpPolicy:
    """Decides which ops run in half precision and which in fp32, equally on every device.

    The lists are those of CUDA's autocast. On the CPU, autocast leaves softmax, sums and norms in
    fp16, where the sum of 100,000 ones is inf. `context` casts the inputs that autocast does
    not cast, in a `torch.overrides.TorchFunctionMode`.

    Classes of ops (arXiv:1710.03740): *half* (matrix products, convolutions, attention, recurrent
    cells), *fp32* (losses, exp, log, pow, reductions, distances), *norm* (computed in fp32, see
    `norm_output`), *promote* (several inputs, cast to the widest dtype). All other ops are *given*:
    they run in the dtype of their inputs, as `add`, `cat` and `mean` do. fp32 ops return fp32.
    float64 tensors, in-place calls, and calls with `out=` or a `dtype` are not changed.

    Args:
        fp32_ops: Ops to run in fp32, by any of their names: "gelu", "torch.Tensor.exp",
            "torch.linalg.norm", "aten::bmm". A name covers the function, the tensor method, the
            operator and the function of `nn.functional`.
        half_ops: Ops to run in half precision.
        norm_output: Dtype that `layer_norm`, `rms_norm` and `group_norm` return. "input" keeps a
            half-precision residual stream in half, and promotes the inputs of scattering ops,
            which CUDA's autocast does not. "fp32" is what CUDA's autocast does; without moved ops,
            CUDA then needs no function mode.

    Raises:
        ValueError: torch has no such op, or an op is in both lists.

    References:
        Mixed Precision Training, arXiv:1710.03740; pytorch#117832 (editable op lists).
    """

    fp32_ops: Sequence[str] = ()
    half_ops: Sequence[str] = ()
    norm_output: Literal["input", "fp32"] = "input"

    def __post_init__(self) -> None:
        check_ops(self, self.fp32_ops, self.half_ops)

    def class_of(self, op: str) -> OpClass:
        """Return the class of an op, by any name, also an internal one as "aten::_log_softmax"."""
        name = tables.canonical_name(op)
        if name in self.fp32_ops:
            return "fp32"
        return "half" if name in self.half_ops else tables.CLASS_OF.get(name, "given")

    def describe(self) -> str:
        """Return a table of the ops of each class, with the reasons."""
        norm = "its input" if self.norm_output == "input" else "fp32"
        headlines: dict[OpClass, str] = {
            "half": "HALF: inputs are cast to half, products are accumulated in fp32",
            "fp32": "FP32: inputs are cast to fp32, the output stays fp32",
            "norm": f"NORM: computed in fp32, the output has the dtype of {norm}",
            "promote": "PROMOTE: inputs are cast to the widest of them",
        }
        moved = {"fp32": self.fp32_ops, "half": self.half_ops}
        lines = []
        for op_class, headline in headlines.items():
            lines.append(headline)
            if moved.get(op_class):
                lines += _op_lines("moved", f"`{op_class}_ops`", moved[op_class])
            for group in tables.GROUPS:
                ops = [op for op in group.ops if op not in (*self.fp32_ops, *self.half_ops)]
                if group.op_class == op_class and ops:
                    lines += _op_lines(group.title, f"default, {group.why}", ops)
        lines.append("GIVEN: every other op runs in the dtype of its inputs")
        return "\n".join(lines)

    @contextmanager
    def context(self, device_type: str, half_dtype: torch.dtype) -> Iterator[None]:
        """Run a forward under this policy; the innermost of nested contexts applies.

        A region with `torch.autocast(..., enabled=False)` disables the policy, too.

        Args:
            device_type: Device type of the tensors, such as "cuda" or "cpu".
            half_dtype: `torch.float16` or `torch.bfloat16`.
        """
        if half_dtype not in HALF_DTYPES:
            raise ValueError(
                f"Passed `half_dtype={half_dtype!r}`. It must be torch.float16 or torch.bfloat16. "
                "Use no context for fp32."
            )
        # Not cached: a step taken inside the context (GANs) would leave stale weights in the cache.
        autocast = torch.autocast(device_type, dtype=half_dtype, cache_enabled=False)
        with autocast, self.recompute_context(device_type):
            yield

    @contextmanager
    def recompute_context(self, device_type: str) -> Iterator[None]:
        """Apply the policy only under autocast, for a backward that recomputes forwards.

        Activation checkpointing restores autocast but no function mode. Without this context, ops
        of the second forward would have other dtypes, and torch raises an error.
        """
        rules = _rules(self, device_type)
        active = [
            mode
            for mode in torch.overrides._get_current_function_mode_stack()
            if isinstance(mode, _PolicyMode) and mode.device_type == device_type and not mode.muted
        ]
        if active and active[-1].rules is rules:  # a second mode would have no effect
            yield
            return
        # Outer modes also see the calls of an inner mode, and would cast again.
        for mode in active:
            mode.muted = True
        if rules:
            tables.follow_changes_of_torch()
        try:
            with _PolicyMode(device_type, rules) if rules else nullcontext():
                yield
        finally:
            for mode in active:
                mode.muted = False


class _Rule(NamedTuple):
    """The action for calls of a function."""

    action: OpClass | Literal["open", "method", "write"]
    inplace_at: int = -1
    input_only: bool = False
    kept: int = 0  # number of arguments that are not cast, if any other is
    opened: dict[Callable[..., Any], Callable[..., Any]] | None = None


class _PolicyMode(TorchFunctionMode):
    """Casts the inputs of functions that have a rule, where autocast is enabled."""

    # Dynamo traces this class and guards on its attributes: another policy recompiles.

    def __init__(self, device_type: str, rules: dict[str, _Rule]) -> None:
        super().__init__()
        self.device_type = device_type
        self.rules = rules
        self.muted = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # By name, because Dynamo does not find Python methods among the keys of a dict.
        name = getattr(func, "__name__", "")
        if name == "wrapped":  # Dynamo of torch 2.15 on `Tensor.__pow__`
            name = getattr(getattr(func, "__wrapped__", func), "__name__", "")
        rule = self.rules.get(name)
        if rule is None:
            if func is checkpoint:  # called by Dynamo alone, which would trace it without this mode
                args = (partial(self._run, args[0]), *args[1:])
            return func(*args, **kwargs)
        if rule.action == "method":
            return args[0].unflatten(*args[1:], **kwargs)
        if rule.opened is not None:
            opened = rule.opened.get(func)
            # A tensor subclass may override the composite.
            if opened is None or any(kind not in (Tensor, nn.Parameter) for kind in types):
                return func(*args, **kwargs)
            # torch disables a mode while it handles a call; the ops inside need it again.
            with self:
                return opened(*args, **kwargs)
        if rule.kept:
            is_mixed = len(dtypes_of((args, kwargs), self._is_castable)) > 1
            if is_mixed and args and self._is_castable(args[0]):
                dtype = args[0].dtype if rule.action == "write" else torch.float32
                rest, kwargs = cast_castable((args[rule.kept :], kwargs), dtype, self._is_castable)
                args = (*args[: rule.kept], *rest)
            return func(*args, **kwargs)
        return self._cast_and_call(rule, func, args, kwargs)

    def _cast_and_call(self, rule: _Rule, func: Any, args: Any, kwargs: Any) -> Any:
        is_on = torch.is_autocast_enabled(self.device_type)
        if self.muted or (is_on and rule.action == "given") or _is_explicit(rule, args, kwargs):
            return func(*args, **kwargs)
        if not is_on:
            # A module that disables autocast in its forward has half copies of its weights.
            if len(dtypes_of((args, kwargs), self._is_castable)) == 2:
                args, kwargs = cast_castable((args, kwargs), torch.float32, self._is_castable)
            return func(*args, **kwargs)
        first = args[0] if args else kwargs.get("input")
        dtype: torch.dtype | None = torch.float32
        if rule.action == "half":
            dtype = torch.get_autocast_dtype(self.device_type)
        elif rule.action == "promote":
            dtypes = dtypes_of((args, kwargs), self._is_castable)
            dtype = reduce(torch.promote_types, dtypes) if dtypes else None
        if dtype is not None and rule.input_only:
            cast = cast_castable(first, dtype, self._is_castable)
            args, kwargs = ((cast, *args[1:]), kwargs) if args else ((), {**kwargs, "input": cast})
        elif dtype is not None:
            args, kwargs = cast_castable((args, kwargs), dtype, self._is_castable)
        # Autocast would cast the inputs of some of these functions back.
        output = _call_without_autocast(self.device_type, func, args, kwargs)
        if rule.action == "norm" and isinstance(first, Tensor) and self._is_castable(first):
            return output.to(first.dtype)
        return output

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self:
            return function(*args, **kwargs)

    def call_norm(self, norm: nn.Module, value: Tensor) -> Any:
        """Call a norm of torch by its rule, outside this mode."""
        rule = self.rules.get(_NORMS[type(norm)])
        with torch._C.DisableTorchFunction():
            is_on = torch.is_autocast_enabled(self.device_type) and not self.muted
            if rule is not None and rule.action == "norm" and is_on and self._is_castable(value):
                # Autocast needs no exception: it computes norms of fp32 inputs in fp32.
                output: Tensor = type(norm).forward(norm, value.float())
                return output.to(value.dtype)
        return type(norm).forward(norm, value)

    def _is_castable(self, value: Tensor) -> bool:
        return value.dtype in CASTABLE and value.device.type == self.device_type


class MixedInputs(_PolicyMode):
    """Casts mixed fp32 and half inputs of a function to one dtype.

    Buffers stay in fp32, and a sum with an fp32 buffer is fp32, which a product with half weights
    does not accept. Inputs of products, attention, recurrent cells and norms become half; inputs of
    losses, distances and functions that autocast promotes, such as `grid_sample`, become fp32.
    """

    def __init__(self, half: torch.dtype) -> None:
        super().__init__("", _rules_of_mixed_inputs())
        self.half = half
        tables.follow_changes_of_torch()

    def _cast_and_call(self, rule: _Rule, func: Any, args: Any, kwargs: Any) -> Any:
        if len(dtypes_of((args, kwargs), self._is_castable)) == 2:
            dtype = self.half if rule.action == "half" else torch.float32
            args, kwargs = cast_castable((args, kwargs), dtype, self._is_castable)
        return func(*args, **kwargs)

    def _is_castable(self, value: Tensor) -> bool:
        return value.dtype in (self.half, torch.float32)


@lru_cache(maxsize=1)
def _rules_of_mixed_inputs() -> dict[str, _Rule]:
    # Called by torch's transformers in evaluation.
    kernels = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")
    rules = _rules_of_composites() | dict.fromkeys(kernels, _Rule("half"))
    for group in tables.GROUPS:
        rule = _Rule("half" if group.op_class in ("half", "norm") else "promote")
        rules |= {each.__name__: rule for op in group.ops for each in tables.callables_of(op)}
    return rules


def _rules_of_composites() -> dict[str, _Rule]:
    rule = _Rule("open", opened=tables.opened_composites())
    # Dynamo traces `unflatten` as a method, but not as a function, because of its `super()`.
    methods = {"unflatten": _Rule("method")} | dict.fromkeys(tables.WRITES, _Rule("write", kept=1))
    # Kernels with fp32 statistics accept half inputs, but no half weights.
    methods |= dict.fromkeys(tables.INPUT_ONLY, _Rule("fp32", kept=3))
    return methods | {original.__name__: rule for original in tables.opened_composites()}


_NORMS = {nn.LayerNorm: "layer_norm", nn.GroupNorm: "group_norm", nn.RMSNorm: "rms_norm"}


def serve_norms(modules: Iterable[nn.Module], undo: ExitStack) -> None:
    """Let torch's norms with fp32 weights apply the policy in their own forward, until `undo`.

    A call of `layer_norm` through a function mode takes the host five times as long.
    """

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if args and not torch.compiler.is_compiling():
            mode = torch.overrides._get_current_function_mode()
            if isinstance(mode, _PolicyMode):
                return mode.call_norm(module, *args)
        return type(module).forward(module, *args, **kwargs)

    for module in modules:
        # Only the mode casts the weights of a frozen half-precision norm.
        is_fp32 = all(p.dtype == torch.float32 for p in module.parameters(recurse=False))
        if type(module) in _NORMS and is_fp32 and "forward" not in module.__dict__:
            replace_forward(module, forward, undo)


def _is_explicit(rule: _Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call names a dtype or a tensor to write to."""
    is_inplace = 0 <= rule.inplace_at < len(args) and args[rule.inplace_at] is True
    has_dtype = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
    return is_inplace or has_dtype or kwargs.get("out") is not None or bool(kwargs.get("inplace"))


def _call_without_autocast(device_type: str, func: Any, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():  # Dynamo supports only the context manager
        with torch.autocast(device_type, enabled=False):
            return func(*args, **kwargs)
    # The context manager takes longer than most ops.
    torch.set_autocast_enabled(device_type, False)
    try:
        return func(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(device_type, True)


@lru_cache(maxsize=64)
def _rules(policy: OpPolicy, device_type: str) -> dict[str, _Rule]:
    """Return the rules by function name, for ops that autocast treats differently."""
    # No two ops share a `__name__`. Nested contexts and Dynamo's guards compare by identity.
    stored_as_input = policy.norm_output == "input"
    actions: dict[str, OpClass] = dict.fromkeys(policy.fp32_ops, "fp32")
    actions |= dict.fromkeys(policy.half_ops, "half")
    for op, op_class in tables.CLASS_OF.items():
        # Without rules, no mode is needed.
        is_ours = op in tables.BEYOND_AUTOCAST or (op_class == "norm" and stored_as_input)
        if stored_as_input if is_ours else not tables.autocast_agrees(device_type, op):
            actions.setdefault(op, op_class)
    if not actions:
        return {}
    rules = _rules_of_composites()
    agreed: dict[str, OpClass] = dict.fromkeys(tables.CLASS_OF, "given")
    for op, op_class in (agreed | actions).items():
        action = "fp32" if op_class == "norm" and not stored_as_input else op_class
        functions = tables.callables_of(op)
        inplace_at = max(map(_inplace_at, functions), default=-1)
        rule = _Rule(action, inplace_at, op in tables.INPUT_ONLY)
        rules.update({function.__name__: rule for function in functions})
    return rules


def _inplace_at(func: Callable[..., Any]) -> int:
    """Return the position of the parameter `inplace`, or -1."""
    if not isinstance(func, types.FunctionType):
        return -1
    names = func.__code__.co_varnames[: func.__code__.co_argcount]
    return names.index("inplace") if "inplace" in names else -1


def _op_lines(title: str, why: str, ops: Sequence[str]) -> list[str]:
    indent = " " * 6
    text = textwrap.wrap(", ".join(ops), 96, initial_indent=indent, subsequent_indent=indent)
    return [f"  {title} ({why})", *text]
