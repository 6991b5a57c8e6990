"""Half weights with residuals, and the fp32 stand-ins that optimizers step.

The model and the parameter groups of its optimizers hold half weights. `SafeAdamW` steps weights
and residuals directly. While any other optimizer steps or loads its state, fp32 *stand-ins* replace
the half weights in its groups and in its state.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_mp.numerics.floats import HALF_DTYPES
from lightning_mp.numerics.split_weights import join_weight, join_weights, split_weight
from lightning_mp.optim._adamw.foreach import mix_seed, round_weights
from lightning_mp.optim.fp32_states import widen_state
from lightning_mp.optim.safe_adamw import SafeAdamW
from lightning_mp.precision._weights.ledger import Entry, Ledger, parameters_of, stamp_of

__all__ = ["HalfWeights", "WriteBack"]

WriteBack = Literal["kahan", "stochastic", "nearest"]
_ROUNDED = (
    "Code outside its optimizer wrote to {name!r} under `PureFP16`. The write is rounded to half "
    "precision: changes below 2^-12 of a weight (2^-9 in bf16) are lost. Write inside `with "
    "plugin.exposed(module):`, where weights are fp32."
)


class HalfWeights:
    """Converts the weights of a model to half precision and stores their rounding errors.

    An fp16 weight changes by at least 2^-11 of itself, so updates below half of that are lost. With
    `write_back="kahan"`, a half-precision residual per weight keeps them; otherwise weights are
    rounded stochastically (`"stochastic"`) or to `"nearest"`.

    Writes through `exposed`, `load_state_dict` or the tensors of `state_dict` keep all bits. Other
    writes are rounded to half precision and invalidate the residual; repeated writes are warned of.
    A weight has no residual until it is trained, or until half cannot represent a written value.
    """

    def __init__(
        self, half: torch.dtype, write_back: WriteBack = "kahan", ledger: Ledger | None = None
    ) -> None:
        self.half = half
        self.write_back = write_back
        self.writes = 0  # seeds stochastic rounding, so that ranks and resumed runs agree
        self._ledger = Ledger() if ledger is None else ledger
        # Weights, residuals and stand-ins, during the step of an optimizer.
        self._stand_ins: list[tuple[nn.Parameter, Tensor | None, Tensor]] = []
        # Tensors that `state_dict` returned since the last step, their versions, and weight stamps.
        self._lent: dict[nn.Parameter, tuple[Tensor, int, tuple[int, int]]] = {}
        self._written: set[nn.Parameter] = set()
        self._has_warned = False
        self._owners: set[nn.Module] = set()
        self._undo = contextlib.ExitStack()

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._ledger

    def __deepcopy__(self, memo: dict[int, object]) -> "HalfWeights":
        # A copy of the model, such as an average, is an ordinary half model. A copy of the plugin,
        # which has copied its ledger before, converts other weights.
        ledger: Any = memo.get(id(self._ledger))
        return self if ledger is None else HalfWeights(self.half, self.write_back, ledger)

    def __reduce__(self) -> tuple[Any, ...]:
        return HalfWeights, (self.half, self.write_back, self._ledger)  # a pickled model is one too

    def read(self, parameter: nn.Parameter) -> Tensor:
        """Return a new fp32 tensor with the value of a weight and its residual."""
        residual = self._residual_of(parameter)
        weight = parameter.detach()
        return weight.float() if residual is None else join_weight(weight, residual)

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write an fp32 value into a weight and its residual."""
        weight, rest = split_weight(value, self.half)
        parameter.copy_(weight)
        self._set_residual(parameter, rest)
        self._ledger.open(parameter).note(parameter)

    def _residual_of(self, parameter: nn.Parameter) -> Tensor | None:
        entry = self._ledger.open(parameter)
        residual: Tensor | None = entry.beside
        if residual is not None and residual.shape != parameter.shape:
            residual = None  # the weight was resized by `p.data = ...`
        if residual is None and parameter.requires_grad and self.write_back == "kahan":
            with torch.inference_mode(False):
                residual = torch.zeros_like(parameter, requires_grad=False)
        # Residuals are not buffers: move them if the model was moved after `convert`.
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
        """Convert the parameters of a model to half weights in place; tied weights stay tied.

        Parameters of `keep_fp32` stay in fp32. Checkpoints of the model hold fp32 values, and
        loading one writes weights and residuals. A second call converts new parameters.
        """
        # By parameter, because modules may share a tied weight.
        kept = {id(p) for owner in keep_fp32 for p in owner.parameters(recurse=False)}
        for owner in module.modules():
            own = list(owner.parameters(recurse=False))
            for p in own:
                is_float = p.dtype in (torch.float32, *HALF_DTYPES)
                is_float = is_float and not is_traceable_wrapper_subclass(p)  # quantized
                if is_float and p not in self._ledger and id(p) not in kept:
                    self._take(p)
            if owner not in self._owners and any(p in self._ledger for p in own):
                self._owners.add(owner)
                # torch sets an attribute on the hook, which methods do not accept.
                saved = functools.partial(self._write_fp32)
                self._undo.callback(owner.register_state_dict_post_hook(saved).remove)
                loaded = owner.register_load_state_dict_pre_hook(self._read_fp32)
                self._undo.callback(loaded.remove)

    def _take(self, parameter: nn.Parameter) -> None:
        weight, rest = split_weight(parameter.detach().float(), self.half)
        is_kept = parameter.requires_grad and self.write_back == "kahan"
        self._ledger.open(parameter).beside = rest if is_kept else None
        parameter.grad = None
        parameter.data = weight
        parameter.grad_dtype = None  # half after a backward, fp32 after unscaling

    def settle(self) -> None:
        """Apply outside writes where that is exact; warn once about other writes."""
        lent, self._lent = self._lent, {}
        for parameter, (value, version, stamp) in lent.items():
            # A write to the weight itself came later and takes precedence.
            if value._version != version and stamp == stamp_of(parameter):
                self.write(parameter, value.float())
        for parameter, entry in self._ledger:
            if entry.is_current(parameter):
                continue
            if parameter.dtype != self.half:  # `p.data = ...`
                value = parameter.detach().float()
                parameter.data = value.to(self.half)
                self.write(parameter, value)
            elif entry.stamp is not None:
                # Repeated writes may be lost. Scalars are exempt: logit scales are often clamped.
                if parameter in self._written and parameter.dim() > 0 and not self._has_warned:
                    self._has_warned = True
                    rank_zero_warn(_ROUNDED.format(name=self._ledger.name_of(parameter)))
                self._written.add(parameter)
            entry.note(parameter)

    def release(self) -> None:
        """Convert the half weights back to fp32 and forget them."""
        self._undo.close()
        self.settle()
        for parameter, entry in self._ledger:
            parameter.grad = None
            parameter.data = self._saved(parameter, entry)
            parameter.grad_dtype = parameter.dtype
        self._ledger.entries.clear()
        self._owners.clear()
        self._written.clear()
        self._has_warned = False

    def _saved(self, parameter: nn.Parameter, entry: Entry) -> Tensor:
        """Return a weight in fp32, or in its own half dtype if it was never trained."""
        own = (self.half,) if parameter.requires_grad else HALF_DTYPES
        is_as_it_came = entry.came_as in own and entry.beside is None
        return parameter.detach().to(entry.came_as) if is_as_it_came else self.read(parameter)

    @contextlib.contextmanager
    def exposed(self, module: nn.Module) -> Iterator[None]:
        """Replace half weights by fp32 parameters, and write their values back at the end."""
        self.settle()
        # Changing the dtype of the half weights would lose DDP's hooks on them.
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
                # Keep a parameter that was put there inside the context.
                if owner._parameters.get(name) is shown[parameter]:
                    owner._parameters[name] = parameter
            for parameter, value in shown.items():
                self.write(parameter, value.detach())

    def _write_fp32(
        self, owner: nn.Module, state_dict: dict[str, object], prefix: str, _: object
    ) -> None:
        """Replace half weights in a state dict by fp32 values."""
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            # With `keep_vars`, return the parameters themselves.
            saved = state_dict.get(prefix + name)
            entry = self._ledger.entries.get(id(parameter))
            if entry is not None and not isinstance(saved, nn.Parameter):
                stamp = stamp_of(parameter)
                # Two state dicts share memory, as they do in torch, so that no write is lost.
                if parameter not in self._lent or self._lent[parameter][2] != stamp:
                    value = self._saved(parameter, entry)
                    self._lent[parameter] = value, value._version, stamp
                state_dict[prefix + name] = self._lent[parameter][0]

    def _read_fp32(
        self, owner: nn.Module, state_dict: dict[str, object], prefix: str, *_: object
    ) -> None:
        """Load residuals from a state dict before torch loads the weights."""
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            loaded = state_dict.get(prefix + name)
            if parameter in self._ledger and isinstance(loaded, Tensor):
                if loaded.shape == parameter.shape:
                    rest = split_weight(loaded.detach().float(), self.half)[1]
                    self._set_residual(parameter, rest.to(parameter.device))
                self._ledger.open(parameter).stamp = None  # torch writes the weight next

    def narrow_gradients(self) -> None:
        """Cast accumulated gradients to half."""
        for parameter, _ in self._ledger:
            if parameter.grad is not None and parameter.grad.dtype != self.half:
                parameter.grad = parameter.grad.to(self.half)

    @contextlib.contextmanager
    def narrowing(self) -> Iterator[None]:
        """Keep gradients in half during a backward, for the half buckets of DDP."""
        self.narrow_gradients()
        for parameter, _ in self._ledger:  # functions may return fp32 gradients
            parameter.grad_dtype = self.half
        try:
            yield
        finally:
            for parameter, _ in self._ledger:
                parameter.grad_dtype = None

    def broadcast(self) -> None:
        """Broadcast the residuals of rank 0; DDP broadcasts only weights."""
        for parameter, _ in self._ledger:
            residual = self._residual_of(parameter)
            if residual is not None:
                torch.distributed.broadcast(residual, group_src=0)

    # --- the optimizers --------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> None:
        """Keep the state of an optimizer in fp32, also when it is loaded."""
        # `Optimizer.load_state_dict` casts states to the dtype of their parameter, such as Adam's
        # second moments to fp16. `SafeAdamW` does not, and gets the residuals in `stepping`.
        if isinstance(optimizer, SafeAdamW):
            return
        for parameter, state in optimizer.state.items():
            if parameter in self._ledger:
                widen_state(state)
        self._undo.callback(optimizer.register_load_state_dict_pre_hook(self._before_load).remove)
        self._undo.callback(optimizer.register_load_state_dict_post_hook(self._swap_out).remove)

    @contextlib.contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Surround the step of an optimizer, which reads fp32 gradients from `p.grad`."""
        self.settle()
        # Groups are read at every step, because parameters may join at any time.
        if isinstance(optimizer, SafeAdamW):
            self._share(optimizer)
        else:  # steps skip frozen weights
            parameters = parameters_of(optimizer)
            self._swap_in(
                optimizer, [p for p in parameters if p.requires_grad or p.grad is not None]
            )
        try:
            for parameter, _, stand_in in self._stand_ins:
                if (grad := parameter.grad) is not None:
                    stand_in.grad = grad if grad.dtype == torch.float32 else grad.float()
            yield
            # Not after an exception, so that weights stay unchanged.
            self._round(optimizer)
        finally:
            self._swap_out(optimizer)
            for parameter in parameters_of(optimizer):
                if (entry := self._ledger.entries.get(id(parameter))) is not None:
                    entry.note(parameter)

    def _share(self, optimizer: Optimizer) -> None:
        """Give a `SafeAdamW` the residuals and `write_back` of this class."""
        for group in optimizer.param_groups:
            for parameter in (p for p in group["params"] if p in self._ledger):
                group["write_back"] = self.write_back
                residual = self._residual_of(parameter)
                # A parameter that never had a gradient has no state.
                has_state = parameter.grad is not None or parameter in optimizer.state
                if residual is not None and has_state:
                    optimizer.state[parameter]["residual"] = residual

    @torch.no_grad()
    def _round(self, optimizer: Optimizer) -> None:
        """Split the values of the stand-ins into weights and residuals."""
        places = {id(each): index for index, each in enumerate(parameters_of(optimizer))}
        kept: list[tuple[Tensor, Tensor, Tensor]] = []
        for parameter, residual, stand_in in self._stand_ins:
            if residual is not None:
                kept.append((parameter, residual, stand_in))
            else:
                seed = mix_seed(self.writes, places[id(stand_in)])
                round_weights([parameter], [], [stand_in], self.write_back, seed)
        if kept:
            weights, residuals, values = map(list, zip(*kept, strict=True))
            round_weights(weights, residuals, values, self.write_back, 0)
        self.writes += self.write_back == "stochastic" and bool(self._stand_ins)

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        # If torch refuses the state, no hook would swap the weights back.
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        fits = sizes == [len(group["params"]) for group in optimizer.param_groups]
        if fits and "state" in state_dict:
            self._swap_in(optimizer, parameters_of(optimizer))

    @torch.no_grad()
    def _swap_in(self, optimizer: Optimizer, parameters: Iterable[Any]) -> None:
        halves = [(p, self._residual_of(p)) for p in parameters if p in self._ledger]
        pairs = [(p, rest) for p, rest in halves if rest is not None]
        joined = iter(join_weights([p for p, _ in pairs], [rest for _, rest in pairs]))
        self._stand_ins = [
            (p, rest, (p.float() if rest is None else next(joined)).requires_grad_())
            for p, rest in halves
        ]
        _replace(optimizer, [(p, stand_in) for p, _, stand_in in self._stand_ins])

    def _swap_out(self, optimizer: Optimizer) -> None:
        stand_ins, self._stand_ins = self._stand_ins, []
        _replace(optimizer, [(stand_in, parameter) for parameter, _, stand_in in stand_ins])


def _replace(optimizer: Optimizer, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Put the second tensor of each pair, with its state, in the place of the first."""
    others = {id(old): new for old, new in pairs}  # hashing a tensor calls Python
    for group in optimizer.param_groups:
        group["params"][:] = [others.get(id(p), p) for p in group["params"]]
    for old, new in pairs:
        if (state := optimizer.state.pop(old, None)) is not None:
            optimizer.state[new] = state
