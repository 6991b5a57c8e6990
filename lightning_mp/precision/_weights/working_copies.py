"""Half working copies of fp32 weights, in their place only while a module computes.

At rest a model is the user's: the same fp32 `Parameter` objects, with fp32 gradients. Around the
forward of each module, the entries of its `_parameters` are the outputs of an autograd node whose
value is a persistent half copy; the engine casts the gradient that comes back into `p.grad`. What
optimizers, DDP, clipping, weight averages, deep copies and checkpoints see is a plain fp32 model.
"""

import contextlib
import functools
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

from lightning_mp.precision._weights.half_module import is_compiled, replace_forward
from lightning_mp.precision._weights.ledger import Entry, Ledger, ModuleUsers

__all__ = ["WorkingCopies"]

# They compute with lists of their weights, not with their entries, and autocast casts those; or
# make weights out of others, where half would round twice.
_READS_ELSEWHERE = (nn.RNNBase, ParametrizationList, torch.jit.ScriptModule)

# Products alone read their weights, and autocast casts those to the same bits. Up to so many
# elements that takes less time at every use than to put a copy in and out.
_CAST_BY_AUTOCAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SMALL = 2**16


class _Use(torch.autograd.Function):
    """Hands out the copies of parameters, and hands their gradients to the parameters."""

    @staticmethod
    def forward(ctx: Any, copies: list[Tensor], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # They share memory and version counter, so that writes and stale graphs show.
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *gradients)  # the engine casts them to the dtype of the parameters


