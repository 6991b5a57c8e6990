"""fp32 master weights behind half working weights, for any torch optimizer.

The model holds *working weights* in fp16 or bf16, and so does the optimizer, at rest: everything
that looks at `optimizer.param_groups` or at the model's parameters, such as freezing, toggling or
DDP, meets the parameters that it knows. Only while the optimizer steps or loads its state do their
*masters* stand in for them: fp32 tensors with unscaled fp32 gradients, and the optimizer's state
with them. After the step, the working weights are the masters rounded.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_mp.precision.master_storage import WriteBack, make_storage

__all__ = ["MasterWeights"]


class MasterWeights:
    """Keeps the masters of a model's half weights, and puts them where they are needed.

    A weight in fp16 moves by 2^-11 of itself at least: updates below half of that vanish, and
    training stops with no sign of it. The master takes them all.

    Writes from outside win: before a master is used, `where(half(master) == weight, master,
    weight)` takes over what a callback, a user or `load_state_dict` has written into the weight.

    Args:
        half: The dtype of working weights, `torch.float16` or `torch.bfloat16`.
        write_back: What is kept of a master between steps: `"masters"` keeps it in fp32; `"kahan"`
            the residual of its rounding, in half; `"stochastic"` and `"nearest"` nothing, where
            weights are rounded at random, or to nearest. All but the first make fp32 masters for
            the time of a step alone.
    """

    def __init__(self, half: torch.dtype, write_back: WriteBack) -> None:
        self.half = half
        self.storage = make_storage(write_back, half)
        self._kept: dict[nn.Parameter, Tensor | None] = {}  # what `storage` keeps of each master
        self._working: dict[Tensor, nn.Parameter] = {}  # while a master stands in
        self._handles: list[RemovableHandle] = []

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._kept

    def __deepcopy__(self, memo: dict[int, object]) -> "MasterWeights":
        # A copy of the model, such as an average, brings its hooks, and is a plain half model.
        return self

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the working weights."""
        return iter(self._kept)

    def master_of(self, parameter: nn.Parameter) -> Tensor:
        """Return a weight in fp32: its master, or the weight where something else was written."""
        kept = self._kept[parameter]
        if kept is not None and kept.device != parameter.device:
            kept = self._kept[parameter] = kept.to(parameter.device)
        return self.storage.read(parameter.detach(), kept)

    def working_of(self, tensor: Tensor) -> Tensor:
        """Return the working weight of a master that stands in, or else the tensor itself."""
        return self._working.get(tensor, tensor)

    # --- the model -------------------------------------------------------------------------------

    def convert(
        self, module: nn.Module, keep_fp32: Iterable[nn.Module] = (), *, take_half: bool = False
    ) -> None:
        """Turn a model's fp32 parameters into working weights, in place.

        Parameters keep their identity, so tied weights stay tied. Buffers stay as they are:
        running statistics and tables of angles do not survive 11 bits. Checkpoints of the model
        hold the masters, and loading one sets the masters.

        Args:
            module: The model.
            keep_fp32: Modules whose own parameters stay in fp32, also where another shares them.
            take_half: Whether parameters that are in half already become working weights too.
        """
        taken = {torch.float32, self.half} if take_half else {torch.float32}
        kept = {id(p) for owner in keep_fp32 for p in owner.parameters(recurse=False)}
        for owner in module.modules():
            own = [
                p
                for p in owner.parameters(recurse=False)
                if p in self._kept or (p.dtype in taken and id(p) not in kept)
            ]
            for parameter in own:
                if parameter not in self._kept:
                    self._kept[parameter] = self.storage.keep(parameter.detach().float())
                    parameter.grad = None
                    parameter.data = parameter.data.to(self.half)
                    parameter.grad_dtype = None  # fp32 and unscaled from `_unscale` on
            if own:
                self._handles += [
                    # Hooks of this kind are marked by an attribute, which methods cannot have.
                    owner.register_state_dict_post_hook(functools.partial(self._write_masters)),
                    owner.register_load_state_dict_pre_hook(self._read_masters),
                ]

    def release(self) -> None:
        """Turn the working weights back into fp32 parameters, and forget them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter in self._kept:
            master = self.master_of(parameter)
            parameter.grad = None
            parameter.data = master
            parameter.grad_dtype = master.dtype
        self._kept.clear()

    def _write_masters(
        self, owner: nn.Module, state_dict: dict[str, object], prefix: str, _: object
    ) -> None:
        """Put masters into a checkpoint where the weights would be."""
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            # With `keep_vars` the caller wants the parameters themselves.
            saved = state_dict.get(prefix + name)
            if parameter in self._kept and not isinstance(saved, nn.Parameter):
                state_dict[prefix + name] = self.master_of(parameter)

    def _read_masters(
        self, owner: nn.Module, state_dict: dict[str, object], prefix: str, *_: object
    ) -> None:
        """Take masters from a checkpoint before the weights are rounded from it."""
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            loaded = state_dict.get(prefix + name)
            kept = self._kept.get(parameter)
            if isinstance(loaded, Tensor) and kept is not None and loaded.shape == kept.shape:
                new = self.storage.keep(loaded.detach().to(kept.device, torch.float32))
                self._kept[parameter] = new

    # --- the optimizers --------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> None:
        """Let an optimizer load its state onto masters, and widen the state that it has already.

        `Optimizer.load_state_dict` casts states to the dtype of their parameter, which would leave
        Adam's second moments in fp16.
        """
        for parameter, state in optimizer.state.items():
            if parameter in self._kept:
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dtype == self.half:
                        state[name] = value.float()
        self._handles += [
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._swap_out),
        ]

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        # After a load that torch refuses, no hook would put the working weights back.
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        fits = sizes == [len(group["params"]) for group in optimizer.param_groups]
        if fits and "state" in state_dict:
            self._swap_in(optimizer)

    @contextlib.contextmanager
    def standing_in(self, optimizer: Optimizer) -> Iterator[None]:
        """Put masters into the parameter groups of an optimizer, with their state; then undo it.

        Groups are read anew each time, so parameters may join at any time. Within, masters carry
        no gradients until `take_gradients`.
        """
        self._swap_in(optimizer)
        try:
            yield
        finally:
            self._swap_out(optimizer)

    def take_gradients(self, optimizer: Optimizer) -> None:
        """Give masters that stand in the gradients of their working weights, in fp32 by then."""
        for master in _parameters_of(optimizer):
            parameter = self._working.get(master)
            if parameter is not None:
                master.grad = parameter.grad

    def write_back(self, optimizer: Optimizer) -> None:
        """Round the masters that stand in into their working weights."""
        masters = [m for m in _parameters_of(optimizer) if m in self._working]
        working = [self._working[m] for m in masters]
        if masters:
            weights = [p.detach() for p in working]
            kept = self.storage.write(weights, [m.detach() for m in masters])
            self._kept.update(zip(working, kept, strict=True))

    def broadcast(self, process_group: torch.distributed.ProcessGroup | None = None) -> None:
        """Give all ranks the masters of the first; DDP does so for the weights alone."""
        for parameter, kept in self._kept.items():
            if kept is not None:
                master = self.master_of(parameter)
                torch.distributed.broadcast(master, group_src=0, group=process_group)
                self._kept[parameter] = self.storage.keep(master)

    def _swap_in(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            parameters = group["params"]
            for index, parameter in enumerate(parameters):
                if parameter in self._kept:
                    master = self.master_of(parameter).requires_grad_()
                    self._working[master] = parameter
                    parameters[index] = master
                    _move_state(optimizer, parameter, master)

    def _swap_out(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            parameters = group["params"]
            for index, master in enumerate(parameters):
                parameter = self._working.pop(master, None)
                if parameter is not None:
                    parameters[index] = parameter
                    _move_state(optimizer, master, parameter)
                    master.grad = None


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _move_state(optimizer: Optimizer, old: Tensor, new: Tensor) -> None:
    if old in optimizer.state:
        optimizer.state[new] = optimizer.state.pop(old)
