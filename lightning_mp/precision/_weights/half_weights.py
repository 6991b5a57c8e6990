"""Half weights with what rounding takes from them, and their fp32 values for whoever steps them.

The model and, at rest, the optimizer hold half weights: everything that looks at parameter groups
or at the model's parameters, such as freezing, toggling or DDP, meets the parameters that it knows.
`SafeAdamW` steps weight and residual as they are. While any other optimizer steps or loads its
state, fp32 *stand-ins* take the place of half weights in its groups, and its state goes with them.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.numerics.floats import HALF_DTYPES
from lightning_mp.numerics.split_weights import join_weight, join_weights, split_weight
from lightning_mp.optim._adamw.foreach import mix_seed, round_weights
from lightning_mp.optim.fp32_states import widen_state
from lightning_mp.optim.safe_adamw import SafeAdamW
from lightning_mp.precision._weights.ledger import Entry, Ledger, parameters_of

__all__ = ["HalfWeights", "WriteBack"]

WriteBack = Literal["kahan", "stochastic", "nearest"]

_CONVERTED = (torch.float32, *HALF_DTYPES)  # a frozen base may have come in the other half


class HalfWeights:
    """Turns a model's weights into half, and keeps what they lack of their fp32 values.

    A weight in fp16 moves by 2^-11 of itself at least: updates below half of that vanish. With
    `write_back="kahan"` a residual beside every weight, in half, takes them; without one weights
    are rounded at random (`"stochastic"`) or to `"nearest"`.

    What is written through `exposed`, `load_state_dict` or the tensors of `state_dict` keeps all
    bits. Other writes win to half a step, and are warned of: a residual with which a weight would
    round to another one belongs to what something has overwritten since, and counts for nothing.
    A weight has no residual until it is trained, or a value is written that half does not hold.
    """

    def __init__(
        self, half: torch.dtype, write_back: WriteBack = "kahan", ledger: Ledger | None = None
    ) -> None:
        self.half = half
        self.write_back = write_back
        self.writes = 0  # seeds the noise, so that ranks and resumed runs round alike
        self._ledger = Ledger() if ledger is None else ledger
        # Weights and their stand-ins, while an optimizer has these.
        self._stand_ins: list[tuple[nn.Parameter, Tensor]] = []
        # Weight -> what `state_dict` gave out of it since the last step: in fp32 the weight itself.
        self._lent: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._written: set[nn.Parameter] = set()
        self._has_warned = False
        self._owners: set[nn.Module] = set()
        self._undo = contextlib.ExitStack()

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._ledger

    def __deepcopy__(self, memo: dict[int, object]) -> "HalfWeights":
        return self  # a copy of the model, such as an average, is a plain half model

    def read(self, parameter: nn.Parameter) -> Tensor:
        """Return a weight in fp32, with its residual: a new tensor."""
        residual = self._residual_of(parameter)
        weight = parameter.detach()
        return weight.float() if residual is None else join_weight(weight, residual)

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write an fp32 value into a weight, rounded to nearest, and into its residual."""
        weight, rest = split_weight(value, self.half)
        parameter.copy_(weight)
        self._set_residual(parameter, rest)
        self._ledger.open(parameter).note(parameter)

    def _residual_of(self, parameter: nn.Parameter) -> Tensor | None:
        entry = self._ledger.open(parameter)
        residual: Tensor | None = entry.beside
        if residual is None and parameter.requires_grad and self.write_back == "kahan":
            with torch.inference_mode(False):
                residual = torch.zeros_like(parameter, requires_grad=False)
        # A model may be moved after `convert`: residuals are no buffers, and follow it.
        if residual is not None and residual.device != parameter.device:
            with torch.inference_mode(False):
                residual = residual.to(parameter.device)
        entry.beside = residual
        return residual

    def _set_residual(self, parameter: nn.Parameter, rest: Tensor) -> None:
        residual = self._residual_of(parameter)
        if residual is not None:
            residual.copy_(rest)
        elif self.write_back == "kahan" and rest.any():
            self._ledger.open(parameter).beside = rest

    # --- the model -------------------------------------------------------------------------------

    def convert(self, module: nn.Module, keep_fp32: Iterable[nn.Module] = ()) -> None:
        """Turn a model's fp32 parameters into half weights, in place, so that tied ones stay tied.

        One that a module of `keep_fp32` shares stays in fp32. Checkpoints of the model hold fp32
        values, and loading one writes weights and residuals. Called again, it takes what is new.
        """
        # By identity of parameters, not by module: a tied weight stands in several modules.
        kept = {id(p) for owner in keep_fp32 for p in owner.parameters(recurse=False)}
        for owner in module.modules():
            own = [
                p
                for p in owner.parameters(recurse=False)
                if p in self._ledger or (p.dtype in _CONVERTED and id(p) not in kept)
            ]
            for parameter in own:
                if parameter not in self._ledger:
                    self._take(parameter)
            if own and owner not in self._owners:
                self._owners.add(owner)
                for handle in (
                    # Hooks of this kind are marked by an attribute, which methods cannot have.
                    owner.register_state_dict_post_hook(functools.partial(self._write_fp32)),
                    owner.register_load_state_dict_pre_hook(self._read_fp32),
                ):
                    self._undo.callback(handle.remove)

    def _take(self, parameter: nn.Parameter) -> None:
        entry = self._ledger.open(parameter)
        weight, rest = split_weight(parameter.detach().float(), self.half)
        if parameter.requires_grad and self.write_back == "kahan":
            entry.beside = rest
        parameter.grad = None
        parameter.data = weight
        parameter.grad_dtype = None  # half from a backward, fp32 once it is unscaled

    def settle(self) -> None:
        """Take over what was written from outside where that is exact; warn of the rest, once."""
        lent, self._lent = self._lent, {}
        for parameter, (value, version) in lent.items():
            # Who has written into the weight as well was later.
            if value._version != version and self._ledger.open(parameter).is_current(parameter):
                self.write(parameter, value)
        for parameter, entry in self._ledger:
            if entry.is_current(parameter):
                continue
            if parameter.dtype != self.half:  # `p.data = ...`
                value = parameter.detach().float()
                parameter.data = value.to(self.half)
                self.write(parameter, value)
            elif entry.stamp is not None and self._loses_writes(parameter):
                name = self._ledger.name_of(parameter)
                rank_zero_warn(
                    f"Something beside its optimizer wrote into {name!r} under `PureFP16`. What "
                    "was written is rounded to half: it moves no weight by less than 2^-12 of "
                    "itself (2^-9 in bf16). Write in `with plugin.exposed(module):`, where weights "
                    "are in fp32."
                )
            entry.note(parameter)

    def _loses_writes(self, parameter: nn.Parameter) -> bool:
        """Return whether a write into a weight is the first to be warned of."""
        # One write is right to half a step; many may each be lost. A logit scale is often clamped.
        is_repeated = parameter in self._written and parameter.dim() > 0 and not self._has_warned
        self._written.add(parameter)
        self._has_warned |= is_repeated
        return is_repeated

    def release(self) -> None:
        """Turn the half weights back into fp32 parameters, and forget them."""
        self._undo.close()
        for parameter, entry in self._ledger:
            parameter.grad = None
            parameter.data = self._saved(parameter, entry)
            parameter.grad_dtype = parameter.dtype
        self._ledger.entries.clear()
        self._owners.clear()
        self._lent.clear()
        self._written.clear()
        self._has_warned = False

    def _saved(self, parameter: nn.Parameter, entry: Entry) -> Tensor:
        """Return a weight in fp32; one that came in half and was never trained in half."""
        is_as_it_came = entry.came_as == self.half and entry.beside is None
        return parameter.detach() if is_as_it_came else self.read(parameter)

    @contextlib.contextmanager
    def exposed(self, module: nn.Module) -> Iterator[None]:
        """Put fp32 parameters in the place of half weights, and take back their values."""
        # The half weights stay: DDP's hooks on them would be lost if their dtype changed.
        shown = {
            parameter: nn.Parameter(self.read(parameter), parameter.requires_grad)
            for parameter in module.parameters()
            if parameter in self._ledger
        }
        places = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None and parameter in shown
        ]
        for owner, name, parameter in places:
            owner._parameters[name] = shown[parameter]
        try:
            yield
        finally:
            for owner, name, parameter in places:
                # Who has put another parameter there inside of the context keeps it.
                if owner._parameters.get(name) is shown[parameter]:
                    owner._parameters[name] = parameter
            for parameter, value in shown.items():
                self.write(parameter, value.detach())

    def _write_fp32(
        self, owner: nn.Module, state_dict: dict[str, object], prefix: str, _: object
    ) -> None:
        """Put fp32 values into a checkpoint where the weights would be."""
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            # With `keep_vars` the caller wants the parameters themselves.
            saved = state_dict.get(prefix + name)
            entry = self._ledger.entries.get(id(parameter))
            if entry is not None and not isinstance(saved, nn.Parameter):
                value = self._saved(parameter, entry)
                state_dict[prefix + name] = value
                if value.dtype != parameter.dtype:
                    self._lent[parameter] = value, value._version

    def _read_fp32(
        self, owner: nn.Module, state_dict: dict[str, object], prefix: str, *_: object
    ) -> None:
        """Take residuals from a checkpoint before the weights are rounded from it."""
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            loaded = state_dict.get(prefix + name)
            if parameter in self._ledger and isinstance(loaded, Tensor):
                if loaded.shape == parameter.shape:
                    rest = split_weight(loaded.detach().float(), self.half)[1]
                    self._set_residual(parameter, rest.to(parameter.device))
                self._ledger.open(parameter).stamp = None  # torch writes the weight itself
                self._lent.pop(parameter, None)

    def narrow_gradients(self) -> None:
        """Cast gradients that wait for a further backward to half, for DDP's half buckets."""
        for parameter, _ in self._ledger:
            if parameter.grad is not None and parameter.grad.dtype != self.half:
                parameter.grad = parameter.grad.to(self.half)

    def broadcast(self) -> None:
        """Give all ranks the residuals of the first; DDP does so for the weights alone."""
        for parameter, _ in self._ledger:
            residual = self._residual_of(parameter)
            if residual is not None:
                torch.distributed.broadcast(residual, group_src=0)

    # --- the optimizers --------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> None:
        """Let an optimizer load its state in fp32, and widen the state that it has already."""
        # `Optimizer.load_state_dict` casts states to the dtype of their parameter, which would
        # leave Adam's second moments in fp16. `SafeAdamW` does not, and gets the residuals.
        if isinstance(optimizer, SafeAdamW):
            self._share(optimizer)
            handle = optimizer.register_load_state_dict_post_hook(self._share)
            self._undo.callback(handle.remove)
            return
        for parameter, state in optimizer.state.items():
            if parameter in self._ledger:
                widen_state(state)
        for handle in (
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._swap_out),
        ):
            self._undo.callback(handle.remove)

    @contextlib.contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Surround the step of an optimizer, which takes fp32 gradients from `p.grad`."""
        self.settle()
        # Groups are read anew each time, so parameters may join at any time.
        if isinstance(optimizer, SafeAdamW):
            self._share(optimizer)
        else:
            self._swap_in(optimizer)
        try:
            for parameter, stand_in in self._stand_ins:
                if parameter.grad is not None:
                    stand_in.grad = parameter.grad.float()
            yield
            # After an exception weights stay as they were.
            self._round(optimizer)
        finally:
            self._swap_out(optimizer)
            for parameter in parameters_of(optimizer):
                if parameter in self._ledger:
                    self._ledger.open(parameter).note(parameter)

    def _share(self, optimizer: Optimizer) -> None:
        """Let a `SafeAdamW` step the residuals kept here, as `write_back` here says."""
        for group in optimizer.param_groups:
            for parameter in (p for p in group["params"] if p in self._ledger):
                group["write_back"] = self.write_back
                residual = self._residual_of(parameter)
                # What has never had a gradient has no state at all.
                if residual is not None and (
                    parameter.grad is not None or parameter in optimizer.state
                ):
                    optimizer.state[parameter]["residual"] = residual

    @torch.no_grad()
    def _round(self, optimizer: Optimizer) -> None:
        """Round the stand-ins of an optimizer, if any, into their weights and residuals."""
        places = {id(each): index for index, each in enumerate(parameters_of(optimizer))}
        kept: list[tuple[Tensor, Tensor, Tensor]] = []  # weight, residual, value
        for parameter, stand_in in self._stand_ins:
            residual = self._residual_of(parameter)
            if residual is not None:
                kept.append((parameter, residual, stand_in.detach()))
            else:
                seed = mix_seed(self.writes, places[id(stand_in)])
                round_weights([parameter], [], [stand_in.detach()], self.write_back, seed)
        if kept:
            weights, residuals, values = map(list, zip(*kept, strict=True))
            round_weights(weights, residuals, values, self.write_back, 0)
        self.writes += self.write_back == "stochastic" and bool(self._stand_ins)

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        # After a load that torch refuses, no hook would put the weights back.
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        fits = sizes == [len(group["params"]) for group in optimizer.param_groups]
        if fits and "state" in state_dict:
            self._swap_in(optimizer)

    @torch.no_grad()
    def _swap_in(self, optimizer: Optimizer) -> None:
        halves = [(p, self._residual_of(p)) for p in parameters_of(optimizer) if p in self._ledger]
        pairs = [(p, rest) for p, rest in halves if rest is not None]
        joined = iter(join_weights([p for p, _ in pairs], [rest for _, rest in pairs]))
        values = [p.float() if rest is None else next(joined) for p, rest in halves]
        self._stand_ins = [
            (p, value.requires_grad_()) for (p, _), value in zip(halves, values, strict=True)
        ]
        _replace(optimizer, self._stand_ins)

    def _swap_out(self, optimizer: Optimizer) -> None:
        stand_ins, self._stand_ins = self._stand_ins, []
        _replace(optimizer, [(stand_in, parameter) for parameter, stand_in in stand_ins])


def _replace(optimizer: Optimizer, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Put the second tensor of each pair, with its state, in the place of the first."""
    others = {id(old): new for old, new in pairs}  # tensors are hashed in Python
    for group in optimizer.param_groups:
        group["params"][:] = [others.get(id(p), p) for p in group["params"]]
    for old, new in pairs:
        state = optimizer.state.pop(old, None)
        if state is not None:
            optimizer.state[new] = state