class _Swapped(NamedTuple):
    """An entry of a module's `_parameters` while the module computes."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    copy: Tensor
    stand_in: Tensor
    version: int


class WorkingCopies:
    """Keeps a half copy of each weight, and lets modules compute with it under autocast.

    A copy is made when its module first computes, and brought up to date by `refresh` at the start
    of a step, and after an optimizer has stepped inside of one: the version counters that tell of
    writes in between see neither those to `p.data` nor fused optimizers. Outside of autocast
    modules compute with their own fp32 weights.

    What reads a weight outside of its module's forward sees fp32, as do recurrent layers and
    parameters without dimensions. A module computes in one thread at a time.

    A write into a weight by its module's forward, such as clamping or a codebook, goes through to
    the parameter; a module that writes past autograd's version counter (`weight.data.clamp_()`) is
    found by a comparison at steps 1, 2, 4, 8, ..., and computes with its own weights from then on.
    """

    def __init__(self, half: torch.dtype, ledger: Ledger | None = None) -> None:
        self.half = half
        self._ledger = Ledger() if ledger is None else ledger
        self._kept: set[nn.Module] = set()
        self._users = ModuleUsers()
        self._refreshes = 0
        self._is_probing = True
        self._is_attached = False
        self._undo = contextlib.ExitStack()  # what `release` does

    def __deepcopy__(self, memo: dict[int, object]) -> "WorkingCopies":
        return self  # a copy of the model, such as a teacher, computes with copies too

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkingCopies, (self.half,)  # hooks of a pickled model find no copies

    # --- the model -------------------------------------------------------------------------------

    def attach(self, root: nn.Module, keep: Iterable[nn.Module] = ()) -> None:
        """Let the modules of a model, but those kept, compute with half copies, until `release`."""
        self._kept = set(keep)
        self._is_attached = True
        if any(is_compiled(module) for module in root.modules()):
            # Dynamo looks for `.grad` in all that it is given, of which torch warns.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that")
        # Hooks of this kind are marked by an attribute, which methods cannot have.
        hook = functools.partial(self._write_fp32)
        for module in root.modules():
            if isinstance(module, OptimizedModule):
                self._replace_forward(module, self._whole)
            elif not self._is_left_alone(module):
                self._replace_forward(module, self._own)
                self._undo.callback(module.register_state_dict_post_hook(hook).remove)
            call = module._compiled_call_impl
            if call is not None:
                self._undo.callback(setattr, module, "_compiled_call_impl", call)
                module._compiled_call_impl = functools.partial(self._whole, module, call)

    def release(self) -> None:
        """Give the modules their own `forward` back, and forget the copies."""
        self._is_attached = False
        self._undo.close()
        self._ledger.entries.clear()
        self._kept.clear()

    def bytes_held(self) -> int:
        """Return the bytes of all copies."""
        return sum(entry.beside.nbytes for _, entry in self._ledger if entry.beside is not None)

    def _is_left_alone(self, module: nn.Module) -> bool:
        own = [p for p in module._parameters.values() if p is not None]
        is_small = type(module) in _CAST_BY_AUTOCAST and all(p.numel() <= _SMALL for p in own)
        return not own or is_small or module in self._kept or isinstance(module, _READS_ELSEWHERE)

    def _replace_forward(self, module: nn.Module, run: Callable[..., Any]) -> None:
        """Replace `forward` on the instance."""
        # Not by hooks: those of the user then see the model at rest, and whatever calls `forward`
        # itself is served too. A method is bound anew when its module is copied.
        original = module.__dict__.get("forward")

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # copies are put in at the boundary of compiled code
                if original is None:
                    return type(module).forward(module, *args, **kwargs)
                return original(*args, **kwargs)
            call = original or types.MethodType(type(module).forward, module)
            return run(module, call, *args, **kwargs)

        forward.__wrapped__ = type(module).forward  # type: ignore[attr-defined]  # its signature
        replace_forward(module, forward, self._undo)

    # --- while a module computes -----------------------------------------------------------------

    def _own(
        self, module: nn.Module, call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        swapped = self._swap([module])  # no context manager: this runs for every layer
        try:
            return call(*args, **kwargs)
        finally:
            self._put_back([module], swapped)

    def _whole(
        self, module: nn.Module, call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run compiled code, in which no forward of a submodule is ours to replace."""
        with self.in_place(*module.modules()):
            return call(*args, **kwargs)

    @contextlib.contextmanager
    def in_place(self, *modules: nn.Module) -> Iterator[None]:
        """Put copies into the `_parameters` of modules, where autocast is on."""
        served = [each for each in modules if not self._is_left_alone(each)]
        swapped = self._swap(served)
        try:
            yield
        finally:
            self._put_back(served, swapped)

    def _swap(self, modules: Sequence[nn.Module]) -> list[_Swapped]:
        # Under functorch's transforms, as with a stand-in that no copy is for, autocast casts.
        is_on = self._is_attached and not torch._C._are_functorch_transforms_active()
        with torch._C.DisableTorchFunction():  # op policies would look at all that is read here
            entries = [entry for module in modules if is_on for entry in self._entries(module)]
            # Without grad copies serve as they are: no node, and nothing to give back.
            stand_ins = {id(p): copy for _, _, p, copy in entries}
            if torch.is_grad_enabled():  # one node for all, tied weights once
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
        """Return what is to be replaced: fp32 weights, where autocast is on."""
        entries: list[tuple[nn.Module, str, nn.Parameter, Tensor]] = []
        if module in self._kept:
            return entries
        for name, p in module._parameters.items():
            if p is None:
                continue
            entry = self._ledger.entries.get(id(p))
            if entry is None or not entry.is_current(p):  # else it needs no second look
                if not _can_be_half(p) or not torch.is_autocast_enabled(p.device.type):
                    continue
                entry = self._up_to_date(p)
            elif not torch.is_autocast_enabled(entry.device_type):
                continue
            if self._is_probing and module.training and _differs(p, entry.beside):
                self.refresh([p])  # else a write to `p.data` looked like one to the copy
            entries.append((module, name, p, entry.beside))
        return entries

    def _put_back(self, modules: Sequence[nn.Module], swapped: list[_Swapped]) -> None:
        for module, name, parameter, _, stand_in, _ in swapped:  # all first: what follows may raise
            if module._parameters.get(name) is stand_in:
                module._parameters[name] = parameter
        self._users.leave(modules)
        with torch._C.DisableTorchFunction():
            for each in swapped:
                if each.module._parameters.get(each.name) is each.parameter:
                    self._look_for_writes(each)

    def _look_for_writes(self, swapped: _Swapped) -> None:
        """Take over what a forward has written into its weights, if that can be seen."""
        module, name, parameter, copy, stand_in, version = swapped
        if stand_in._version != version or stand_in.data_ptr() != copy.data_ptr():
            self._take_write(parameter, stand_in)
        elif self._is_probing and module.training and _differs(parameter, stand_in):
            self._take_write(parameter, stand_in)
            self._keep(module, name)

    # --- the copies ------------------------------------------------------------------------------

    def _up_to_date(self, parameter: nn.Parameter) -> Entry:
        """Make the copy of a parameter anew."""
        entry = self._ledger.open(parameter)
        # Copies that are made while validating must serve training too.
        with torch.inference_mode(False), torch.no_grad():
            if not _fits(entry, parameter):
                entry.beside = torch.empty_like(parameter, dtype=self.half, requires_grad=False)
                entry.device_type = parameter.device.type
            entry.beside.copy_(parameter)
            entry.note(parameter)
        return entry

    def refresh(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Bring all or some copies up to date, whatever has been written: one multi-tensor copy.

        A copy that nothing has changed must not be written while a graph holds it.
        """
        pairs: Iterable[tuple[Any, Entry]] = self._ledger
        if parameters is None:
            # At steps 1, 2, 4, 8, ...: comparing weights costs a host sync on a GPU.
            self._refreshes += 1
            self._is_probing = self._refreshes & (self._refreshes - 1) == 0
        else:
            entries = self._ledger.entries
            pairs = [(p, entries[id(p)]) for p in parameters if id(p) in entries]
        fitting = [(p, entry) for p, entry in pairs if _fits(entry, p)]
        if fitting:
            with torch.inference_mode(False), torch.no_grad():
                copies = [entry.beside for _, entry in fitting]
                torch._foreach_copy_(copies, [p for p, _ in fitting])
        for parameter, entry in fitting:
            entry.note(parameter)

    def _write_fp32(self, module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        """Put parameters for copies into a `state_dict` that is read amid a forward."""
        # As by a thread that saves checkpoints beside the training: 6 of 100 had half weights.
        own = {prefix + name: state.get(prefix + name) for name in module._parameters}
        halves = {k: v for k, v in own.items() if isinstance(v, Tensor) and v.dtype == self.half}
        for parameter, entry in self._ledger if halves else ():
            for key, value in halves.items():
                if entry.beside is not None and entry.beside.data_ptr() == value.data_ptr():
                    # `requires_grad` where variables are asked for.
                    state[key] = parameter if value.requires_grad else parameter.detach()

    # --- writes into the copies ------------------------------------------------------------------

    @torch.no_grad()
    def _take_write(self, parameter: nn.Parameter, stand_in: Tensor) -> None:
        """Take over what a forward has written into its weight, and no other element's rounding."""
        written = stand_in.detach()
        # Elements that were not written keep the bits that half lacks.
        is_same = written == parameter.to(self.half)
        parameter.copy_(torch.where(is_same, parameter, written.to(parameter.dtype)))
        entry = self._ledger.open(parameter)
        if written.data_ptr() != entry.beside.data_ptr():
            entry.beside.copy_(written)
        entry.note(parameter)

    def _keep(self, module: nn.Module, name: str) -> None:
        self._kept.add(module)
        rank_zero_warn(
            f"The forward of a {type(module).__name__} writes to its parameter {name!r} past "
            "autograd (`.data`). The write has been taken over, and the module computes with its "
            "own fp32 weights from now on, cast at every use. Write under `torch.no_grad()`, or "
            f"name it in `fp32_modules`, such as `fp32_modules=['norm', '{type(module).__name__}']`"
        )


def _can_be_half(entry: Tensor) -> bool:
    # Entries that stand for something else, as in `torch.func.functional_call`, stay.
    is_weight = isinstance(entry, nn.Parameter) and not is_lazy(entry)
    return is_weight and entry.dtype == torch.float32 and entry.dim() > 0


def _fits(entry: Entry, parameter: Tensor) -> bool:
    copy = entry.beside
    return copy is not None and copy.shape == parameter.shape and copy.device == parameter.device


def _differs(parameter: nn.Parameter, copy: Tensor) -> bool:
    # By bits, as NaN is not equal to itself.
    rounded = parameter.detach().to(copy.dtype).view(torch.int16)
    return not torch.equal(rounded, copy.detach().view(torch.int16))
