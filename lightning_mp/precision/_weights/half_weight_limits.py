"""What cannot work on half weights: refused, or warned of, before training starts."""

from collections.abc import Iterable, Iterator
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import ModelPruning
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

__all__ = ["check_callbacks", "check_lazy", "check_modules", "check_optimizer"]

# `WeightAveraging` came with Lightning 2.6.
_AVERAGES = tuple(
    getattr(lightning_callbacks, name)
    for name in ("StochasticWeightAveraging", "WeightAveraging")
    if hasattr(lightning_callbacks, name)
)


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that steps another one, such as Lookahead or ZeroRedundancyOptimizer."""
    # When fp32 stand-ins take the place of half weights in the groups of the outer one, the inner
    # one would go on with half weights, and its state would stay behind.
    for name, value in vars(optimizer).items():
        inner = next(_optimizers_in(value), None)
        if inner is not None:
            kind = type(optimizer).__name__
            raise MisconfigurationException(
                f"Passed the optimizer `{kind}` with `PureFP16`. It steps an inner "
                f"`{type(inner).__name__}` (`{kind}.{name}`), which cannot step half weights in "
                "fp32. Use `BalancedAMP`, whose parameters are fp32, or the inner optimizer alone."
            )


def _optimizers_in(value: Any) -> Iterator[Optimizer]:
    values = value.values() if isinstance(value, dict) else value
    for each in values if isinstance(value, dict | list | tuple) else [value]:
        if isinstance(each, Optimizer):
            yield each


def check_modules(module: nn.Module, keep_fp32: Iterable[nn.Module]) -> None:
    """Refuse averages of weights inside a model that would be half, and pruned modules."""
    kept = set(keep_fp32)
    for path, each in module.named_modules():
        if isinstance(each, AveragedModel) and each not in kept:
            raise MisconfigurationException(
                f"Passed a model to `PureFP16` whose `{path}` is an `AveragedModel`: in half, an "
                "average stands still where it should move by less than 2^-12 of itself. Use "
                "`BalancedAMP`, whose parameters are fp32."
            )
        if any(isinstance(h, BasePruningMethod) for h in each._forward_pre_hooks.values()):
            raise MisconfigurationException(
                f"Passed a model to `PureFP16` whose `{path}` is pruned by `torch.nn.utils.prune`, "
                "which makes its weight anew in every forward. Use `BalancedAMP`, or make the "
                "pruning permanent with `prune.remove` first."
            )


def check_lazy(module: nn.Module) -> None:
    """Refuse weights that only the first batch makes."""
    for path, each in module.named_modules():
        if any(is_lazy(parameter) for parameter in each.parameters(recurse=False)):
            raise MisconfigurationException(
                f"Passed a model to `PureFP16` whose `{path}` is lazy: it has no weights yet that "
                "could be half. Run the model on one batch first, or use `BalancedAMP`, which "
                "takes it as it is."
            )


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Refuse pruning while training, and warn of averages that are made of half weights."""
    for each in callbacks:
        name = type(each).__name__
        if isinstance(each, ModelPruning):
            raise MisconfigurationException(
                f"Passed the callback `{name}` with `PureFP16`. It replaces weights while they "
                "train, and their fp32 values with them. Use `BalancedAMP`."
            )
        if isinstance(each, _AVERAGES):
            rank_zero_warn(
                f"`{name}` averages half weights under `PureFP16`, and its average is rounded to "
                "half when it is put into the model. Use `BalancedAMP` for averages in fp32."
            )
