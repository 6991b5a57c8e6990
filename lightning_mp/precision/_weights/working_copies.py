"""Half copies of fp32 weights, which replace the weights of a module during its forward.

During the forward of a module, the entries of its `_parameters` are outputs of an autograd node
with the values of persistent half copies; autograd casts their gradients to fp32 and adds them to
`p.grad`. At all other times the model has its own fp32 parameters, so that optimizers, DDP,
clipping, weight averages, deep copies and checkpoints see an ordinary fp32 model.
"""

import contextlib
import functools
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_mp.precision._weights.half_module import is_compiled, own_forward, replace_forward
from lightning_mp.precision._weights.ledger import Entry, Ledger, ModuleUsers, is_autograd_thread

__all__ = ["WorkingCopies"]

# Modules that read their weights outside of `_parameters`, where autocast casts them, compute
# weights from other weights, where half would round twice, or sum weights with fp32 factors.
_READS_ELSEWHERE = (nn.RNNBase, ParametrizationList, torch.jit.ScriptModule, nn.EmbeddingBag)

# Only products read the weights of these modules, and autocast casts them to the same bits. Up to
# `_SMALL` elements, the cast takes less time than replacing the weight.
_CAST_BY_AUTOCAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SMALL = 2**16
_UNSEEN = (
    "The forward of a {kind} writes to its parameter {name!r} through `.data`. The write was "
    "applied. Write under `torch.no_grad()`, or pass `fp32_modules=['norm', '{kind}']`."
)


class _Use(torch.autograd.Function):
    """Returns the half copies of parameters and passes their gradients to the parameters."""

    @staticmethod
    def forward(ctx: Any, copies: list[Tensor], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # `detach` shares memory and version counter, so that writes and stale graphs are detected.
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *gradients)  # autograd casts them to the dtype of the parameters


