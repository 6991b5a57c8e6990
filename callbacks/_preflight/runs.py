"""Runs one training step in fp32 and in half precision, from the same weights and generators."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_mp._nested import map_tensors, open_container, tensors_in
from lightning_mp.callbacks._preflight.ops import RoundingOps
from lightning_mp.callbacks._preflight.result import Remedy
from lightning_mp.callbacks._step.batches import copy_containers, loss_in
from lightning_mp.callbacks._step.training_state import loss_scale_of
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.gradient_cache._served.autograd import explore_graph, grad_without_side_effects
from lightning_mp.numerics.floats import HALF_DTYPES, ulps
from lightning_mp.numerics.replay_state import RngState
from lightning_mp.precision._choice.module_selection import as_written, select_modules
from lightning_mp.precision._choice.op_tables import follow_changes_of_torch, opened_composites
from lightning_mp.precision._scaling.scaled_precision import ScaledPrecision
from lightning_mp.precision._weights.half_module import (
    cast_at_borders,
    cast_castable,
    compute_in_fp32,
    is_border_cast,
)
from lightning_mp.precision._weights.working_copies import WorkingCopies
from lightning_mp.precision.balanced_amp import BalancedAMP
from lightning_mp.precision.inf_clamp import InfClamp
from lightning_mp.precision.loss_scale_config import LossScaleConfig
from lightning_mp.precision.op_policy import OpPolicy

__all__ = ["ModuleCall", "Run", "Runs", "first_tensor"]

_NOTHING = Remedy()
_DEFAULT_SCALE = LossScaleConfig.parse("dynamic", torch.float16).init_scale or 1.0


class ModuleCall(NamedTuple):
    """The first call of a module in a run."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor  # first floating-point tensor that the module returned

    def rounded_like(self, other: "ModuleCall") -> "ModuleCall":
        """Return the call with inputs rounded to the dtypes of another call, and within range."""
        left = iter([x.dtype for x in tensors_in((other.args, other.kwargs))])

        def rounded(tensor: Tensor) -> Tensor:
            dtype = next(left, tensor.dtype)
            if not tensor.is_floating_point() or not dtype.is_floating_point:
                return tensor
            most = torch.finfo(dtype).max  # beyond this, the previous module has overflowed
            return tensor.clamp(-most, most).to(dtype)

        args, kwargs = map_tensors((self.args, self.kwargs), rounded)
        return self._replace(args=args, kwargs=kwargs)


class Run(NamedTuple):
    """Results of one run of a training step."""

    loss: float  # unscaled
    gradients: dict[str, Tensor]  # gradients of trained parameters by name, unscaled, in fp32
    calls: dict[str, ModuleCall]  # the first call of each module by path, if recorded
    cotangents: dict[str, Tensor]  # scaled gradients of the outputs of these calls


