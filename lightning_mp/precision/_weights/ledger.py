"""The ledger of parameters, their optimizers and threads, and the checks of precision plugins.

Checks run when any optimizer steps, when a training or evaluation step starts, and when a module is
called.
"""

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import ModelPruning
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn

from lightning_mp.optim.adam_epsilon import guard_adam_epsilon

__all__ = [
    "Entry",
    "Ledger",
    "ModuleUsers",
    "check_callbacks",
    "check_modules",
    "check_optimizer",
    "check_steps_alone",
    "is_autograd_thread",
    "parameters_of",
    "stamp_of",
]

# `WeightAveraging` came with Lightning 2.6.
_AVERAGES = (
    lightning_callbacks.StochasticWeightAveraging,
    getattr(lightning_callbacks, "WeightAveraging", ()),
)


class Entry:
    """The original dtype of a parameter, its half copy or residual, and the last known write."""

    __slots__ = ("beside", "came_as", "device_type", "owner", "stamp")

    def __init__(self, parameter: nn.Parameter, forget: Callable[[Any], object]) -> None:
        self.owner = weakref.ref(parameter, forget)
        self.came_as = parameter.dtype
        self.device_type = parameter.device.type
        self.beside: Any = None  # the half copy of an fp32 weight, or the residual of a half weight
        # Version and address of the parameter when the plugin last wrote or read it, or `None`.
        self.stamp: tuple[int, int] | None = None

    def is_current(self, parameter: nn.Parameter) -> bool:
        """Return whether the version and address of the parameter are unchanged since `note`."""
        return self.stamp == stamp_of(parameter)

    def note(self, parameter: nn.Parameter) -> None:
        """Record the current version and address of the parameter."""
        self.stamp = stamp_of(parameter)


def stamp_of(parameter: Tensor) -> tuple[int, int]:
    """Return the version and address of a parameter, which most writes change."""
    return parameter._version, parameter.data_ptr()


class Ledger:
    """Knows for each parameter its half copy or residual, its last write and its optimizer."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.optimizers: list[Optimizer] = []  # returned by `configure_optimizers`
        self.stepping: Optimizer | None = None  # the optimizer that the plugin steps now
        self.is_changed = True  # modules or parameters may have been replaced
        self.root: nn.Module | None = None
        self._is_refused = False  # whether a second Trainer was refused, and has not ended yet
        self._names: dict[int, str] = {}
        self._modules: list[nn.Module] = []  # of the model, in the last look

    def __reduce__(self) -> tuple[Any, ...]:
        return Ledger, ()  # the copy of a plugin, also in another process, serves its own runs

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self.entries

    def __iter__(self) -> Iterator[tuple[nn.Parameter, Entry]]:
        for entry in list(self.entries.values()):
            parameter = entry.owner()
            if parameter is not None:
                yield parameter, entry

    def open(self, parameter: nn.Parameter) -> Entry:
        """Return the entry of a parameter, created if needed."""
        key = id(parameter)
        if key not in self.entries:
            self.entries[key] = Entry(parameter, lambda _: self.entries.pop(key, None))
        return self.entries[key]

    def watch(
        self, plugin: Any, root: nn.Module, optimizers: list[Optimizer], undo: contextlib.ExitStack
    ) -> None:
        """Watch a model, and the steps of optimizers that the plugin does not run."""
        self.root, self.optimizers = root, list(optimizers)
        self._names = _names_of(root)
        undo.callback(self._forget)

        def before(optimizer: Optimizer, *_: object) -> None:
            if optimizer is not self.stepping:
                check_step(plugin, optimizer)

        def after(optimizer: Optimizer, *_: object) -> None:
            if optimizer is not self.stepping:
                plugin.after_step(optimizer)

        def changed(*_: object) -> None:
            self.is_changed = True

        for handle in (
            torch_optimizer.register_optimizer_step_pre_hook(before),
            torch_optimizer.register_optimizer_step_post_hook(after),
            # These are called for all modules, and only trigger `look_for_replaced`.
            torch_module.register_module_parameter_registration_hook(changed),
            torch_module.register_module_module_registration_hook(changed),
        ):
            undo.callback(handle.remove)

    def check_unused(self, plugin: str) -> None:
        """Raise if a run is in progress; the end of a second one would undo its preparation."""
        if self.root is not None:
            self._is_refused = True
            raise MisconfigurationException(
                f"Passed one `{plugin}` to two Trainers, and the run of the first has not ended. A "
                f"plugin serves one run at a time. Pass another `{plugin}` to the second Trainer."
            )

    def ends_refused(self) -> bool:
        """Return whether the Trainer that ends is one that `check_unused` has refused."""
        is_refused, self._is_refused = self._is_refused, False
        return is_refused

    def follow(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Replace the optimizers of the run; return those that are new."""
        known, self.optimizers = self.optimizers, list(optimizers)
        return [each for each in optimizers if each not in known]

    def guard_epsilon(self, plugin: Any, optimizer: Optimizer, undo: contextlib.ExitStack) -> None:
        """Check or replace the epsilon of an optimizer, see `guard_adam_epsilon`."""
        options = {"ignore": plugin._half_weights, "name_of": self.name_of}
        try:
            handles = guard_adam_epsilon(optimizer, plugin.adam_epsilon, **options)
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error
        for handle in handles:
            undo.callback(handle.remove)

    def _forget(self) -> None:
        self.root, self.is_changed = None, True
        self.optimizers, self._names, self._modules = [], {}, []

    def name_of(self, parameter: Tensor) -> str:
        """Return the name of a parameter of the model."""
        return self._names.get(id(parameter), "an unnamed parameter")

    def names_of(self, module: nn.Module) -> list[str]:
        """Return the dotted path of a module of the model, or nothing."""
        modules = [] if self.root is None else self.root.named_modules()
        return [name for name, each in modules if each is module]

    def look_for_replaced(self) -> nn.Module | None:
        """Return the model if it may have new parameters; raise if an optimizer steps old ones."""
        is_changed, self.is_changed = self.is_changed, False
        if not is_changed or self.root is None:
            return None
        modules, now = list(self.root.modules()), _names_of(self.root)
        if (modules, now) == (self._modules, self._names):  # as after a slice of `nn.Sequential`
            return None
        stepped = {id(p): each for each in self.optimizers for p in parameters_of(each)}
        gone = {name: key for key, name in self._names.items() if key not in now}
        for key in (key for key in now if key not in self._names and key not in stepped):
            name = now[key]
            if name in gone and gone[name] in stepped:
                optimizer = type(stepped[gone[name]]).__name__
                raise RuntimeError(
                    f"The parameter {name!r} was replaced during training, but `{optimizer}` still "
                    "steps the old parameter, so the new parameter would not be trained. Copy into "
                    "the old parameter (`load_state_dict` without `assign=True`), or replace it in "
                    "`optimizer.param_groups`, too."
                )
        self._modules, self._names = modules, now
        return self.root


