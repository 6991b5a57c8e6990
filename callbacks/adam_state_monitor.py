"""`AdamStateMonitor`: warns of Adam states that make the next update too large or too small."""

import math
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.callbacks._rules.adam import AdamNumbers, AdamStateRule
from lightning_mp.callbacks._rules.adam_statistics import (
    AdamField,
    adam_statistics,
    has_second_moments,
    quantized_states,
)
from lightning_mp.callbacks._rules.records import Sample, Verdict, first_of_each_kind
from lightning_mp.callbacks._step.sampling import SamplingMonitor
from lightning_mp.callbacks._step.training_state import TrainingStep, is_sharded, parameter_names
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.precision._choice.module_selection import as_written

__all__ = ["AdamStateMonitor"]


@explains_arguments(
    checks={
        "max_update_rms max_below_epsilon min_ratio max_ratio": "(0, inf]",
        "max_stagnant": "(0, 1]",
        "zero_run_steps": "[1, inf)",
    }
)
class AdamStateMonitor(SamplingMonitor):
    """Warns of Adam's second moments that decay, fall below epsilon, or make updates explode.

    After 5000 steps without a gradient, the same gradient makes an update 11 times as long. States
    are sampled right before a step. Rules: docs/callbacks/adam-state-monitor.md.

    Example: `Trainer(callbacks=AdamStateMonitor(every_n_steps=50))`

    Args:
        max_update_rms: Largest RMS of the gradient over the root of the second moment without a
            warning. The RMS must also exceed 1.5 times the highest of the first samples and 3 times
            the median of the newest 32. For a tensor of n values the limit is multiplied by
            1 + 10 / sqrt(n), because few values scatter more.
        max_below_epsilon: Largest excess over the baseline of the share of values with
            `sqrt(v_hat) < eps`. Epsilon sets the steps of such values, and Adam does not adapt
            them.
        zero_run_steps: Number of steps without a gradient after which a tensor that had gradients
            raises a warning.
        min_ratio: Smallest ratio of the norms of update and weights without a warning.
        max_ratio: Largest such ratio without a warning.
        max_stagnant: Largest share of fp16 or bf16 weights whose update may be below half a unit in
            the last place.
        every_n_steps: Steps between two samples; a fifth of it for the first samples.
        baseline_samples: Number of first samples that form the baseline.
        repeat_after_steps: Steps until the same alarm may be raised again.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        *,
        max_update_rms: float = 2.3,
        max_below_epsilon: float = 0.05,
        zero_run_steps: int = 500,
        min_ratio: float = 1e-8,
        max_ratio: float = 10.0,
        max_stagnant: float = 0.5,
        every_n_steps: int = 100,
        baseline_samples: int = 10,
        repeat_after_steps: int = 1000,
    ) -> None:
        super().__init__(every_n_steps, baseline_samples, repeat_after_steps)
        limits: dict[str, Any] = {
            "max_update_rms": max_update_rms,
            "max_below_epsilon": max_below_epsilon,
            "zero_run_steps": zero_run_steps,
            "min_ratio": min_ratio,
            "max_ratio": max_ratio,
            "max_stagnant": max_stagnant,
        }
        # `state_key` reads the arguments from attributes of their names.
        vars(self).update(limits)
        self._first: list[str] = []  # tensors that alarms name first
        self._unwatched: set[str] = set()  # classes of optimizers with a warning already
        self._rule = AdamStateRule(baseline_samples=baseline_samples, **limits)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        embeddings = [
            as_written(f"{path}.weight")
            for path, module in pl_module.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        ]
        # Shared weights have one name for all their places.
        names = list(dict.fromkeys(parameter_names(pl_module).values()))
        # In embeddings the RMS rises first, 1 to 8 steps before the loss (arXiv:2304.13013).
        self._first = [*embeddings, *names[:1], *names[-2:]]
        if not any(map(_groups_of_adam, trainer.optimizers)):
            rank_zero_warn(usage("no_adam"))

    @override
    def observe(self, step: TrainingStep) -> Tensor | None:
        # Every step is sampled until states exist, and after a high RMS.
        if not self.is_due(step.facts.step):
            return None
        optimizer, found = step.optimizer, step.found
        groups = _groups_of_adam(optimizer)
        group_of = {id(p): group for group in groups for p in group["params"]}
        chosen = [i for i, p in enumerate(found.parameters) if id(p) in group_of]
        if not is_sharded(step.trainer):
            # A rank may hold no shard of a parameter, but all ranks must send the same rows.
            chosen = [i for i in chosen if has_second_moments(optimizer, found.parameters[i])]
        name, states = type(optimizer).__name__, quantized_states(optimizer)
        if states and name not in self._unwatched:
            self._unwatched.add(name)
            rank_zero_warn(usage("quantized", states=", ".join(states), optimizer=name))
        if not chosen:
            if groups and not optimizer.state:  # no step has been made yet
                self._until = step.facts.step + 1
            return None
        keeps = getattr(step.trainer.precision_plugin, "write_back", "nearest") != "nearest"
        gradients = [found.gradients[i] for i in chosen]
        parameters = [found.parameters[i] for i in chosen]
        return step.gather(
            adam_statistics(optimizer, parameters, gradients, found.unscale, keeps_rounding=keeps),
            shards_only=True,
            names=[found.names[i] for i in chosen],
            settings=[_settings(group_of[id(p)]) for p in parameters],
        )

    @override
    def judge(self, sample: Sample) -> list[Verdict]:
        names, facts = sample.context["names"], sample.facts
        # Columns are sums, so that the shards of ranks add up to the whole.
        sums_NK = sample.array.sum(axis=0)
        sums_NK[:, AdamField.STEP] = sample.array[:, :, AdamField.STEP].max(axis=0)
        if not sums_NK[:, AdamField.STEP].any():  # no states yet, so sample the next step
            self._until = facts.step + 1
            return []
        rows = zip(names, sums_NK, sample.context["settings"], strict=True)
        tensors = [AdamNumbers(name, row, **settings) for name, row, settings in rows]
        self.history.add_column("update_rms", facts.step, {t.name: t.rms for t in tensors})
        ratios = {t.name: t.ratio for t in tensors}
        self.history.add_column("update_to_weight", facts.step, ratios)
        metrics = {
            "update_rms": max(t.rms for t in tensors),
            "below_epsilon_share": max(t.below_epsilon for t in tensors),
            "update_to_weight": max((t.ratio for t in tensors if t.ratio >= 0), default=np.nan),
        }
        self.record(metrics, facts)
        verdicts = self._rule.judge(
            facts,
            [t for t in tensors if t.is_judged],  # other monitors judge non-finite tensors
            self._first,
        )
        if self._rule.wants_more:
            self._rule.wants_more = False
            self.sample_again(facts.step)
        is_bad = sums_NK[:, AdamField.BAD_STATE] > 0
        if is_bad.any():
            # One alarm for all tensors: the largest names the place.
            largest = names[(sums_NK[:, AdamField.NUMEL] * is_bad).argmax()]
            lost = Verdict("optimizer_state_non_finite", None, None, "error", largest)
            verdicts.append(lost.given(count=int(is_bad.sum())))
        return first_of_each_kind(verdicts)


def _groups_of_adam(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups whose steps are those of Adam."""
    # LAMB, ADOPT and Prodigy keep the same states, but make other steps. D-Adaptation multiplies
    # the learning rate by an estimate `d`. Adan and CAME have three decay rates.
    if not any("Adam" in kind.__name__ for kind in type(optimizer).__mro__):
        return []
    groups = ((group, group.get("betas", ())) for group in optimizer.param_groups)
    return [
        group
        for group, betas in groups
        if len(betas) == 2 and isinstance(group.get("eps"), int | float) and "d" not in group
    ]


def _settings(group: dict[str, Any]) -> dict[str, float]:
    """Return the settings of a group that judgements depend on."""
    clip = group.get("clip_update_rms") or math.inf
    return {"beta2": float(group["betas"][1]), "eps": float(group["eps"]), "clip": clip}