class _Swapped(NamedTuple):
    """A replaced entry of `_parameters`."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    copy: Tensor
    stand_in: Tensor
    version: int


class WorkingCopies:
    """Keeps a half copy of each weight, with which modules compute under autocast.

    The first forward of a module makes its copies. `refresh` updates them at the start of a step,
    after an optimizer step inside a forward, and in the first forward after a backward, because
    version counters miss writes to `p.data` and by fused optimizers. Without autocast, modules
    compute with their fp32 weights, as do recurrent layers and 0-d parameters. Only one thread at
    a time can compute with a module.

    If a forward writes to its weight (clamping, normalizing, codebooks), the write is rounded to
    half and applied to the parameter; from the next step on, the module computes with fp32 weights.
    A module whose forward reads `.data`, through which writes are not counted, computes with fp32
    weights from the start. Other uncounted writes are detected by a comparison in some steps.
    """

    def __init__(self, half: torch.dtype, ledger: Ledger | None = None) -> None:
        self.half = half
        self._ledger = Ledger() if ledger is None else ledger
        self._kept: set[nn.Module] = set()
        self.writing: list[str] = []  # names of modules whose forward writes, for checkpoints
        self._writing: set[nn.Module] = set()  # those that join `_kept` at the next refresh
        self._holders: list[nn.Module] = []  # may checkpoint functions of their own weights
        # Their own weights, and what replaces them in a backward.
        self._recomputed: dict[nn.Module, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._users = ModuleUsers()
        self._steps = 0
        self._is_probing = True
        self.is_stale = False  # whether writes to `p.data` may have followed the last refresh
        self._is_attached = False
        self._thread = threading.get_ident()  # the thread that trains
        self._undo = contextlib.ExitStack()  # run by `release`

    def __deepcopy__(self, memo: dict[int, object]) -> "WorkingCopies":
        # Copies of the model, such as a teacher, compute with half copies, too. A copy of the
        # plugin, which has copied its ledger before, has its own.
        ledger: Any = memo.get(id(self._ledger))
        return self if ledger is None else WorkingCopies(self.half, ledger)

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkingCopies, (self.half, self._ledger)  # a pickled model has no copies

    # --- the model -------------------------------------------------------------------------------

    def attach(self, root: nn.Module, keep: Iterable[nn.Module] = ()) -> None:
        """Let all modules except `keep` compute with half copies, until `release`."""
        self._kept = set(keep)
        self.writing, self._holders = [], []
        self._is_attached, self._thread = True, threading.get_ident()
        if any(is_compiled(module) for module in root.modules()):
            # torch warns because Dynamo reads `.grad` of all its inputs.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that")
        # torch sets an attribute on the hook, which methods do not accept.
        hook = functools.partial(self._write_fp32)
        for module in root.modules():
            if isinstance(module, OptimizedModule):
                self._replace_forward(module, self._whole)
            elif not self._is_left_alone(module):
                self._replace_forward(module, self._own)
                self._undo.callback(module.register_state_dict_post_hook(hook).remove)
                # Backward hooks of other leaves see parameters.
                if module._modules or any("checkpoint" in name for name in _names_in(module)):
                    self._holders.append(module)
            call = module._compiled_call_impl
            if call is not None:
                self._undo.callback(setattr, module, "_compiled_call_impl", call)
                module._compiled_call_impl = functools.partial(self._whole, module, call)

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Let further modules compute with their fp32 weights."""
        self._kept.update(modules)

    def restore(self, writing: Sequence[str]) -> None:
        """Keep the modules that wrote to their weights before a checkpoint in fp32."""
        self.writing = list(writing)
        root = self._ledger.root
        named = dict(root.named_modules()) if root is not None and writing else {}
        self.keep(named[name] for name in writing if name in named)

    def release(self) -> None:
        """Restore the `forward` of all modules, and drop the copies."""
        self._is_attached = False
        self._undo.close()
        self._ledger.entries.clear()
        self._kept, self._writing, self._holders = set(), set(), []

    def _is_left_alone(self, module: nn.Module) -> bool:
        own = [p for p in module._parameters.values() if p is not None]
        is_small = type(module) in _CAST_BY_AUTOCAST and all(p.numel() <= _SMALL for p in own)
        is_ours = own and not is_small and not isinstance(module, _READS_ELSEWHERE)
        return not is_ours or module in self._kept or "data" in _names_in(module)

    def _replace_forward(self, module: nn.Module, run: Callable[..., Any]) -> None:
        """Replace `forward` on the instance."""
        # Not by hooks, so that hooks of the user see fp32 weights, and direct calls of `forward`
        # use copies. A deep copy of a module binds the method to the copy.
        call = own_forward(module)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # compiled code is swapped as a whole
                return call(module, *args, **kwargs)
            return run(module, types.MethodType(call, module), *args, **kwargs)

        replace_forward(module, forward, self._undo)

    # --- while a module computes -----------------------------------------------------------------

    def _own(self, module: nn.Module, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        served = self._recomputed.pop(module, None)
        if served:  # a checkpointed module replaces its weights as in its first forward
            module._parameters.update(served[0])
        swapped = self._swap([module])  # a context manager would be slower, for every layer
        try:
            return call(*args, **kwargs)
        finally:
            self._put_back([module], swapped)
            if served:
                module._parameters.update(served[1])
                self._recomputed[module] = served

    def _whole(self, module: nn.Module, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run compiled code with the copies of all submodules, whose forwards are compiled in."""
        if torch.compiler.is_compiling():  # inside a larger region, which is swapped as a whole
            return call(*args, **kwargs)
        with self.in_place(*module.modules()):
            return call(*args, **kwargs)

    @contextlib.contextmanager
    def in_place(self, *modules: nn.Module) -> Iterator[None]:
        """Replace the weights of modules by half copies, where autocast is enabled."""
        served = [each for each in modules if not self._is_left_alone(each)]
        swapped = self._swap(served)
        try:
            yield
        finally:
            self._put_back(served, swapped)

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Serve a backward's recomputed functions, which run outside of their module's forward."""
        # A function that a forward has checkpointed, such as a block with a layer scale, reads
        # the weights of the module itself. Each weight has its own node: one for several weights
        # would pass `None` to those that the function does not use, and DDP counts that.
        served: dict[nn.Module, tuple[dict[str, Any], dict[str, Any]]] = {}
        for module in (each for each in self._holders if each not in self._kept):
            own, used = served[module] = {}, {}
            for name, p in module._parameters.items():
                entry = self._ledger.entries.get(id(p))
                if p is not None and entry is not None and _fits(entry, p):
                    own[name], used[name] = p, _Use.apply([entry.beside], p)[0]
            module._parameters.update(used)
        self._recomputed.update(served)
        try:
            yield
        finally:
            for module, (own, used) in served.items():
                self._recomputed.pop(module, None)
                module._parameters.update(own)
                own.clear()  # for another thread that is in the module
                used.clear()

    def _swap(self, modules: Sequence[nn.Module]) -> list[_Swapped]:
        # Under functorch's transforms, autocast casts the weights.
        is_on = self._is_attached and not torch._C._are_functorch_transforms_active()
        # A function mode would see every attribute that is read here.
        with torch._C.DisableTorchFunction():
            if self.is_stale and is_on and modules:
                is_on = self._is_training_thread()  # in another thread, autocast casts the weights
                if is_on:
                    self.refresh()
            entries = [entry for module in modules if is_on for entry in self._entries(module)]
            # Without grad no node is needed.
            stand_ins = {id(p): copy for _, _, p, copy in entries}
            if torch.is_grad_enabled():  # one node for all weights, with tied weights once
                trained = {id(p): p for _, _, p, _ in entries if p.requires_grad}
                if trained:
                    uses = _Use.apply([stand_ins[key] for key in trained], *trained.values())
                    stand_ins.update(zip(trained, uses, strict=True))
            self._users.enter(modules, {module for module, *_ in entries})
            swapped = []
            for module, name, p, copy in entries:
                stand_in = stand_ins[id(p)]
                module._parameters[name] = stand_in  # type: ignore[assignment]
                swapped.append(_Swapped(module, name, p, copy, stand_in, stand_in._version))
            return swapped

    def _entries(self, module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter, Tensor]]:
        """Return the entries to replace: fp32 weights, where autocast is enabled."""
        entries: list[tuple[nn.Module, str, nn.Parameter, Tensor]] = []
        if module in self._kept:
            return entries
        is_ours = self._is_training_thread()
        for name, p in module._parameters.items():
            if p is None:
                continue
            entry = self._ledger.entries.get(id(p))
            if entry is None or not entry.is_current(p):  # checked when the copy was made
                is_on = is_ours and torch.is_autocast_enabled(p.device.type)
                if not is_on or not _can_be_half(p):  # autocast casts the weight
                    continue
                entry = self._up_to_date(p)
            elif not torch.is_autocast_enabled(entry.device_type):
                continue
            if self._is_probing and is_ours and module.training and _differs(p, entry.beside):
                self.refresh([p])  # a write to `p.data` must not look like a write to the copy
            entries.append((module, name, p, entry.beside))
        return entries

    def _put_back(self, modules: Sequence[nn.Module], swapped: list[_Swapped]) -> None:
        # Put back all entries first, because the code below may raise.
        for module, name, parameter, _, stand_in, _ in swapped:
            if module._parameters.get(name) is stand_in:
                module._parameters[name] = parameter
        self._users.leave(modules, {each.module for each in swapped})
        with torch._C.DisableTorchFunction():
            for each in swapped if self._is_training_thread() else ():
                if each.module._parameters.get(each.name) is each.parameter:
                    self._look_for_writes(each)

    def _is_training_thread(self) -> bool:
        """Return whether weights and copies may be written, as no optimizer steps meanwhile."""
        return threading.get_ident() == self._thread or is_autograd_thread()

    def _look_for_writes(self, swapped: _Swapped) -> None:
        """Apply a write of the forward to the parameter, if the write is detected."""
        module, name, parameter, copy, stand_in, version = swapped
        is_seen = stand_in._version != version or stand_in.data_ptr() != copy.data_ptr()
        is_probing = self._is_probing and module.training
        if is_seen or (is_probing and _differs(parameter, stand_in)):
            self._take_write(parameter, stand_in)
            self._writing.add(module)
            self.writing += self._ledger.names_of(module)
            if not is_seen:
                rank_zero_warn(_UNSEEN.format(kind=type(module).__name__, name=name))

    def _up_to_date(self, parameter: nn.Parameter) -> Entry:
        """Create or update the copy of a parameter."""
        entry = self._ledger.open(parameter)
        if not _fits(entry, parameter):
            with torch.inference_mode(False):  # training must be able to use copies of validation
                entry.beside = torch.empty_like(parameter, dtype=self.half, requires_grad=False)
            entry.device_type = parameter.device.type
        self.refresh([parameter])
        return entry

    def start_step(self, *, is_training: bool = True) -> None:
        """Update all copies, and compare them with the weights in some of the training steps."""
        self._kept |= self._writing  # not earlier, for recomputed forwards
        # At steps 1, 2, 4, 8, ..., because comparing weights costs a host sync on a GPU.
        self._steps += is_training
        self._is_probing = self._steps & (self._steps - 1) == 0
        self.refresh()  # at once, because streams that the user forks from here wait for it

    def refresh(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Update all or some copies by one multi-tensor copy."""
        is_all = parameters is None
        pairs: Iterable[tuple[Any, Entry]] = self._ledger
        if parameters is None:
            self.is_stale = False
        else:
            entries = self._ledger.entries
            pairs = [(p, entries[id(p)]) for p in parameters if id(p) in entries]
        fitting = [(p, entry) for p, entry in pairs if _fits(entry, p)]
        if fitting:
            with torch.inference_mode(False), torch.no_grad():
                # Graphs of earlier steps may hold copies of weights that have not changed since.
                copies = [
                    e.beside.data if is_all and e.is_current(p) else e.beside for p, e in fitting
                ]
                torch._foreach_copy_(copies, [p for p, _ in fitting])
        for parameter, entry in fitting:
            entry.note(parameter)

    def _write_fp32(self, module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        """Replace half copies by parameters in a `state_dict` that is read during a forward."""
        # A thread that saved checkpoints during training saved half weights in 6 of 100.
        own = {prefix + name: state.get(prefix + name) for name in module._parameters}
        halves = {k: v for k, v in own.items() if isinstance(v, Tensor) and v.dtype == self.half}
        for parameter, entry in self._ledger if halves else ():
            for key, value in halves.items():
                if entry.beside is not None and entry.beside.data_ptr() == value.data_ptr():
                    # With `keep_vars` the entries require grad.
                    state[key] = parameter if value.requires_grad else parameter.detach()

    @torch.no_grad()
    def _take_write(self, parameter: nn.Parameter, stand_in: Tensor) -> None:
        """Apply a write of a forward to the parameter; other elements keep their fp32 bits."""
        written = stand_in.detach()
        is_same = written == parameter.to(self.half)
        parameter.copy_(torch.where(is_same, parameter, written.to(parameter.dtype)))
        entry = self._ledger.open(parameter)
        if written.data_ptr() != entry.beside.data_ptr():
            entry.beside.copy_(written)
        entry.note(parameter)


def _names_in(module: nn.Module) -> Sequence[str]:
    """Return the names in `forward` of a module's class, and in the methods that it calls."""
    return _names_in_class(type(module))  # type: ignore[arg-type]


@functools.cache
def _names_in_class(kind: type[nn.Module]) -> Sequence[str]:
    names, seen = ["forward"], {*dir(nn.Module)} - {"forward"}
    for name in names:  # grows
        code = getattr(getattr(kind, name, None), "__code__", None)
        if code is not None and name not in seen:
            seen.add(name)
            names += code.co_names
    return names


def _can_be_half(entry: Tensor) -> bool:
    # Other entries, such as those of `torch.func.functional_call`, stay. So do quantized weights of
    # torchao and quanto, which have no half copy.
    is_weight = isinstance(entry, nn.Parameter) and not is_lazy(entry)
    is_weight = is_weight and not is_traceable_wrapper_subclass(entry)
    return is_weight and entry.dtype == torch.float32 and entry.dim() > 0


def _fits(entry: Entry, parameter: Tensor) -> bool:
    copy = entry.beside
    return copy is not None and copy.shape == parameter.shape and copy.device == parameter.device


def _differs(parameter: nn.Parameter, copy: Tensor) -> bool:
    # Compare bits, because NaN is not equal to itself.
    rounded = parameter.detach().to(copy.dtype).view(torch.int16)
    return not torch.equal(rounded, copy.detach().view(torch.int16))
