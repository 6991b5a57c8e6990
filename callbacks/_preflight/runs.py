"""Runs of one training step in fp32 and in half, from the same weights, generators and rows."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_mp._nested import map_tensors, open_container, tensors_in
from lightning_mp.callbacks._step.batches import copy_containers, loss_in
from lightning_mp.callbacks._step.training_state import loss_scale_of
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.numerics.floats import HALF_DTYPES
from lightning_mp.numerics.replay_state import RngState
from lightning_mp.precision._scaling.scaled_precision import ScaledPrecision
from lightning_mp.precision._weights.half_module import cast_floats, replace_forward

__all__ = ["ModuleCall", "Run", "Runs", "first_tensor"]


class ModuleCall(NamedTuple):
    """The first call of a module in a run.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        output: Its first floating-point tensor.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor

    def rounded_like(self, other: "ModuleCall") -> "ModuleCall":
        """Return the call with inputs in the dtypes of another, at most as large as these reach."""
        left = iter([x.dtype for x in tensors_in((other.args, other.kwargs))])

        def rounded(tensor: Tensor) -> Tensor:
            dtype = next(left, tensor.dtype)
            if not tensor.is_floating_point() or not dtype.is_floating_point:
                return tensor
            most = torch.finfo(dtype).max  # more is the doing of the module before
            return tensor.clamp(-most, most).to(dtype)

        args, kwargs = map_tensors((self.args, self.kwargs), rounded)
        return self._replace(args=args, kwargs=kwargs)


class Run(NamedTuple):
    """What a run of a training step gave.

    Args:
        loss: Unscaled.
        gradients: Unscaled gradients of the trained parameters, by name, in fp32.
        calls: The first call of each module, by path, where they were asked for.
        cotangents: Scaled gradients of the outputs of these calls.
    """

    loss: float
    gradients: dict[str, Tensor]
    calls: dict[str, ModuleCall]
    cotangents: dict[str, Tensor]


class Runs:
    """Makes runs of the training step of a Trainer.

    Args:
        trainer: Of the run.
        batch: As `training_step` gets it.
        batch_idx: Its index in the epoch.
    """

    def __init__(self, trainer: pl.Trainer, batch: Any, batch_idx: int) -> None:
        self.trainer, self.module = trainer, trainer.lightning_module
        self.batch = map_tensors(copy_containers(batch), self._on_device)
        self._batch_idx = batch_idx
        self._rng = RngState(trainer.strategy.root_device, self.module)
        self.plugin = trainer.precision_plugin
        self.is_true_half = any(p.dtype in HALF_DTYPES for p in self.module.parameters())
        self.half = self._half()
        self.scale = float(loss_scale_of(trainer) or 1.0)
        """The loss scale that the run has now."""

    def _half(self) -> torch.dtype | None:
        if isinstance(self.plugin, ScaledPrecision):
            return self.plugin.half_dtype
        if "bf16" in str(self.plugin.precision):
            return torch.bfloat16
        return torch.float16 if "16" in str(self.plugin.precision) else None

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.trainer.strategy.root_device)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules inside the model."""
        return ((path, each) for path, each in self.module.named_modules() if path)

    def is_most(self, path: str) -> bool:
        """Return whether a module has more than half of the model's parameters."""
        whole, part = self.module, self.module.get_submodule(path)
        count = sum(p.numel() for p in part.parameters())
        return 2 * count > sum(p.numel() for p in whole.parameters())

    def size(self, path: str) -> int:
        """Return how many modules are inside of one, itself included."""
        return sum(1 for _ in self.module.get_submodule(path).modules())

    def in_fp32(self, batch: Any = None, *, records: bool = False) -> Run:
        """Run in fp32, outside of the plugin's context, with weights of the same values."""
        with fp32_weights(self.module.modules()):
            batch = self.batch if batch is None else batch
            return self._run(cast_floats(batch, torch.float32), nullcontext(), 1.0, records)

    def in_half(
        self,
        fp32_modules: Sequence[str] = (),
        *,
        records: bool = False,
        scale: float | None = None,
    ) -> Run:
        """Run as the plugin does, but for some modules, which compute in fp32."""
        batch = self.plugin.convert_input(self.batch)
        scale = self.scale if scale is None else scale
        return self._run(batch, self._in_half_but(fp32_modules), scale, records, True)

    def in_autocast(self, half: torch.dtype) -> Run:
        """Run under autocast to another dtype, with weights in fp32."""
        device = self.trainer.strategy.root_device.type
        with fp32_weights(self.module.modules()):
            return self._run(self.batch, torch.autocast(device, dtype=half), 1.0, False)

    @contextmanager
    def _in_half_but(self, paths: Sequence[str]) -> Iterator[None]:
        """Compute as the plugin does, and some modules in fp32."""
        modules = [self.module.get_submodule(path) for path in paths]
        leaves_as = self.half if self.is_true_half else None

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(self.trainer.strategy.root_device.type, enabled=False):
                args, kwargs = cast_floats((args, kwargs), torch.float32)
                output = type(module).forward(module, *args, **kwargs)
            return output if leaves_as is None else cast_floats(output, leaves_as)

        with self.plugin.forward_context(), ExitStack() as undo:
            for module in modules:
                undo.enter_context(fp32_weights(module.modules()))
                replace_forward(module, forward, undo)
            yield

    def alone(
        self, path: str, call: ModuleCall, cotangent: Tensor | None, *, half: bool
    ) -> list[Tensor]:
        """Run one module by itself; return its output, and gradients for inputs and parameters."""
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
                with self._recompute_context(half):
                    found = torch.autograd.grad(
                        output, trained, cotangent.to(output.dtype), allow_unused=True
                    )
        tensors = [output, *found]
        return [torch.empty(0) if x is None else x.detach().float() for x in tensors]

    def _recompute_context(self, half: bool) -> AbstractContextManager[Any]:
        """Return the context of a backward, in which checkpoints run their forward again."""
        if half and isinstance(self.plugin, ScaledPrecision):
            return self.plugin._recompute_context()
        return nullcontext()

    def _run(
        self, batch: Any, context: Any, scale: float, records: bool, half: bool = False
    ) -> Run:
        calls: dict[str, ModuleCall] = {}
        cotangents: dict[str, Tensor] = {}
        self._rng.restore()
        named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        with ExitStack() as stack:
            if records:
                for path, module in self.named_modules():
                    hook = _recording(path, calls, cotangents)
                    stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            stack.enter_context(_NoDropout())
            stack.enter_context(torch.enable_grad())
            loop: Any = self.trainer.fit_loop.epoch_loop
            kwargs = loop._build_kwargs(OrderedDict(), copy_containers(batch), self._batch_idx)
            with context:
                loss = loss_in(self.module.training_step(*kwargs.values()))
            if loss is None:
                raise ValueError(usage("preflight_no_loss"))
            with self._recompute_context(half):
                found = torch.autograd.grad(
                    loss.float() * scale, [*named.values()], allow_unused=True
                )
        gradients = {
            name: g.detach().float() / scale
            for name, g in zip(named, found, strict=True)
            if g is not None
        }
        return Run(float(loss.detach()), gradients, calls, cotangents)


