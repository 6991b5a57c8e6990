"""`AdamStateMonitor`: sees Adam's second moments starve before the step that they let explode."""

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.callbacks._rules.adam import (
    AdamField,
    AdamNumbers,
    AdamStateRule,
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
    """Warns of Adam's second moments that starve, sink below epsilon, or let updates explode.

    After 5000 steps without gradient the old gradient makes an update 11 times as long as before.
    Sampled right before a step. What each rule means: docs/callbacks/adam-state-monitor.md.

    Example: `Trainer(callbacks=AdamStateMonitor(every_n_steps=50))`

    Args:
        max_update_rms: Warns where the RMS of a tensor is above, if it is also 1.5 times above
            the highest of the first samples and 3 times above the median of the newest 32. For a
            tensor of n values it is multiplied by 1 + 10 / sqrt(n), as few values scatter more.
        max_below_epsilon: Warns where `sqrt(v_hat) < eps` for a larger share of a tensor than
            this, above the usual; there epsilon sets the step, and Adam adapts no more.
        zero_run_steps: Warns when a tensor that had gradients has had none for so many steps.
        min_ratio: Warns where the norm of the update is a smaller part of that of the weights.
        max_ratio: Warns where it is a larger one.
        max_stagnant: Warns where the update leaves a larger share of the weights in fp16 or bf16
            as they are, as it is below half a unit in their last place.
        every_n_steps: Steps between two samples; a fifth of it for the first samples.
        baseline_samples: Samples at the start that tell what is usual.
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
        # Under their own names, of which `state_key` is made.
        vars(self).update(limits)
        self._first: list[str] = []  # tensors to name first
        self._unwatched: set[str] = set()  # classes of optimizers that were warned of
        self._rule = AdamStateRule(baseline_samples=baseline_samples, **limits)
        self._until = 0  # the last step to sample, whatever is due

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        embeddings = [
            as_written(f"{path}.weight")
            for path, module in pl_module.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        ]
        # Shared weights have one name for all their places.
        names = list(dict.fromkeys(parameter_names(pl_module).values()))
        self._until = 0
        # In embeddings the RMS rises first, 1 to 8 steps before the loss (arXiv:2304.13013).
        self._first = [*embeddings, *names[:1], *names[-2:]]
        groups = [group for each in trainer.optimizers for group in each.param_groups]
        if not any(map(_is_of_adam, groups)):
            rank_zero_warn(usage("no_adam"))

    @override
    def observe(self, step: TrainingStep) -> Tensor | None:
        # Also until states are there, and after a high RMS.
        if step.facts.step > self._until and not self.is_due(step.facts.step):
            return None
        optimizer, found = step.optimizer, step.found
        groups = [group for group in optimizer.param_groups if _is_of_adam(group)]
        known = {id(p) for group in groups for p in group["params"]}
        chosen = [i for i, p in enumerate(found.parameters) if id(p) in known]
        if not is_sharded(step.trainer):
            # With shards a rank may hold no part of a parameter, and all must send the same rows.
            chosen = [i for i in chosen if has_second_moments(optimizer, found.parameters[i])]
        name, states = type(optimizer).__name__, quantized_states(optimizer)
        if states and name not in self._unwatched:
            self._unwatched.add(name)
            rank_zero_warn(usage("quantized", states=", ".join(states), optimizer=name))
        if not chosen:
            if groups and not optimizer.state:  # no step has been made yet
                self._until = step.facts.step + 1
            return None
        plugin = step.trainer.precision_plugin
        gradients = [found.gradients[i] for i in chosen]
        parameters = [found.parameters[i] for i in chosen]
        return step.gather(
            adam_statistics(
                optimizer,
                parameters,
                gradients,
                found.unscale,
                keeps_rounding=getattr(plugin, "write_back", "nearest") != "nearest",
            ),
            shards_only=True,
            names=[found.names[i] for i in chosen],
            beta2=float(groups[0]["betas"][1]),
            eps=float(groups[0]["eps"]),
        )

    @override
    def judge(self, sample: Sample) -> list[Verdict]:
        names, facts = sample.context["names"], sample.facts
        # Columns are sums, so that the shards of ranks add up to the whole.
        sums_NK = sample.array.sum(axis=0)
        sums_NK[:, AdamField.STEP] = sample.array[:, :, AdamField.STEP].max(axis=0)
        if not sums_NK[:, AdamField.STEP].any():  # there were no states yet: sample the next step
            self._until = facts.step + 1
            return []
        tensors = [AdamNumbers(name, row) for name, row in zip(names, sums_NK, strict=True)]
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
            facts.step,
            [t for t in tensors if t.is_judged],  # what is not finite is for other monitors
            rate=facts.lr,
            beta2=sample.context["beta2"],
            eps=sample.context["eps"],
            first=self._first,
        )
        if self._rule.wants_more:
            # A sample arrives a step or two late, so that one of the next four is a second one.
            self._until, self._rule.wants_more = facts.step + 4, False
        is_bad = sums_NK[:, AdamField.BAD_STATE] > 0
        if is_bad.any():
            # One alarm for all: the largest of them names the place.
            largest = names[(sums_NK[:, AdamField.NUMEL] * is_bad).argmax()]
            lost = Verdict("optimizer_state_non_finite", None, None, "error", largest)
            verdicts.append(replace(lost, numbers={"count": int(is_bad.sum())}))
        return first_of_each_kind(verdicts)


def _is_of_adam(group: dict[str, Any]) -> bool:
    return "betas" in group and "eps" in group