def _names_of(root: nn.Module) -> dict[int, str]:
    # By `id`, because tensors compare by value; without the names that FSDP inserts, and without
    # the half copies with which another thread computes.
    named = [(n, p) for n, p in root.named_parameters() if isinstance(p, nn.Parameter)]
    return {id(p): n.replace("_fsdp_wrapped_module.", "") for n, p in named}


def parameters_of(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the parameters of all groups of an optimizer, each once."""
    # torch only warns if a group holds a shared weight twice.
    yield from {id(p): p for group in optimizer.param_groups for p in group["params"]}.values()


class ModuleUsers:
    """Records which threads compute with a module; refuses threads that would lose gradients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Threads, and whether they replaced weights, in the order of entry.
        self._users: dict[nn.Module, list[tuple[int, bool]]] = {}

    def enter(self, modules: Sequence[nn.Module], swapping: Container[nn.Module]) -> None:
        """Record that this thread computes with modules; raise if another thread does, too."""
        thread = threading.get_ident()
        with self._lock:
            for module in modules:
                others = [swaps for other, swaps in self._users.get(module, ()) if other != thread]
                is_taken = any(others) or (bool(others) and module in swapping)
                if is_taken and not is_autograd_thread():
                    raise RuntimeError(
                        f"A `{type(module).__name__}` was called in the thread "
                        f"{threading.current_thread().name!r} while another thread computes with "
                        "it. `BalancedAMP` replaces the weights of a module by half copies during "
                        "its forward, for all threads, so gradients would be lost. Call the model "
                        "only in the training thread, give the other thread a `copy.deepcopy` of "
                        "it, or pass `BalancedAMP(weights='full')`."
                    )
            for module in modules:
                self._users.setdefault(module, []).append((thread, module in swapping))

    def leave(self, modules: Sequence[nn.Module], swapping: Container[nn.Module]) -> None:
        """Record that this thread leaves modules."""
        with self._lock:
            for module in modules:
                self._users[module].remove((threading.get_ident(), module in swapping))
                if not self._users[module]:  # otherwise copies of the model would never be freed
                    del self._users[module]


def is_autograd_thread() -> bool:
    """Return whether an autograd thread runs this, so that the thread of the backward waits."""
    # Such threads recompute forwards of activation checkpointing. Python did not start them.
    is_in_backward = torch._C._current_graph_task_id() != -1
    return is_in_backward and isinstance(threading.current_thread(), threading._DummyThread)


def check_step(plugin: Any, optimizer: Optimizer) -> None:
    """Raise if an optimizer steps scaled gradients or half weights without the plugin."""
    if plugin.misses_plugin(optimizer):
        raise RuntimeError(
            f"`{type(optimizer).__name__}.step()` was not called through "
            f"`{type(plugin).__name__}`, which divides gradients by the loss scale, skips steps "
            "with overflow, and steps half weights in fp32. Return the optimizer from "
            "`configure_optimizers`; in hooks and manual optimization, step an optimizer of "
            "`self.optimizers()`, without `use_pl_optimizer=False`. To step in a gradient hook "
            "during the backward, pass `BalancedAMP(half='bf16')`."
        )


# --- before training starts ----------------------------------------------------------------------


def check_optimizer(plugin: object, optimizer: Optimizer, *, runs_closures: bool) -> None:
    """Raise if an optimizer needs a closure but steps cannot run closures."""
    kind = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    # Methods of the common implementations of sharpness-aware minimization (SAM).
    is_sharpness_aware = all(hasattr(optimizer, name) for name in ("first_step", "second_step"))
    if (needs_closure or is_sharpness_aware) and not runs_closures:
        raise MisconfigurationException(
            f"Passed the optimizer `{kind}` with `{type(plugin).__name__}`. It evaluates the loss "
            "several times per step, but the plugin computes one gradient per step. Use a "
            "first-order optimizer, or `BalancedAMP(half='bf16')`."
        )


def check_steps_alone(optimizer: Optimizer) -> None:
    """Raise if an optimizer writes weights outside its step, or through an inner optimizer."""
    kind = type(optimizer).__name__
    if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        raise MisconfigurationException(
            f"Passed the optimizer `{kind}` with `PureFP16`. Its `train()` and `eval()` write "
            "weights outside of a step (as in ScheduleFree), where they are half. Use "
            "`BalancedAMP`, whose parameters are fp32."
        )
    # Stand-ins would replace half weights only in the groups and the state of the outer optimizer.
    for name, value in vars(optimizer).items():
        values = value.values() if isinstance(value, dict) else value
        for inner in values if isinstance(value, dict | list | tuple) else [value]:
            if isinstance(inner, Optimizer):
                raise MisconfigurationException(
                    f"Passed the optimizer `{kind}` with `PureFP16`. It steps an inner "
                    f"`{type(inner).__name__}` (`{kind}.{name}`), which cannot step half weights "
                    "in fp32. Use `BalancedAMP`, whose parameters are fp32, or the inner "
                    "optimizer alone."
                )


def check_modules(root: nn.Module, kept: Container[nn.Module], *, is_trained: bool) -> None:
    """Raise if a module cannot work with half weights."""
    for path, module in root.named_modules():
        reason = _reason_against(module, module in kept, is_trained)
        if reason:
            raise MisconfigurationException(
                f"Passed a model to `PureFP16` whose `{path}` {reason} Alternatively, use "
                "`BalancedAMP`, whose parameters are fp32."
            )


def _reason_against(module: nn.Module, is_kept: bool, is_trained: bool) -> str:
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        return "is lazy, so its weights cannot be converted yet. Run the model on one batch first."
    if isinstance(module, torch.jit.ScriptModule) and not is_kept:
        return (
            "is TorchScript, which has fixed dtypes. Pass the original module, or call it in a "
            "module that `fp32_modules` selects."
        )
    if isinstance(module, AveragedModel) and is_trained and not is_kept:
        return (
            "is an `AveragedModel`. In half precision, an average loses updates below 2^-12 of "
            "itself. Add `AveragedModel` to `fp32_modules`."
        )
    hooks = module._forward_pre_hooks.values()
    if is_trained and any(isinstance(hook, BasePruningMethod) for hook in hooks):
        return (
            "is pruned by `torch.nn.utils.prune`, which recomputes the weight in every forward. "
            "Make the pruning permanent by `prune.remove`."
        )
    return ""


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Raise for pruning during training, and warn about averages of half weights."""
    for each in callbacks:
        name = type(each).__name__
        if isinstance(each, ModelPruning):
            raise MisconfigurationException(
                f"Passed the callback `{name}` with `PureFP16`. It replaces weights during "
                "training, which loses their residuals. Use `BalancedAMP`."
            )
        if isinstance(each, _AVERAGES):
            rank_zero_warn(
                f"`{name}` averages half weights under `PureFP16`, and the average is rounded to "
                "half when it is copied into the model. Use `BalancedAMP` for fp32 averages."
            )
            average = getattr(each, "_average_model", None)
            if not isinstance(average, AveragedModel):
                continue
            if average.multi_avg_fn or not average.avg_fn:
                # torch groups the tensors of these averages, which requires one dtype.
                average_all = average.multi_avg_fn or get_swa_multi_avg_fn()
                average.avg_fn = functools.partial(_averaged, average_all)
                average.multi_avg_fn = None


def _averaged(average_all: Callable[..., Any], average: Tensor, weight: Tensor, n: Any) -> Tensor:
    average_all([average], [weight.to(average.dtype)], n)
    return average