class Runs:
    """Runs the training step of a Trainer on one batch."""

    def __init__(self, trainer: pl.Trainer, batch: Any, batch_idx: int) -> None:
        self.trainer, self.module = trainer, trainer.lightning_module
        root = trainer.strategy.root_device
        self.batch = copy_containers(batch)
        # Otherwise tensors stay where the run has them, such as lengths on the CPU.
        if getattr(trainer.strategy, "offload", "none") == "host":
            self.batch = map_tensors(self.batch, lambda tensor: tensor.to(root))
        self._batch_idx = batch_idx
        self._rng, self._device_type = RngState(root, self.module), root.type
        self.plugin = trainer.precision_plugin
        trained = (p for p in self.module.parameters() if p.requires_grad)
        self.is_true_half = any(p.dtype in HALF_DTYPES for p in trained)
        # As the argument of `BalancedAMP`; half copies have the numerics of half weights.
        self.weights = getattr(self.plugin, "weights", "half" if self.is_true_half else "full")
        # Whether the plugin is Lightning's own true half precision, which has no settings.
        self.lacks_settings = self.is_true_half and not isinstance(self.plugin, ScaledPrecision)
        # All names of bf16, such as `bf16-mixed`, contain `bf16`.
        self.half = torch.bfloat16 if "bf16" in str(self.plugin.precision) else torch.float16
        self.scale = float(loss_scale_of(trainer) or 1.0)  # the current loss scale

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        named = self.module.named_modules()
        # TorchScript accepts no hooks.
        return ((n, m) for n, m in named if n and not isinstance(m, torch.jit.ScriptModule))

    def is_most(self, path: str) -> bool:
        """Return whether a module has more than half of the model's parameters."""
        whole, part = self.module, self.module.get_submodule(path)
        count = sum(p.numel() for p in part.parameters())
        return 2 * count > sum(p.numel() for p in whole.parameters())

    def other_halves(self) -> list[torch.dtype]:
        """Return the dtypes with which `BalancedAMP` differs from the run's own plugin."""
        other = torch.float16 if self.half == torch.bfloat16 else torch.bfloat16
        return [self.half, other] if self.is_true_half else [other]

    def in_fp32(self, batch: Any = None, *, records: bool = False, unrounded: bool = False) -> Run:
        """Run in fp32, without the plugin, on weights of the same values, or unrounded ones."""
        with fp32_weights(self.module.modules(), unrounded=unrounded):
            batch = self.batch if batch is None else batch
            return self._run(cast_castable(batch, torch.float32), (), nullcontext(), 1.0, records)

    def in_half(self, remedy: Remedy = _NOTHING, *, records: bool = False) -> Run:
        """Run as the plugin does, or a `BalancedAMP`, with the settings of a remedy."""
        scale = self.scale if remedy.loss_scale is None else remedy.loss_scale
        policy, half = self._policy(remedy), remedy.half or self.half
        contexts: list[AbstractContextManager[Any]] = []
        if policy is not None:
            contexts = [policy.context(self._device_type, half)]
        with ExitStack() as undo:
            if remedy.half is None:
                batch = self.plugin.convert_input(self.batch)
                contexts.insert(0, self.plugin.forward_context())
            else:
                batch = cast_castable(self.batch, torch.float32)
                scale = _DEFAULT_SCALE if half == torch.float16 else 1.0
                # The half weights of the run may be their own copies, without an error.
                undo.enter_context(fp32_weights(self.module.modules(), unrounded=True))
                self._use_copies(half, undo)
            self._apply(remedy, undo)
            return self._run(batch, contexts, self._recompute_context(policy), scale, records)

    def _use_copies(self, half: torch.dtype, undo: ExitStack) -> None:
        """Let modules compute with half copies of fp32 weights, as a `BalancedAMP` does."""
        copies = WorkingCopies(half)
        undo.callback(copies.release)
        if self.weights == "half":
            names = self.plugin.fp32_modules if isinstance(self.plugin, BalancedAMP) else ["norm"]
            copies.attach(self.module, select_modules(self.module, names, strict=False).values())

    def _apply(self, remedy: Remedy, undo: ExitStack) -> None:
        """Let the modules of a remedy compute in fp32, and clamp their outputs."""
        modules = [self.module.get_submodule(path) for path in remedy.fp32_modules]
        if remedy.inf_clamp:
            clamp = InfClamp([as_written(name) for name in remedy.inf_clamp])
            undo.callback(clamp.attach(self.module).remove)
        # Together, because modules may share weights.
        undo.enter_context(fp32_weights([m for each in modules for m in each.modules()]))
        if self.is_true_half and remedy.half is None:
            cast_at_borders(modules, torch.float32, self.half, undo)
        compute_in_fp32(modules, undo)

    def rounding_ops(self) -> dict[str, tuple[str, ...]]:
        """Return the ops that round in half precision and that `fp32_ops` can move, with callers.

        Empty if the plugin computes on half weights, for which it has no op policy, or if the run
        fails.
        """
        if self.is_true_half:
            return {}
        ops = RoundingOps(self.half, self._device_type, self.named_modules())
        batch, contexts = (
            self.plugin.convert_input(self.batch),
            [self.plugin.forward_context(), ops],
        )
        with suppress(RuntimeError):
            self._run(batch, contexts, self._recompute_context(), self.scale, False)
            return ops.callers
        return {}

    def _policy(self, remedy: Remedy) -> OpPolicy | None:
        """Return the op policy of a remedy in place of the plugin's, `None` for the plugin's."""
        policy = getattr(self.plugin, "policy", OpPolicy())
        if not remedy.fp32_ops:
            # Any setting replaces a plugin of Lightning by a `BalancedAMP`.
            is_kept = remedy.half is None and isinstance(self.plugin, ScaledPrecision)
            return None if is_kept or remedy == _NOTHING else policy
        half_ops = [op for op in policy.half_ops if op not in remedy.fp32_ops]
        return replace(policy, fp32_ops=(*policy.fp32_ops, *remedy.fp32_ops), half_ops=half_ops)

    def alone(
        self, path: str, call: ModuleCall, cotangent: Tensor | None, *, half: bool
    ) -> list[Tensor]:
        """Run one module alone; return its output, and gradients for inputs and parameters."""
        module = self.module.get_submodule(path)
        weights = nullcontext() if half else fp32_weights(module.modules())
        context = self.plugin.forward_context() if half else nullcontext()
        inputs: list[Tensor] = []

        def enter(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor.detach().clone()
            value = tensor.detach() if half else tensor.detach().float()
            inputs.append(value.clone().requires_grad_())
            return inputs[-1]

        with weights, _NoDropout(), torch.enable_grad():
            self._rng.restore()
            args, kwargs = map_tensors((call.args, call.kwargs), enter)
            with context:
                output = first_tensor(module(*args, **kwargs))
            trained = [*inputs, *(p for p in module.parameters() if p.requires_grad)]
            found: Sequence[Tensor | None] = ()
            if cotangent is not None and output is not None and output.requires_grad and trained:
                with self._recompute_context() if half else nullcontext():
                    found = _input_gradients(output, trained, cotangent.to(output.dtype))
        tensors = [output, *found]
        return [torch.empty(0) if x is None else x.detach().float() for x in tensors]

    def _recompute_context(self, policy: OpPolicy | None = None) -> AbstractContextManager[Any]:
        """Return the context of a backward, in which checkpoints recompute their forward."""
        if policy is not None:
            return policy.recompute_context(self._device_type)
        if isinstance(self.plugin, ScaledPrecision):
            return self.plugin._recompute_context()
        return nullcontext()

    def _run(
        self,
        batch: Any,
        contexts: Iterable[AbstractContextManager[Any]],  # of the forward
        recompute: AbstractContextManager[Any],  # of the backward
        scale: float,
        records: bool,
    ) -> Run:
        calls: dict[str, ModuleCall] = {}
        cotangents: dict[str, Tensor] = {}
        self._rng.restore()
        with ExitStack() as stack:
            if records:
                for path, module in self.named_modules():
                    hook = _recording(path, calls, cotangents)
                    stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            stack.enter_context(_NoDropout())
            stack.enter_context(torch.enable_grad())
            loop: Any = self.trainer.fit_loop.epoch_loop
            kwargs = loop._build_kwargs(OrderedDict(), copy_containers(batch), self._batch_idx)
            with ExitStack() as forward:
                for context in contexts:
                    forward.enter_context(context)
                loss = loss_in(self.module.training_step(*kwargs.values()))
            if loss is None:
                raise ValueError(usage("preflight_no_loss"))
            named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
            with recompute:
                scaled = loss.float() * scale
                found = _input_gradients(scaled, [*named.values()], torch.ones_like(scaled))
        gradients = {
            name: g.detach().float() / scale
            for name, g in zip(named, found, strict=True)
            if g is not None
        }
        return Run(float(loss.detach()), gradients, calls, cotangents)


def _recording(
    path: str, calls: dict[str, ModuleCall], cotangents: dict[str, Tensor]
) -> Callable[..., None]:
    hooked: set[str] = set()

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is None:
            return
        if path not in calls:
            detached = map_tensors((args, kwargs), torch.Tensor.detach)
            # The call may have modified other objects, such as caches of keys and values.
            given = tuple(v if _is_plain_data(v) else None for v in detached[0])
            named = {k: v if _is_plain_data(v) else None for k, v in detached[1].items()}
            calls[path] = ModuleCall(given, named, tensor.detach())
        # The first call in a reentrant checkpoint has no graph; its repetition in the backward has.
        if tensor.requires_grad and path not in hooked and tensor.shape == calls[path].output.shape:
            hooked.add(path)
            tensor.register_hook(lambda g: cotangents.setdefault(path, g.detach()))

    return hook


def _input_gradients(
    output: Tensor, inputs: Sequence[Tensor], cotangent: Tensor
) -> Sequence[Tensor | None]:
    """Return gradients without changing `.grad`, also through reentrant checkpoints."""
    is_reentrant = explore_graph([output], 0).is_reentrant
    found = grad_without_side_effects(
        [output], [cotangent], inputs, is_full=is_reentrant, retain_graph=False
    )
    return [g if g is None or not g.is_sparse else g.to_dense() for g in found]


def _is_plain_data(value: Any) -> bool:
    if isinstance(value, (tuple, list, Mapping)):
        opened = open_container(value)
        return opened is not None and all(map(_is_plain_data, opened.items))
    return value is None or isinstance(value, (Tensor, bool, int, float, str, torch.dtype))


def first_tensor(value: Any) -> Tensor | None:
    return next((tensor for tensor in tensors_in(value) if tensor.is_floating_point()), None)


@contextmanager
def fp32_weights(modules: Iterable[nn.Module], *, unrounded: bool = False) -> Iterator[None]:
    """Give modules fp32 weights and buffers of the same values, and no casts at their borders.

    `unrounded` replaces the values by some that round to them, for models that begin in fp32.
    """
    wide: dict[int, Tensor] = {}  # by the id of a weight, which modules may share
    with ExitStack() as undo:
        for module in modules:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                undo.callback(hooks.update, dict(hooks))  # in their order
                undo.callback(hooks.clear)
                for key in [k for k, hook in hooks.items() if is_border_cast(hook)]:
                    del hooks[key]
            entries: Any
            for entries in (module._parameters, module._buffers):
                for name, tensor in entries.items():
                    if tensor is not None and tensor.dtype in HALF_DTYPES:
                        # Not by `tensor.data`: another dtype would discard the hooks of DDP.
                        undo.callback(entries.__setitem__, name, tensor)
                        if id(tensor) not in wide:
                            wide[id(tensor)] = _in_fp32(tensor, unrounded)
                        entries[name] = wide[id(tensor)]
        yield


def _in_fp32(tensor: Tensor, unrounded: bool) -> Tensor:
    exact = tensor.detach().float()
    if not isinstance(tensor, nn.Parameter):
        return exact
    if unrounded:
        generator = torch.Generator(tensor.device).manual_seed(0)
        noise = torch.empty_like(exact).uniform_(-0.5, 0.5, generator=generator)
        exact += noise * ulps(tensor)
    return nn.Parameter(exact, tensor.requires_grad)


class _NoDropout(TorchFunctionMode):
    """Disables dropout, because its masks differ between dtypes, which would look like errors."""

    def __init__(self) -> None:
        super().__init__()
        follow_changes_of_torch()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name and name != "native_dropout":  # it returns its mask, too
            return args[0] if args else kwargs["input"]
        opened = opened_composites().get(func)
        if opened is not None and all(kind in (Tensor, nn.Parameter) for kind in types):
            with self:  # composites may call dropout, and a backward may repeat a checkpoint
                return opened(*args, **kwargs)
        if func is functional.scaled_dot_product_attention and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif func is functional.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)
