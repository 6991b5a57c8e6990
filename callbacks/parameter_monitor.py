"""`ParameterMonitor`: warns of parameters that do not train, and of weights that explode."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.callbacks._rules.parameters import ParameterNumbers, ParameterRule
from lightning_mp.callbacks._rules.records import Sample, Verdict
from lightning_mp.callbacks._step.sampling import SamplingMonitor
from lightning_mp.callbacks._step.training_state import TrainingStep, norms_of
from lightning_mp.numerics.async_readback import send
from lightning_mp.numerics.tensor_stats import local_shard, stored_values
from lightning_mp.precision._weights.ledger import parameters_of

__all__ = ["ParameterMonitor"]

_WATCHED = 1024  # most values of a parameter that are compared with those of the last sample
# Columns of a sample. The last two are flags, set if any rank sets them; others add up over shards.
_NUMEL, _SQUARES, _CHANGED, _GRADIENT, _HAS, _HAD = range(6)


@explains_arguments(
    checks={
        "patience": "[1, inf)",
        "max_untrained": "[0, 1]",
        "min_gradient min_weight": "[0, 1)",
        "max_weight": "(1, inf]",
    }
)
class ParameterMonitor(SamplingMonitor):
    """Warns of parameters that do not train, and of weights that vanish or explode.

    With a `.detach()` in the wrong place, an optimizer for the parameters of a copied model, or a
    learning rate of 0, the loss stays finite and may even fall. Rules:
    docs/callbacks/parameter-monitor.md.

    Example: `Trainer(callbacks=ParameterMonitor())`

    Args:
        patience: Number of steps without a gradient, or without a change, after which a parameter
            counts as untrained.
        max_untrained: Largest share of an optimizer's values that may be untrained.
        min_gradient: Smallest ratio between the relative gradient of a matrix (the norm of its
            gradient over the norm of its weights) and the largest relative gradient of all
            matrices. Warns after five samples in a row below this.
        min_weight: Smallest ratio between the RMS of a matrix and its highest RMS so far.
        max_weight: Largest ratio between the RMS of a matrix and its first RMS, if the RMS is
            above 1.
        every_n_steps: Steps between two samples; a fifth of it for the first samples.
        baseline_samples: Number of first samples.
        repeat_after_steps: Steps until the same alarm may be raised again.

    Raises:
        ValueError: An argument is out of range.
    """

    keeps = ("samples", "_frozen")
    _known: WeakIdKeyDictionary  # parameters of optimizers so far; it cannot be pickled for spawn

    def __init__(
        self,
        *,
        patience: int = 50,
        max_untrained: float = 0.25,
        min_gradient: float = 1e-8,
        min_weight: float = 0.01,
        max_weight: float = 30.0,
        every_n_steps: int = 50,
        baseline_samples: int = 10,
        repeat_after_steps: int = 1000,
    ) -> None:
        super().__init__(every_n_steps, baseline_samples, repeat_after_steps)
        limits: dict[str, Any] = {
            "patience": patience,
            "max_untrained": max_untrained,
            "min_gradient": min_gradient,
            "min_weight": min_weight,
            "max_weight": max_weight,
        }
        # `state_key` reads the arguments from attributes of their names.
        vars(self).update(limits)
        self._rule = ParameterRule(**limits)
        self._waiting: dict[int, nn.Parameter] = {}  # parameters without a gradient so far
        self._before: dict[Optimizer, tuple[int, Tensor]] = {}  # completed steps, and values then
        self._frozen: list[str] = []  # frozen parameters that a note has counted

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._waiting.clear()
        self._known = WeakIdKeyDictionary()
        self._before.clear()

    @override
    def observe(self, step: TrainingStep) -> Tensor | None:
        held = [*parameters_of(step.optimizer)] if self.is_due(step.facts.step) else []
        new = [p for p in held if p not in self._known]  # parameters may join at any time
        self._known.update(dict.fromkeys(new))
        self._waiting |= {id(p): p for p in new}
        for key in [key for key, p in self._waiting.items() if p.grad is not None]:
            del self._waiting[key]
        parameters = [p for p in held if p.requires_grad]
        if not parameters:
            return None
        shards = [local_shard(p.detach()) for p in parameters]
        device = shards[0].device
        has = [p.grad is not None for p in parameters]
        given = [p.grad if p.grad is not None else p.detach().new_zeros(1) for p in parameters]
        known = [
            [float(shard.numel()) for shard in shards],
            [float(each) for each in has],
            [float(id(p) not in self._waiting) for p in parameters],
        ]
        numels, has_now, had = send(torch.tensor(known), device)
        gradients = norms_of(given).to(device, non_blocking=True) * step.found.unscale
        weights = norms_of(shards).to(device, non_blocking=True)
        columns = [numels, weights**2, self._changes(step, shards), gradients**2, has_now, had]
        rate_of = {id(p): g.get("lr") for g in step.optimizer.param_groups for p in g["params"]}
        return step.gather(
            torch.stack(columns, dim=1),
            shards_only=True,
            names=[step.names.get(id(p), "") for p in parameters],
            is_matrix=[p.ndim >= 2 for p in parameters],
            # `AdamStateMonitor` watches the stagnation of half-precision weights.
            is_wide=[p.dtype.itemsize > 2 for p in parameters],
            rates=[rate_of[id(p)] for p in parameters],
            spare=_spare(step),
            # Number of values of each frozen parameter.
            frozen={step.names.get(id(p), ""): p.numel() for p in held if not p.requires_grad},
        )

    def _changes(self, step: TrainingStep, shards: list[Tensor]) -> Tensor:
        """Return the number of changed values of each parameter; NaN if unknown."""
        device = shards[0].device
        # Evenly spaced, because the first rows of an embedding may belong to tokens without use.
        flat = [stored_values(shard).reshape(-1) for shard in shards]
        chosen = [values[:: -(-len(values) // _WATCHED) or 1] for values in flat]
        watched = [values.to(device, non_blocking=True) for values in chosen]
        values = pad_sequence(watched, batch_first=True)
        count, before = self._before.get(step.optimizer, (0, values[:0]))
        self._before[step.optimizer] = step.facts.global_step, values
        if before.shape != values.shape or step.facts.global_step == count:
            return values.new_full((len(shards),), torch.nan, dtype=torch.float32)
        return (values != before).sum(dim=1).float()

    @override
    def judge(self, sample: Sample) -> list[Verdict]:
        facts, context = sample.facts, sample.context
        sums_NK, any_NK = sample.array.sum(axis=0), sample.array.max(axis=0)
        parameters = [
            ParameterNumbers(
                name=name or f"unnamed parameter {at}",
                numel=int(sums_NK[at, _NUMEL]),
                weight_norm=float(np.sqrt(sums_NK[at, _SQUARES])),
                gradient_norm=float(np.sqrt(sums_NK[at, _GRADIENT])),
                has_gradient=bool(any_NK[at, _HAS] > 0),
                had_gradient=bool(any_NK[at, _HAD] > 0),
                is_changed=None
                if np.isnan(sums_NK[at, _CHANGED]) or not context["is_wide"][at]
                else bool(sums_NK[at, _CHANGED] > 0),
                is_matrix=context["is_matrix"][at],
                rate=context["rates"][at],
            )
            for at, name in enumerate(context["names"])
        ]
        pairs = list(zip(parameters, context["names"], strict=True))
        named = [p for p, name in pairs if name]
        # A layer that was replaced leaves its parameters in the optimizer, without gradients.
        held = [p for p, name in pairs if name or p.has_gradient]
        numels = np.maximum(sums_NK[:, _NUMEL], 1)
        trained = (numels * (sums_NK[:, _GRADIENT] > 0)).sum() / numels.sum()
        rms = np.sqrt(sums_NK[:, _SQUARES].sum() / numels.sum())
        self.record({"trained_share": float(trained), "weight_rms": float(rms)}, facts)
        self.history.add_column("weight_rms", facts.step, {p.name: p.rms for p in held})
        verdicts, frozen = list[Verdict](), context["frozen"]
        if frozen.keys() - self._frozen:
            self._frozen = sorted(frozen.keys() | self._frozen)
            share = sum(frozen.values()) / (sum(frozen.values()) + numels.sum())
            note = Verdict("frozen_weights", share, None, "info", next(iter(frozen)))
            verdicts.append(note.given(count=len(frozen)))
        spare, strange = context["spare"], len(parameters) - len(named)
        # Tensors that do not belong to the model raise no other alarm: they have one cause.
        verdicts += self._rule.judge(facts.step, named if spare else held)
        if spare and facts.step >= self._rule.patience:
            tags = ("strange",) if strange else ()
            found = Verdict("not_optimized", len(spare), 0, tensor=spare[0], tags=tags)
            verdicts.append(found.given(strange=strange, count=len(spare)))
        return verdicts


def _spare(step: TrainingStep) -> list[str]:
    """Return the names of trainable parameters with a gradient that no optimizer steps."""
    held = {id(p) for each in step.trainer.optimizers for p in parameters_of(each)}
    # Known by name: a gathered weight of a sharded model is another tensor than its shard.
    own = [p for p in step.trainer.lightning_module.parameters() if id(p) in step.names]
    free = [p for p in own if p.requires_grad and p.grad is not None and id(p) not in held]
    return [step.names[id(p)] for p in free]