def _recording(
    path: str, calls: dict[str, ModuleCall], cotangents: dict[str, Tensor]
) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if path in calls or tensor is None:
            return
        detached = map_tensors((args, kwargs), torch.Tensor.detach)
        # Objects that a call writes to, such as caches of keys and values, are not what they were.
        given = tuple(v if _is_plain(v) else None for v in detached[0])
        named = {k: v if _is_plain(v) else None for k, v in detached[1].items()}
        calls[path] = ModuleCall(given, named, tensor.detach())
        if tensor.requires_grad:
            tensor.register_hook(lambda g: cotangents.setdefault(path, g.detach()))

    return hook


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list, Mapping)):
        opened = open_container(value)
        return opened is not None and all(map(_is_plain, opened.items))
    return value is None or isinstance(value, (Tensor, bool, int, float, str, torch.dtype))


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor of an output."""
    return next((tensor for tensor in tensors_in(value) if tensor.is_floating_point()), None)


@contextmanager
def fp32_weights(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give half parameters and buffers of modules the same values in fp32, for a while."""
    with ExitStack() as undo:
        for module in modules:
            tensors: Mapping[str, Tensor | None] = {**module._parameters, **module._buffers}
            for tensor in tensors.values():
                if tensor is not None and tensor.dtype in HALF_DTYPES:
                    undo.callback(setattr, tensor, "data", tensor.data)
                    tensor.data = tensor.data.float()
        yield


class _NoDropout(TorchFunctionMode):
    """Leaves dropout out: its masks follow the dtype, and would look like errors of half."""

    _DROPS = (functional.dropout, torch.dropout, functional.dropout1d, functional.dropout2d)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._DROPS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention and (
            "dropout_p" in kwargs or len(args) > 4
        ):
            args, kwargs = (*args[:4], 0.0, *args[5:])[: len(args)], kwargs | {"dropout_p": 0.0}
            kwargs = {k: v for k, v in kwargs.items() if k != "dropout_p" or len(args) < 5}
        return func(*args, **kwargs)
